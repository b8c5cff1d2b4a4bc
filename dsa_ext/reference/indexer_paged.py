"""The indexer's scores and selection of keys in a paged cache, in plain PyTorch, on any device.

Letters: B sequences of N queries each, Hi heads, Di columns per head.
"""

import torch
from torch import Tensor

from dsa_ext.reference.indexer import empty_logits, indexer_logits, topk_select
from dsa_ext.reference.numerics import compute_dtype


def cached_keys(k_cache: Tensor, dim: int) -> tuple[Tensor, Tensor | None]:
    """Keys [blocks, page, Di] and their scales [blocks, page], if the cache has any."""
    if k_cache.dtype != torch.uint8:
        return k_cache, None
    blocks, page, width = k_cache.shape
    pages = k_cache.reshape(blocks, page * width)
    # Copies: the memory of a view may start anywhere.
    keys, scales = (part.clone().flatten() for part in (pages[:, : page * dim], pages[:, page * dim :]))
    return keys.view(torch.float8_e4m3fn).view(blocks, page, dim), scales.view(torch.float32).view(blocks, page)


def query_lengths(context_lens: Tensor, queries: int, most: int) -> Tensor:
    """How many keys each query sees, at most `most`: int64 [B, N]."""
    lengths = context_lens.long()
    if lengths.dim() == 1:
        last = torch.arange(queries, device=lengths.device) - (queries - 1)
        lengths = lengths[:, None] + last
    return lengths.clamp(0, most)


def indexer_logits_paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_len: int | None = None,
) -> Tensor:
    """See :func:`dsa_ext.indexer_logits_paged` for the arguments. Takes any N, Hi and Di.

    Returns logits [B * N, max_len] in fp32 (float64 for float64 inputs), with -inf wherever a query sees no key.
    """
    batch, queries, _, dim = q.shape
    blocks, page = k_cache.shape[:2]
    held = block_table.shape[1] * page
    columns = held if max_len is None else max_len
    keys, scales = cached_keys(k_cache, dim)
    lengths = query_lengths(context_lens, queries, min(columns, held)).int()
    logits = empty_logits(q, batch * queries, columns).fill_(-torch.inf)
    rows, weights = logits.unflatten(0, (batch, queries)), weights.unflatten(0, (batch, queries))
    starts = torch.zeros(queries, dtype=torch.int32, device=q.device)
    for b in range(batch):
        exists = (block_table[b] >= 0) & (block_table[b] < blocks)
        if not exists.any():
            continue
        pages = block_table[b].where(exists, block_table[b][exists][0]).long()
        scale = None if scales is None else scales[pages].flatten()
        seen = indexer_logits(q[b], keys[pages].flatten(0, 1), weights[b], starts, lengths[b], scale)
        seen = seen.masked_fill(~exists.repeat_interleave(page), -torch.inf)
        rows[b, :, :held] = seen[:, :columns]
    return logits


def indexer_topk_paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    topk: int,
    return_slots: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.indexer_topk_paged` for the arguments. Holds the logits of one sequence at a time."""
    batch, queries = q.shape[:2]
    page = k_cache.shape[1]
    lengths = query_lengths(context_lens, queries, block_table.shape[1] * page).int()
    starts = torch.zeros(queries, dtype=torch.int32, device=q.device)
    indices = q.new_empty(batch * queries, topk, dtype=torch.int32)
    values = q.new_empty(batch * queries, topk, dtype=compute_dtype(q))
    for b in range(batch):
        one, run = slice(b, b + 1), slice(b * queries, (b + 1) * queries)
        logits = indexer_logits_paged(q[one], k_cache, weights[run], context_lens[one], block_table[one])
        table = block_table[one] if return_slots else None
        indices[run], values[run] = topk_select(logits, starts, lengths[b], topk, table, page)
    return indices, values
