"""The lightning indexer in plain PyTorch, on any device: scores of keys, their gradients, top-k selection and loss.

Arithmetic is fp32, or float64 for float64 inputs. Queries are processed in chunks, which bounds the memory needed in
addition to the tensors themselves.

Letters: S queries, S_kv keys, Hi heads, Di columns per head; R rows and C columns of logits.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dsa_ext.reference.numerics import compute_dtype, names_one_of

#: Maximum number of elements in each temporary of one chunk of queries.
_CHUNK_ELEMENTS = 2**24
#: What the sum of a row of p counts as, if it is smaller.
SMALLEST_MASS = 1e-20


def inside(starts: Tensor, ends: Tensor, columns: int) -> Tensor:
    """Whether starts[r] <= t < ends[r]: bool [R, columns]. The bounds may be any integers."""
    t = torch.arange(columns, device=starts.device)
    return (t >= starts[:, None]) & (t < ends[:, None])


def runs(rows: int, row_elements: int) -> Iterator[slice]:
    """Splits rows into runs of at most _CHUNK_ELEMENTS elements, or of one row."""
    step = max(1, _CHUNK_ELEMENTS // max(1, row_elements))
    for i in range(-(-rows // step)):  # so that a compiled graph depends on the number of runs only
        yield slice(i * step, (i + 1) * step)


def empty_logits(q: Tensor, rows: int, columns: int) -> Tensor:
    """Uninitialized logits [rows, columns] of queries q. In fp32 their rows start 16-byte aligned."""
    return q.new_empty_strided((rows, columns), ((columns + 3) // 4 * 4, 1), dtype=compute_dtype(q))


def indexer_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    k_scale: Tensor | None = None,
    clean: bool = True,  # ignored: without it entries outside the bounds are unspecified, so may be -inf
) -> Tensor:
    """See :func:`dsa_ext.indexer_logits` for the arguments. Takes any Hi and Di.

    Returns logits [S, S_kv] in fp32 (float64 for float64 inputs).
    """
    seq, heads, _ = q.shape
    s_kv = k.shape[0]
    dtype = compute_dtype(q)
    keys = k.to(dtype).mT
    logits = empty_logits(q, seq, s_kv)
    for run in runs(seq, heads * s_kv):
        scores = (q[run].to(dtype) @ keys).relu_()  # [s, Hi, S_kv]
        sums = (weights[run, None] @ scores)[:, 0]
        if k_scale is not None:
            sums *= k_scale
        logits[run] = sums.masked_fill(~inside(starts[run], ends[run], s_kv), -torch.inf)
    return logits


def indexer_logits_bwd(
    dlogits: Tensor, q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of indexer_logits without `k_scale`: dq, dk and dweights, like q, k and weights.

    Entries of `dlogits` [S, S_kv] outside the bounds have no effect. Neither have keys outside all bounds, or queries
    with empty bounds, whatever they hold.
    """
    seq, heads, _ = q.shape
    s_kv = k.shape[0]
    dtype = compute_dtype(q)
    keys = k.to(dtype)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.zeros_like(k, dtype=dtype, memory_format=torch.contiguous_format)
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for run in runs(seq, heads * s_kv):
        visible = inside(starts[run], ends[run], s_kv)
        # Masks, because 0 * NaN is NaN.
        nothing = ~visible.any(1)[:, None, None]
        chunk_q, weight = (x.to(dtype).masked_fill(nothing, 0) for x in (q[run], weights[run, :, None]))
        chunk_keys = keys.masked_fill(~visible.any(0)[:, None], 0)
        weighted = chunk_q * weight
        # Values that are not finite reach only the queries and keys that see them, but also through a product with 0.
        reaches_q = visible.to(dtype) @ (~chunk_keys.isfinite()).to(dtype) > 0
        reaches_keys = visible.mT.to(dtype) @ (~weighted.isfinite()).any(1).to(dtype) > 0
        finite_weighted, finite_keys = (x.masked_fill(~x.isfinite(), 0) for x in (weighted, chunk_keys))
        scores = chunk_q @ chunk_keys.mT  # [s, Hi, S_kv]
        absent = ~visible[:, None] | (scores <= 0)
        dlogit, scores = dlogits[run, None].masked_fill(absent, 0), scores.masked_fill(absent, 0)
        dweights[run] = (dlogit * scores).sum(-1).masked_fill(reaches_q.any(1, keepdim=True), torch.nan)
        dq_unweighted = (dlogit @ finite_keys).masked_fill(reaches_q[:, None], torch.nan)
        dq[run] = dq_unweighted * weight
        dk += (dlogit.flatten(0, 1).mT @ finite_weighted.flatten(0, 1)).masked_fill(reaches_keys, torch.nan)
    return dq, dk.to(k.dtype), dweights


