"""The lightning indexer over a paged cache of keys: its scores and the selection, for decoding."""

import torch
from torch import Tensor


def indexer_logits_paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    *,
    max_len: int | None = None,
    clean: bool = True,
) -> Tensor:
    """Scores of the lightning indexer for keys in a paged cache: :func:`indexer_logits` when decoding.

    Key t of sequence b is key t % page of the block block_table[b, t // page]. Query n of sequence b sees the first
    context_lens[b] - N + 1 + n keys, or context_lens[b, n]. For these::

        logits[b * N + n, t] = scale[t] * sum_h relu(q[b, n, h].k[t]) * weights[b * N + n, h]

    with scale 1 for bf16, and -inf for every other column. A length that is negative counts as 0, one above `max_len`
    or above what the table holds as that. A key whose block is not in [0, blocks) is never read, and has -inf. On a GPU
    logits are bitwise equal to those of :func:`indexer_logits` for the same keys in one tensor, whatever else is in the
    batch.

    Args:
        q: queries [B, N, Hi, Di]: float8_e4m3fn or bf16, on the CPU also fp32 and float64. N is 1 to 6; Hi is 8, 16, 32
            or 64; Di is 64 or 128.
        k_cache: keys [blocks, page, Di], like q. For float8_e4m3fn uint8 [blocks, page, Di + 4]: each page holds the
            page * Di bytes of its keys, followed by page scales in fp32; `page` is a multiple of 4. With a dimension of
            size 1 after `page` it is accepted too.
        weights: weight per head [B * N, Hi], fp32 (float64 for float64 inputs), including any factor on q.k: for
            float8_e4m3fn the scale of q[b, n, h].
        context_lens: keys that a sequence's last query sees [B], or keys that each query sees [B, N], int32.
        block_table: blocks of the cache that hold each sequence's keys [B, pages], int32.
        max_len: number of columns of the result, by default pages * page.
        clean: write -inf where a query sees no key. If False, entries from a query's length on are unspecified.

    Returns:
        logits [B * N, max_len], fp32 (float64 for float64 inputs), with a row stride that is a multiple of 4 elements.
        Not differentiable.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; the layout of the cache is that of DeepGEMM.
    """
    result: Tensor = torch.ops.dsa.indexer_logits_paged.default(
        q, _three_dimensional(k_cache), weights, context_lens, block_table, max_len, clean
    )
    return result


def indexer_topk_paged(
    q: Tensor,
    k_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    topk: int,
    *,
    return_slots: bool = False,
) -> tuple[Tensor, Tensor]:
    """Selects the keys for each query: :func:`topk_select` of :func:`indexer_logits_paged`, without holding the logits
    of all sequences.

    ::

        logits = indexer_logits_paged(q, k_cache, weights, context_lens, block_table)
        starts = torch.zeros(B * N, dtype=torch.int32, device=q.device)
        n = torch.arange(N, dtype=torch.int32, device=q.device)
        ends = (context_lens[:, None] - N + 1 + n).flatten()  # for context_lens [B]
        indices, values = topk_select(logits, starts, ends, topk)  # page_table=block_table with return_slots

    Args:
        q, k_cache, weights, context_lens, block_table: as for :func:`indexer_logits_paged`.
        topk: number of keys to select, from 1 to 4096. It may exceed the number of keys.
        return_slots: return slots of the cache, block * page + t % page, in place of ids t.

    Returns:
        indices [B * N, topk], int32: ids t in ascending order, or their slots in the same order, then -1 if fewer could
        be selected; and values [B * N, topk]: the logit of each, then -inf, in fp32 (float64 for float64 inputs).
        Neither is differentiable.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    result: tuple[Tensor, Tensor] = torch.ops.dsa.indexer_topk_paged.default(
        q, _three_dimensional(k_cache), weights, context_lens, block_table, topk, return_slots
    )
    return result


def _three_dimensional(k_cache: Tensor) -> Tensor:
    """Without the dimension of one head that serving engines give the cache."""
    return k_cache.squeeze(2) if isinstance(k_cache, Tensor) and k_cache.dim() == 4 else k_cache
