"""Random inputs of block_sparse_attn and coarse_attn."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_ext.reference.block_sparse import BLOCK, blocks
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN

#: Default sizes of make_heads and make_block_inputs, named as the shapes of block_sparse_attn.
B, H, H_KV, N_Q, N_KV, D, M = 1, 4, 2, 100, 200, 64, 3


@dataclass
class BlockInputs:
    """The tensors that dsa_ext.block_sparse_attn takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    q2k_index: Tensor
    q2k_num: Tensor
    kv_block_size: Tensor

    def lists(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q2k_index, self.q2k_num, self.kv_block_size

    def leaves(self) -> list[Tensor]:
        return [t.requires_grad_() for t in (self.q, self.k, self.v)]


def make_heads(
    batch: int = B,
    heads: int = H,
    kv_heads: int = H_KV,
    n_q: int = N_Q,
    n_kv: int = N_KV,
    dim: int = D,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> list[Tensor]:
    """Random queries, keys and values: the inputs of dsa_ext.coarse_attn."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, n_q, dim), *((batch, kv_heads, n_kv, dim),) * 2
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(device, dtype) for x in shapes]


def make_block_inputs(
    batch: int = B,
    heads: int = H,
    kv_heads: int = H_KV,
    n_q: int = N_Q,
    n_kv: int = N_KV,
    dim: int = D,
    slots: int = M,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> BlockInputs:
    """Random inputs. Every third slot of a list names no block, and some counts and sizes are out of range."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=generator, dtype=torch.int32)

    kv_blocks = blocks(n_kv)
    index = integers(0, kv_blocks, batch, heads, blocks(n_q), slots)
    bad = torch.tensor([INT32_MIN, -1, kv_blocks, INT32_MAX], dtype=torch.int32)
    index[..., 2::3] = bad[integers(0, 4, *index[..., 2::3].shape).long()]
    number = integers(-1, slots + 2, batch, heads, blocks(n_q))
    size = integers(-9, BLOCK + 10, kv_blocks)
    k_and_v = (random(batch, kv_heads, n_kv, dim) for _ in range(2))
    tensors = (random(batch, heads, n_q, dim), *k_and_v, index, number, size)
    return BlockInputs(*(t.to(device) for t in tensors))
