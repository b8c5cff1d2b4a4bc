"""Inputs of the indexer's operators on paged caches on a GPU, and what indexer_logits makes of the same keys."""

from dataclasses import replace
from typing import Any

import torch
from indexer_gpu_inputs import DEVICE, LOGITS
from torch import Tensor
from torch.nn.functional import pad

from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN
from dsa_ext.testing.paged_inputs import PagedInputs, gathered, make_paged_inputs

PAGED = torch.ops.dsa.indexer_logits_paged.default
TOPK_PAGED = torch.ops.dsa.indexer_topk_paged.default


def make_paged(batch: int, queries: int, keys: int, heads: int = 64, dim: int = 128, **options: Any) -> PagedInputs:
    return make_paged_inputs(batch, queries, keys, heads, dim, device=DEVICE, **options)


def with_lengths(inputs: PagedInputs, kind: str) -> PagedInputs:
    batch, queries = inputs.q.shape[:2]
    held = inputs.block_table.shape[1] * inputs.k_cache.shape[1]
    generator = torch.Generator(DEVICE).manual_seed(batch)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32, device=DEVICE)

    edges = torch.tensor([0, 1, held, INT32_MAX, -1, INT32_MIN, held + 1, 63, 64, 65], dtype=torch.int32, device=DEVICE)
    lengths = {
        "all": torch.full((batch,), held, dtype=torch.int32, device=DEVICE),
        "random": integers(-2, held + 9, batch),
        "per query": integers(-2, held + 9, batch, queries),
        "edges": edges[torch.arange(batch * queries, device=DEVICE) % len(edges)].view(batch, queries),
        "edges of sequences": edges[torch.arange(batch, device=DEVICE) % len(edges)],
        "one": (torch.arange(batch, device=DEVICE) % 7 == 3).int() * held,
        "few": (torch.arange(batch, device=DEVICE) // 2 == batch // 4).int() * held,  # two in the middle
    }[kind]
    return replace(inputs, context_lens=lengths)


def lengths_of(inputs: PagedInputs, columns: int) -> Tensor:
    """int32 [B, N]"""
    held = inputs.block_table.shape[1] * inputs.k_cache.shape[1]
    return reference.query_lengths(inputs.context_lens, inputs.q.shape[1], min(columns, held)).int()


def unpaged(inputs: PagedInputs, columns: int) -> Tensor:
    """The logits by indexer_logits, one sequence at a time. All blocks must exist."""
    batch, queries = inputs.q.shape[:2]
    lengths = lengths_of(inputs, columns)
    rows = []
    for b in range(batch):
        k, k_scale = gathered(inputs, b)
        weights = inputs.weights[b * queries : (b + 1) * queries]
        logits = LOGITS(inputs.q[b], k, weights, torch.zeros_like(lengths[b]), lengths[b], k_scale)
        rows.append(pad(logits, (0, max(0, columns - len(k))), value=-torch.inf)[:, :columns])
    return torch.cat(rows)
