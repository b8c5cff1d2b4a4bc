"""Errors that block_sparse_attn_fwd and coarse_attn_fwd share."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext.testing.block_inputs import H_KV, N_KV, N_Q, B, D, H


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


#: Changes of the arguments, and the message without the operator's name.
HEAD_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": zeros(H, N_Q, D)}, "q must be bfloat16 [B, H, Nq, D], got bfloat16 [4, 100, 64]"),
    ({"q": zeros(B, H, N_Q, D).half()}, "q must be bfloat16 [B, H, Nq, D], got float16 [1, 4, 100, 64]"),
    (
        {"k": zeros(2, H_KV, N_KV, D)},
        "k must be bfloat16 [B=1, Hkv, Nkv, D=64], got bfloat16 [2, 2, 200, 64]",
    ),
    (
        {"v": zeros(B, H_KV, 3, D)},
        "v must be bfloat16 [B=1, Hkv=2, Nkv=200, D=64], got bfloat16 [1, 2, 3, 64]",
    ),
    (
        {"q": zeros(B, H, N_Q, 96), "k": zeros(B, H_KV, N_KV, 96), "v": zeros(B, H_KV, N_KV, 96)},
        "q's head dimension must be 64 or 128, got 96",
    ),
    (
        {"k": zeros(B, 3, N_KV, D), "v": zeros(B, 3, N_KV, D)},
        "q's heads must be a multiple of k's, got 4 and 3",
    ),
    ({"sm_scale": float("inf")}, "sm_scale must be from -2^127 to 2^127, got inf"),
]
