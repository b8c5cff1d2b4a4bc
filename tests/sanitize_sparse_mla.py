"""Small calls of every variant of the sparse_mla kernels, for compute-sanitizer. Exits with an error on a wrong result.

compute-sanitizer --tool memcheck python tests/sanitize_sparse_mla.py
"""

import math

import torch

import dsa_ext
from dsa_ext.testing.inputs import make_inputs, spoil_indices, strided_copy
from dsa_ext.testing.tolerances import backward_errors, forward_errors

# (S, S_kv, H, G, K, Dqk): one tile, several tiles, partial heads, groups, keys split over CTAs, nothing to see.
SHAPES = (
    (3, 100, 64, 1, 64, 576),
    (3, 100, 128, 1, 200, 512),
    (2, 100, 3, 1, 70, 576),
    (2, 100, 16, 1, 130, 512),
    (2, 100, 34, 2, 65, 576),
    (1, 600, 17, 1, 520, 576),
    (2, 0, 65, 1, 5, 576),
)


def main() -> None:
    for seq, s_kv, heads, groups, topk, d_qk in SHAPES:
        inputs = make_inputs(2, seq, s_kv, heads, groups, topk, d_qk, device="cuda")
        q, kv = strided_copy(inputs.q, swap_leading=True), strided_copy(inputs.kv)
        indices = spoil_indices(inputs.indices, s_kv)
        lengths = torch.full((2, seq), topk, dtype=torch.int32, device="cuda")
        lengths[0, 0] = 0
        sink = torch.linspace(-1, 1, heads, device="cuda")
        sink[0] = math.inf
        for options in (
            {"causal": False},
            {"q_start": 50, "kv_stride": 2, "topk_length": lengths, "attn_sink": sink},
        ):
            out, lse = dsa_ext.sparse_mla(q, kv, indices, return_lse=True, **options)
            forward_errors(out, lse, q, kv, indices, **options).check()
            for deterministic in (False, True):
                grads = torch.ops.dsa.sparse_mla_bwd(
                    out, q, kv, out, lse, indices, **options, dlse=lse.clamp(min=0), deterministic=deterministic
                )
                backward_errors(grads, out, q, kv, out, lse, indices, lse.clamp(min=0), **options).check()
        print(f"S={seq} S_kv={s_kv} H={heads} G={groups} K={topk} Dqk={d_qk}: correct")


if __name__ == "__main__":
    main()
