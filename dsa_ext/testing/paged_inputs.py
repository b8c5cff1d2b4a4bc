"""Random inputs of the indexer's operators on paged caches."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import make_indexer_inputs


@dataclass
class PagedInputs:
    """The tensors that dsa_ext.indexer_logits_paged takes."""

    q: Tensor
    k_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor


def make_paged_inputs(
    batch: int = 3,
    queries: int = 2,
    keys: int = 150,
    heads: int = 8,
    dim: int = 64,
    page: int = 64,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    device: torch.device | str = "cpu",
    spare: int = 2,
    seed: int = 0,
) -> PagedInputs:
    """Every sequence has `keys` keys, in blocks of a random order; `spare` blocks belong to none."""
    pages = -(-keys // page)
    blocks = batch * pages + spare
    flat = make_indexer_inputs(batch * queries, blocks * page, heads, dim, dtype=dtype, device=device, seed=seed)
    cache = flat.k.view(blocks, page, dim)
    if flat.k_scale is not None:
        cache = packed_pages(cache, flat.k_scale.view(blocks, page))
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.randperm(blocks, generator=generator, device=device)
    return PagedInputs(
        q=flat.q.view(batch, queries, heads, dim),
        k_cache=cache,
        weights=flat.weights,
        context_lens=torch.full((batch,), keys, dtype=torch.int32, device=device),
        block_table=order[: batch * pages].view(batch, pages).int(),
    )


def packed_pages(keys: Tensor, scales: Tensor) -> Tensor:
    """e4m3 keys [blocks, page, Di] and their scales [blocks, page] as a cache, uint8 [blocks, page, Di + 4]."""
    blocks, page, dim = keys.shape
    parts = [part.contiguous().view(torch.uint8).flatten(1) for part in (keys, scales)]
    return torch.cat(parts, 1).view(blocks, page, dim + 4)


def gathered(inputs: PagedInputs, sequence: int) -> tuple[Tensor, Tensor | None]:
    """The keys [pages * page, Di] of a sequence whose blocks all exist, and their scales."""
    keys, scales = reference.cached_keys(inputs.k_cache, inputs.q.shape[3])
    blocks = inputs.block_table[sequence].long()
    return keys[blocks].flatten(0, 1), None if scales is None else scales[blocks].flatten()


def seen_keys(inputs: PagedInputs) -> Tensor:
    """Which keys of the cache some query sees: bool [blocks, page]."""
    blocks, page = inputs.k_cache.shape[:2]
    pages = inputs.block_table.shape[1]
    longest = reference.query_lengths(inputs.context_lens, inputs.q.shape[1], pages * page).amax(1)
    place = torch.arange(pages * page, device=longest.device).view(pages, page)
    seen = place < longest[:, None, None]  # [B, pages, page]
    exists = (inputs.block_table >= 0) & (inputs.block_table < blocks)
    result = torch.zeros(blocks, page, dtype=torch.int32, device=longest.device)
    result.index_add_(0, inputs.block_table[exists].long(), seen[exists].int())
    return result > 0


def poisoned(inputs: PagedInputs) -> PagedInputs:
    """NaN in the keys, and in the scales, that no query sees."""
    unseen = ~seen_keys(inputs)
    keys, scales = reference.cached_keys(inputs.k_cache, inputs.q.shape[3])
    keys = keys.float().masked_fill(unseen[..., None], torch.nan).to(keys.dtype)
    if scales is None:
        return replace(inputs, k_cache=keys)
    return replace(inputs, k_cache=packed_pages(keys, scales.masked_fill(unseen, torch.nan)))
