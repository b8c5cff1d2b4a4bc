"""Sparse attention of heads with keys and values of their own."""

import torch

from dsa_ext.testing.calls import with_forward
from dsa_ext.testing.inputs import make_inputs, spoil_indices, strided_copy
from sanitized.calls import BF16, Args, checked, random

# (B, S, S_kv, H, K), options: one tile; several tiles, partial ones; no visible key in some rows; one key; windows,
# the last one of which hides all keys.
SPARSE_MHA: tuple[tuple[tuple[int, ...], Args], ...] = (
    ((1, 64, 64, 1, 64), {}),
    ((2, 130, 300, 3, 70), {"q_start": 170}),
    ((1, 300, 270, 2, 9), {}),
    ((1, 3, 700, 5, 200), {"causal": False}),
    ((2, 1, 1, 1, 1), {"causal": False}),
    ((1, 400, 700, 2, 600), {"q_start": 290, "window": 150}),
    ((1, 64, 300, 1, 40), {"q_start": 1000, "window": 5}),
)


def _args(batch: int, seq: int, s_kv: int, heads: int, topk: int) -> Args:
    q = strided_copy(random(batch, seq, heads, 192).to(BF16), swap_leading=True)
    k, v = random(batch, s_kv, heads, 256, seed=1).to(BF16).split(128, dim=-1)
    indices = make_inputs(batch, seq, s_kv, 1, 1, topk, 576).indices
    k_rope = strided_copy(random(batch, s_kv, 64, seed=2).to(BF16))
    return {"q": q, "k": k, "k_rope": k_rope, "v": v, "indices": spoil_indices(indices, s_kv)[:, :, 0]}


def sparse_mha() -> None:
    for sizes, options in SPARSE_MHA:
        args = _args(*sizes) | options
        _, lse = checked("sparse_mha_fwd", **args)
        checked("sparse_mha_dist", **{name: value for name, value in args.items() if name != "v"}, lse=lse)
        out_shape = (*args["q"].shape[:3], 128)
        args |= {"dout": random(*out_shape, seed=4).to(BF16), "dlse": random(*out_shape[:3], seed=5)}
        checked("sparse_mha_bwd", **with_forward("sparse_mha_bwd", args))
    bounds = {
        "starts": torch.tensor([[0, 5, 9]], dtype=torch.int32),
        "ends": torch.tensor([[9, 5, 600]], dtype=torch.int32),
    }
    checked("sparse_mha_fwd", **_args(1, 3, 700, 5, 200), **bounds)
