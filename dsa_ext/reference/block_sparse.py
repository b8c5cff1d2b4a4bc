"""Attention of blocks of queries to listed blocks of keys in plain PyTorch, forward and backward, on any device.

Arithmetic is fp32, or float64 for float64 inputs. Blocks of queries are processed in chunks, which bounds the memory
needed in addition to the tensors themselves.

Letters: B batch, H heads, Hkv key heads, Nq queries, Nkv keys, D columns per head, M listed blocks; Mq and Mkv blocks
of queries and keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_ext.reference.layout import empty_rows_like
from dsa_ext.reference.numerics import compute_dtype, raised

#: Queries per block, and keys per block.
BLOCK = 64
#: Maximum number of elements in the temporaries of one chunk.
_CHUNK_ELEMENTS = 2**26


def blocks(length: int) -> int:
    """Number of blocks of `length` queries or keys; the last block may be shorter."""
    return -(-length // BLOCK)


def listed_blocks(q2k_index: Tensor, q2k_num: Tensor, kv_blocks: int) -> Tensor:
    """Which slots of q2k_index name a block and are in use: bool [B, H, Mq, M]."""
    used = torch.arange(q2k_index.shape[3], device=q2k_index.device) < q2k_num[..., None]
    return used & (q2k_index >= 0) & (q2k_index < kv_blocks)


def valid_keys(k: Tensor, kv_block_size: Tensor | None) -> Tensor:
    """Which keys of each block are valid: bool [Mkv, 64]."""
    length = k.shape[2]
    valid = (torch.arange(blocks(length) * BLOCK, device=k.device) < length).view(-1, BLOCK)
    if kv_block_size is not None:
        valid &= torch.arange(BLOCK, device=k.device) < kv_block_size[:, None]
    return valid


@dataclass
class BlockChunk:
    """Consecutive blocks of queries with their gathered keys. Slots that are not visible hold zeros."""

    queries: slice
    q: Tensor  # [B, H, m, 64, D]
    keys: Tensor  # [B, H, m, M * 64, D]
    values: Tensor  # like keys
    visible: Tensor  # [B, H, m, 1, M * 64]
    rows: Tensor  # [B, H, m, M], blocks of k flattened to [B * Hkv * (Mkv + 1), 64, D]

    def scores(self, sm_scale: float) -> Tensor:
        return (self.q @ self.keys.mT * sm_scale).masked_fill(~self.visible, -torch.inf)


def cut(x: Tensor, count: int) -> Tensor:
    """Cuts [B, H, N, D] into blocks [B, H, count, 64, D], zero-padded."""
    missing = count * BLOCK - x.shape[2]
    padded: Tensor = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return padded.reshape(*x.shape[:2], count, BLOCK, x.shape[3])


def uncut(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of cut, in the layout and dtype of `like` [B, H, N, D]."""
    return empty_rows_like(like).copy_(x.flatten(2, 3)[:, :, : like.shape[2]])


def block_chunks(
    q: Tensor, k: Tensor, v: Tensor, q2k_index: Tensor, q2k_num: Tensor, kv_block_size: Tensor | None
) -> Iterator[BlockChunk]:
    batch, heads, length, dim = q.shape
    kv_heads, kv_length = k.shape[1:3]
    kv_blocks, slots = blocks(kv_length), q2k_index.shape[3]
    dtype = compute_dtype(q)
    q_cut = cut(q, blocks(length))
    # Slots that name no block read a block of zeros after the last one. Keys that are not valid are replaced by zeros.
    seen = torch.nn.functional.pad(valid_keys(k, kv_block_size), (0, 0, 0, 1))
    k_cut, v_cut = (cut(x, kv_blocks + 1).masked_fill(~seen[..., None], 0).flatten(0, 2) for x in (k, v))
    ids = torch.where(listed_blocks(q2k_index, q2k_num, kv_blocks), q2k_index, kv_blocks).long()
    b = torch.arange(batch, device=q.device)[:, None, None, None]
    h = torch.arange(heads, device=q.device)[:, None, None] // (heads // kv_heads)
    rows = (b * kv_heads + h) * (kv_blocks + 1) + ids

    step = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * slots * BLOCK * (2 * dim + 2 * BLOCK)))
    for begin in range(0, blocks(length), step):
        run = slice(begin, begin + step)
        yield BlockChunk(
            queries=run,
            q=q_cut[:, :, run].to(dtype),
            keys=k_cut[rows[:, :, run]].to(dtype).flatten(3, 4),
            values=v_cut[rows[:, :, run]].to(dtype).flatten(3, 4),
            visible=seen[ids[:, :, run]].flatten(3, 4)[..., None, :],
            rows=rows[:, :, run],
        )


def block_sparse_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = None,
    sm_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.block_sparse_attn` for the arguments. Takes any D.

    Returns out, like q, and lse [B, H, Nq] in fp32 (float64 for float64 inputs).
    """
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    count = blocks(q.shape[2])
    out = q.new_empty(*q.shape[:2], count, BLOCK, q.shape[3])
    lse = q.new_empty(*q.shape[:2], count, BLOCK, dtype=compute_dtype(q))
    for chunk in block_chunks(q, k, v, q2k_index, q2k_num, kv_block_size):
        scores = chunk.scores(scale)
        sums = scores.logsumexp(-1)
        lse[:, :, chunk.queries] = sums
        # Normalized by their own sum: if scores are large, lse is too coarse to tell how many keys share the mass.
        probs = scores.softmax(-1).masked_fill((sums == -torch.inf)[..., None], 0)
        out[:, :, chunk.queries] = (probs @ chunk.values).to(q.dtype)
    return uncut(out, q), lse.flatten(2)[..., : q.shape[2]].contiguous()


def block_sparse_attn_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = None,
    sm_scale: float | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of block_sparse_attn_fwd: dq, dk and dv, like q, k and v."""
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    dtype = compute_dtype(q)
    count, kv_blocks = blocks(q.shape[2]), blocks(k.shape[2])
    # dS = P (dP - delta), where delta includes the gradient that arrives through lse.
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    seen = lse != -torch.inf
    delta, row_lse = (cut(t.where(seen, 0)[..., None].to(dtype), count) for t in (delta, raised(lse)))
    dout_cut = cut(dout.where(seen[..., None], 0), count)
    dq = q.new_empty(*q.shape[:2], count, BLOCK, q.shape[3])
    dk, dv = (q.new_zeros(*k.shape[:2], kv_blocks + 1, BLOCK, q.shape[3], dtype=dtype) for _ in range(2))
    for chunk in block_chunks(q, k, v, q2k_index, q2k_num, kv_block_size):
        run = chunk.queries
        # Masks, because 0 * NaN is NaN: it would reach keys that are not valid, or that the query does not see.
        probs = torch.exp(chunk.scores(scale) - row_lse[:, :, run]).masked_fill(~chunk.visible, 0)
        upstream = dout_cut[:, :, run].to(dtype)
        dscores = probs * (upstream @ chunk.values.mT - delta[:, :, run]) * scale
        dscores = dscores.masked_fill(~chunk.visible, 0)
        dq[:, :, run] = (dscores @ chunk.keys).to(q.dtype)
        for grad, block_grad in ((dk, dscores.mT @ chunk.q), (dv, probs.mT @ upstream)):
            block_grad = block_grad.masked_fill(~chunk.visible.mT, 0)
            grad.flatten(0, 2).index_add_(0, chunk.rows.flatten(), block_grad.reshape(-1, BLOCK, q.shape[3]))

    return uncut(dq, q), uncut(dk, k), uncut(dv, v)
