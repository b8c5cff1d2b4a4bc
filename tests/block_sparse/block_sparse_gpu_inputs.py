"""Inputs of block-sparse attention on a GPU."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext.reference.block_sparse import blocks
from dsa_ext.testing.block_inputs import BlockInputs, make_block_inputs


def make_gpu(**sizes: Any) -> BlockInputs:
    return make_block_inputs(dtype=torch.bfloat16, device="cuda", **sizes)


def far_apart() -> tuple[BlockInputs, Tensor, Tensor, Tensor, Tensor]:
    """Inputs with 64 keys; k and v that end in the same 64, whose last head starts more than 2^31 elements after the
    first; q2k_index and q2k_num that list the last block of that k alone."""
    heads, n_kv, dim = 9, 2**21, 128
    x = make_gpu(heads=heads, kv_heads=heads, n_q=100, n_kv=64, dim=dim)
    k = torch.empty(1, heads, n_kv, dim, device="cuda", dtype=torch.bfloat16)
    v = torch.empty_like(k)
    k[:, :, -64:], v[:, :, -64:] = x.k, x.v
    index = torch.full((1, heads, 2, 1), blocks(n_kv) - 1, device="cuda", dtype=torch.int32)
    number = torch.ones(1, heads, 2, device="cuda", dtype=torch.int32)
    return x, k, v, index, number