def topk_select(
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    page_table: Tensor | None = None,
    page_size: int = 64,
    row_to_sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.topk_select` for the arguments. Takes any dtype, strides and topk."""
    rows, columns = logits.shape
    indices = logits.new_full((rows, topk), -1, dtype=torch.int32)
    values = logits.new_full((rows, topk), -torch.inf)
    count = min(columns, topk)
    for run in runs(rows, columns):
        row = logits[run]
        selectable = inside(starts[run], ends[run], columns) & (row > -torch.inf)  # False for NaN
        ranked = row + 0.0  # -0.0 + 0.0 is +0.0
        ranked, ids = ranked.masked_fill(~selectable, -torch.inf).sort(dim=1, descending=True, stable=True)
        best = ids[:, :count].masked_fill(ranked[:, :count] == -torch.inf, columns).sort(dim=1).values
        empty = best == columns
        indices[run, :count] = best.masked_fill(empty, -1).int()
        values[run, :count] = row.gather(1, best.masked_fill(empty, 0)).masked_fill(empty, -torch.inf)
    if page_table is not None:
        indices = cache_slots(indices, page_table, page_size, row_to_sequence)
    return indices, values


def cache_slots(ids: Tensor, page_table: Tensor, page_size: int, row_to_sequence: Tensor | None) -> Tensor:
    """The slots of a paged cache that hold the tokens `ids` [R, topk] of each row's sequence: -1 for a negative id, one
    that no page of the table holds, and a slot that is negative or above the largest int32."""
    rows, (sequences, pages) = len(ids), page_table.shape
    page_size = max(1, page_size)  # pages of a cache without memory
    if row_to_sequence is None:
        row_to_sequence = torch.arange(rows, device=ids.device) // max(1, rows // max(1, sequences))
    sequence, page = row_to_sequence[:, None].long(), ids.long() // page_size
    known = (sequence >= 0) & (sequence < sequences) & (page >= 0) & (page < pages)
    entries = torch.cat([page_table.flatten(), page_table.new_full((1,), -1)])
    entry = entries[torch.where(known, sequence * pages + page, sequences * pages)].long()
    slot = entry * page_size + ids % page_size
    return torch.where((entry >= 0) & (slot < 2**31), slot, -1).int()


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.indexer_topk` for the arguments. Holds the logits of one chunk of queries at a time."""
    seq, heads, _ = q.shape
    indices = q.new_empty(seq, topk, dtype=torch.int32)
    values = q.new_empty(seq, topk, dtype=compute_dtype(q))
    for run in runs(seq, heads * k.shape[0]):
        ks, ke = starts[run], ends[run]
        logits = indexer_logits(q[run], k, weights[run], ks, ke, k_scale)
        indices[run], values[run] = topk_select(logits, ks, ke, topk)
    return indices, values


def listed_rows(k: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys with a row of zeros after them [S_kv + 1, Di]; the row that each id names [S, K], that of zeros if it
    names no key; and which ids name a key [S, K]."""
    named = names_one_of(indices, len(k))
    return torch.cat([k, k.new_zeros(1, k.shape[1])]), torch.where(named, indices, len(k)).long(), named


def indexer_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """See :func:`dsa_ext.indexer_scores` for the arguments. Takes any Hi and Di.

    Returns scores [S, K] in fp32 (float64 for float64 inputs).
    """
    dtype = compute_dtype(q)
    padded, rows, named = listed_rows(k, indices)
    scores = q.new_empty(indices.shape, dtype=dtype)
    for run in runs(len(q), indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys = padded[rows[run]].to(dtype)
        products = (q[run].to(dtype) @ keys.mT).relu_()  # [s, Hi, K]
        scores[run] = (weights[run, None] @ products)[:, 0].masked_fill(~named[run], -torch.inf)
    return scores


def indexer_scores_bwd(
    dscores: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of indexer_scores: dq, dk and dweights, like q, k and weights.

    Entries of `dscores` [S, K] whose id names no key have no effect. Neither have keys that no query lists.

    dk is summed with `index_add_`: on CUDA the order of the additions, and with it the last bits, differ from call to
    call unless `torch.use_deterministic_algorithms(True)` is set.
    """
    dtype = compute_dtype(q)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    padded, rows, named = listed_rows(k, indices)
    dk = torch.zeros_like(padded, dtype=dtype)
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    for run in runs(len(q), indices.shape[1] * (q.shape[1] + q.shape[2])):
        keys = padded[rows[run]].to(dtype)
        hidden = ~named[run, None]
        nothing = hidden.all(2, keepdim=True)
        chunk_q, weight = (x.to(dtype).masked_fill(nothing, 0) for x in (q[run], weights[run, :, None]))
        products = chunk_q @ keys.mT  # [s, Hi, K]
        absent = hidden | (products <= 0)
        dscore, products = dscores[run, None].masked_fill(absent, 0), products.masked_fill(absent, 0)
        # Keys that are not finite reach the queries that list them, also through a product with 0.
        reaches_q = ~keys.isfinite().all(2).all(1, keepdim=True)
        dweights[run] = (dscore * products).sum(-1).masked_fill(reaches_q, torch.nan)
        dq[run] = dscore @ keys * weight
        dk.index_add_(0, rows[run].flatten(), (dscore.mT @ (chunk_q * weight)).flatten(0, 1))
    return dq, dk[:-1].to(k.dtype), dweights


def indexer_loss(
    scores: Tensor, p: Tensor, valid: Tensor | None = None, row_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """KL(p / sum(p) || softmax(scores)) of each row over the slots that count, times its weight; and its gradient.

    A slot counts if `valid` (when given) is true and the score is not -inf. Rows of weight 0 give 0, whatever they
    hold. Returns loss [R] and dscores [R, K].
    """
    counts = scores != -torch.inf
    if valid is not None:
        counts &= valid
    # Rows in which no slot counts give 0, not NaN.
    log_q = torch.where(counts.any(-1, keepdim=True), scores.masked_fill(~counts, -torch.inf), 0).log_softmax(-1)
    log_q = log_q.masked_fill(~counts, 0)
    mass = p.masked_fill(~counts, 0)
    target = mass / mass.sum(-1, keepdim=True).clamp(min=SMALLEST_MASS)
    # A difference of scores that overflows does not count where the target is 0.
    cross = target * log_q.masked_fill((target == 0) & (log_q == -torch.inf), 0)
    loss = (torch.xlogy(target, target) - cross).sum(-1)
    dscores = (log_q.exp() * target.sum(-1, keepdim=True) - target).masked_fill(~counts, 0)
    if row_weights is None:
        return loss, dscores
    # What is not finite does not reach what does not count, nor do rows of weight 0 count.
    counts &= (row_weights != 0)[:, None]
    loss = (loss * row_weights).masked_fill(~counts.any(-1), 0)
    return loss, (dscores * row_weights[:, None]).masked_fill(~counts, 0)
