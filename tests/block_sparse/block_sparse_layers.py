"""Layers of block-sparse attention and their inputs, on the CPU."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext.nn import BlockSparseAttention
from dsa_ext.nn.block_sparse import BLOCK

HIDDEN, HEADS, KV_HEADS, DIM = 24, 4, 2, 64
SIZES = [64, 0, 10, 64, 0, 1]


def make_layer(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> BlockSparseAttention:
    """A layer whose attention prefers some blocks, and whose pooling is not the mean."""
    torch.manual_seed(seed)
    options = {"kv_heads": KV_HEADS, "head_dim": DIM, "mode": "topk", "topk": 2, **changes}
    layer = BlockSparseAttention(
        options.pop("hidden_size", HIDDEN), options.pop("heads", HEADS), **options, dtype=dtype
    )
    with torch.no_grad():
        layer.q_proj.weight *= 6
        layer.kv_pool += torch.randn_like(layer.kv_pool) / BLOCK
    return layer


def make_input(length: int, batch: int = 2, hidden: int = HIDDEN, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, hidden, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(layer: BlockSparseAttention, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    """Gradients of a random sum over out, for all parameters and x."""
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    leaves = {"x": x, **dict(layer.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True))
