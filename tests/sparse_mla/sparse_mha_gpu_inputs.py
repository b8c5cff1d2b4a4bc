"""Inputs of sparse multi-head attention on a GPU."""

from typing import Any

import torch
from sparse_mla_gpu_inputs import DEVICE
from torch import Tensor

from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.tolerances import check

FORWARD, BACKWARD = torch.ops.dsa.sparse_mha_fwd.default, torch.ops.dsa.sparse_mha_bwd.default
Args = dict[str, Any]
#: Batch, queries, keys, heads, listed keys.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 128, 128, 1, 128),
    (1, 127, 129, 2, 40),
    (3, 300, 333, 3, 70),
    (1, 65, 3000, 5, 500),
    (2, 130, 9000, 2, 300),
    (2, 700, 64, 2, 9),
    (1, 1500, 1500, 16, 300),
    (1, 500, 2500, 130, 600),
    (1, 3000, 3000, 20, 700),
]
OPTIONS: list[Args] = [{"causal": False}, {}, {"q_start": 100, "sm_scale": -0.05}, {"q_start": 77, "window": 200}]


def make(batch: int, seq: int, s_kv: int, heads: int, topk: int, seed: int = 0, **options: Any) -> Args:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    k, v = random(batch, s_kv, heads, 256).split(128, dim=-1)
    indices = make_inputs(batch, seq, s_kv, 1, 1, topk, 576, device=DEVICE, seed=seed).indices[:, :, 0]
    inputs = {"q": random(batch, seq, heads, 192), "k": k, "k_rope": random(batch, s_kv, 64), "v": v}
    return inputs | {"indices": indices} | options


def with_results(args: Args, seed: int = 3) -> Args:
    out, lse = FORWARD(**args)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator, device=DEVICE).bfloat16()
    dlse = torch.randn(lse.shape, generator=generator, device=DEVICE)
    return {**args, "dout": dout, "out": out, "lse": lse, "dlse": dlse}


def check_both(args: Args) -> tuple[Tensor, ...]:
    """The results of both operators meet the tolerances, and repeat bitwise over memory of NaN."""
    full = with_results(args)
    results = full["out"], full["lse"], *BACKWARD(**full)
    check("sparse_mha_fwd", results[:2], args)
    check("sparse_mha_bwd", results[2:], full)
    assert all(t.is_contiguous() for t in results)
    for _ in range(3):
        poison = torch.full((2**26,), torch.nan, device=DEVICE)
        del poison
        again = *FORWARD(**args), *BACKWARD(**full)
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
    return results
