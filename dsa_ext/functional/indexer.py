"""The lightning indexer: its scores, the selection of keys, and its training loss."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsa_ext.functional._loss import loss_rows, mean_of_rows, reduced_loss
from dsa_ext.ops._checks import check_are_tensors, check_is_tensor, describe, dtype_name, fail
from dsa_ext.ops._library import refuse_derivatives


def indexer_logits(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    k_scale: Tensor | None = None,
    clean: bool = True,
    deterministic: bool = False,
) -> Tensor:
    """Scores of the lightning indexer of DeepSeek-V3.2: how relevant each key is to each query.

    For query s and key t with starts[s] <= t < ends[s]::

        logits[s, t] = k_scale[t] * sum_h relu(q[s, h].k[t]) * weights[s, h]

    and -inf for every other key, which is never read. Bounds may be any integers: positions outside [0, S_kv) are
    skipped, and a query with starts[s] >= ends[s] sees no key. Sequences that are packed into one `k` are kept apart by
    their bounds.

    Args:
        q: queries [S, Hi, Di]: float8_e4m3fn or bf16, on the CPU also fp32 and float64. Hi is 8, 16, 32 or 64; Di is 64
            or 128.
        k: keys [S_kv, Di], like q; all heads share them.
        weights: weight per head [S, Hi], fp32 (float64 for float64 inputs), including any factor on q.k: for
            float8_e4m3fn the scale of q[s, h].
        starts: first key of each query [S], int32.
        ends: one past the last key of each query [S], int32.
        k_scale: scale per key [S_kv], fp32. Required for float8_e4m3fn keys, None for others.
        clean: write -inf outside the bounds. If False, the entries there are unspecified.
        deterministic: make the gradient of k deterministic (bitwise), as torch.use_deterministic_algorithms(True) does.

    Returns:
        logits [S, S_kv], fp32 (float64 for float64 inputs), with a row stride that is a multiple of 4 elements.
        Differentiable (once) with respect to q, k and weights, but not for float8_e4m3fn.

    On a GPU, NaN or infinity in a key, a query or its weights may reach the gradients of up to 15 neighboring queries,
    and of the keys that these see.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when an argument requires a gradient and q is float8_e4m3fn, or when there is no
            kernel for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    result: Tensor = torch.ops.dsa.indexer_logits.default(q, k, weights, starts, ends, k_scale, clean, deterministic)
    return result


def topk_select(
    logits: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    *,
    page_table: Tensor | None = None,
    page_size: int | None = None,
    row_to_sequence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids of the largest logits of each row, in ascending order: the token selection of DeepSeek-V3.2.

    Row r selects among the columns starts[r] <= t < ends[r] whose logit is neither NaN nor -inf: the `topk` largest,
    ties by the lower id. So the result depends on the values alone, for every input. +inf ranks first, and -0.0 equals
    +0.0. Bounds may be any integers: columns outside [0, C) are skipped, and a row with starts[r] >= ends[r] selects
    nothing.

    Args:
        logits: [R, C], fp32 or bf16; on the CPU also float64.
        starts: first column of each row [R], int32.
        ends: one past the last column of each row [R], int32.
        topk: number of columns to select, from 1 to 4096. It may exceed C.
        page_table: pages of a cache that hold each sequence's tokens [B, pages], int32. If given, the result has slots
            of the cache in place of ids, in the order of the ids: page_table[b, t // page_size] * page_size + t %
            page_size for column t of sequence b. A selected column whose page is negative or not in the table, or whose
            slot exceeds int32, has slot -1.
        page_size: tokens per page; 64 by default, None without page_table.
        row_to_sequence: the sequence of each row [R], int32; a row of no sequence in [0, B) has slots -1. By default
            each of the B sequences has R / B consecutive rows.

    Returns:
        indices [R, topk], int32: ascending along a row (of ids), then -1 if fewer could be selected; and values
        [R, topk] in the dtype of logits: the logit of each selected column, then -inf. Neither is differentiable: to
        train the model that produced the logits, recompute them at the selected ids.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    if page_table is None and page_size is not None:
        fail("topk_select", f"page_size must be None without page_table, got {page_size}")
    page_size = 64 if page_size is None else page_size
    result: tuple[Tensor, Tensor] = torch.ops.dsa.topk_select.default(
        logits, starts, ends, topk, page_table, page_size, row_to_sequence
    )
    return result


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    topk: int,
    *,
    k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Selects the keys for each query: :func:`topk_select` of :func:`indexer_logits`, without storing the logits.

    ::

        logits = indexer_logits(q, k, weights, starts, ends, k_scale=k_scale)
        indices, values = topk_select(logits, starts, ends, topk)

    Args:
        q, k, weights, starts, ends, k_scale: as for :func:`indexer_logits`.
        topk: number of keys to select, from 1 to 4096. It may exceed S_kv.

    Returns:
        indices [S, topk], int32: ascending along a row, then -1 if fewer could be selected; and values [S, topk]:
        the logit of each id, -inf where the id is -1, in fp32 (float64 for float64 inputs). Neither is differentiable:
        to train the indexer, recompute its scores at the selected ids with :func:`indexer_scores`.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    result: tuple[Tensor, Tensor] = torch.ops.dsa.indexer_topk.default(q, k, weights, starts, ends, topk, k_scale)
    return result


def indexer_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, *, deterministic: bool = False) -> Tensor:
    """The indexer's scores of the listed keys only, as in :func:`indexer_logits`: used to train the indexer.

    For query s and slot i with key k_i = k[indices[s, i]]::

        scores[s, i] = sum_h relu(q[s, h].k_i) * weights[s, h]

    and -inf where the id is not in [0, S_kv): such a slot is padding, at any place in the list, and no key is read for
    it. An id that is listed twice counts twice.

    Args:
        q: queries [S, Hi, Di], bf16. On the CPU also fp32 and float64. Hi is 8, 16, 32 or 64; Di is 64 or 128.
        k: keys [S_kv, Di], like q; all heads share them.
        weights: weight per head [S, Hi], fp32 (float64 for float64 inputs), including any factor on q.k.
        indices: ids of the listed keys [S, K], int32, in any order, such as those of :func:`indexer_topk`.
        deterministic: make the gradient of k deterministic (bitwise), as torch.use_deterministic_algorithms(True) does.

    Returns:
        scores [S, K], fp32 (float64 for float64 inputs). Differentiable (once) with respect to q, k and weights; the
        incoming gradient of a padded slot has no effect. The forward is deterministic (bitwise).

    On a GPU, NaN or infinity in a key, a query or its weights may reach the gradients of up to 15 neighboring queries,
    and of the keys that these list.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    result: Tensor = torch.ops.dsa.indexer_scores.default(q, k, weights, indices, deterministic)
    return result


def quantize_indexer(
    q: Tensor, k: Tensor, recipe: Literal["ue8m0", "ue8m0_hadamard", "fp32"] = "ue8m0"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantizes the indexer's q and k to fp8 with one scale per row, as serving engines do, for the same selection in
    training and in serving::

        q8, q_scale, k8, k_scale = quantize_indexer(q, k)
        ids, _ = indexer_topk(q8, k8, weights * q_scale, starts, ends, topk, k_scale=k_scale)

    The formula is that of :func:`act_quant`, whose results for a row do not depend on other rows: equal rows are
    quantized to equal bits in any batch, chunk or packing, on the CPU and on a GPU.

    Args:
        q: [..., Hi, Di], bf16 or fp32 (float64, which is rounded to fp32 first); Di is 64 or 128.
        k: [..., Di], like q.
        recipe: "ue8m0": scales are powers of two, as in vLLM. "ue8m0_hadamard": the same after
            :func:`hadamard_transform` of q and k, which leaves q.k unchanged and spreads outliers, as in the inference
            code of DeepSeek-V3.2 and in SGLang. "fp32": scales are not rounded. Queries, and all keys that they are
            compared with, must have the same recipe.

    Returns:
        q and k, float8_e4m3fn, and their scales [..., Hi] and [...], fp32. None is differentiable.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.

    Source: the inference code of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    if recipe not in ("ue8m0", "ue8m0_hadamard", "fp32"):
        got = repr(recipe) if isinstance(recipe, str) else describe(recipe)
        fail("quantize_indexer", f"recipe must be 'ue8m0', 'ue8m0_hadamard' or 'fp32', got {got}")
    results = []
    for name, x in (("q", q), ("k", k)):
        check_is_tensor("quantize_indexer", name, x)
        dtypes = (torch.bfloat16, torch.float32, torch.float64)
        if x.dim() == 0 or x.shape[-1] not in (64, 128) or x.dtype not in dtypes:
            expected = "bfloat16, float32 or float64 [..., 64 or 128]"
            fail("quantize_indexer", f"{name} must be {expected}, got {describe(x)}")
        columns = x.shape[-1]
        if columns != q.shape[-1] or x.dtype != q.dtype:
            fail("quantize_indexer", f"k must be {dtype_name(q.dtype)} [..., {q.shape[-1]}] like q, got {describe(x)}")
        if x.device != q.device:
            fail("quantize_indexer", f"k must be on {q.device} like q, got {x.device}")
        refuse_derivatives("quantize_indexer", (x,))
        x = x.detach().float() if x.dtype == torch.float64 else x.detach()
        if recipe == "ue8m0_hadamard":
            x = hadamard_transform(x)
        x = x if columns == 128 else pad(x, (0, 128 - columns))
        y, scale = torch.ops.dsa.act_quant.default(x, 128, recipe != "fp32")
        results += [y[..., :columns], scale.squeeze(-1)]
    return results[0], results[1], results[2], results[3]


def hadamard_transform(x: Tensor) -> Tensor:
    """x [..., D] times the orthogonal Hadamard matrix [D, D].

    Sums and differences in fp32 (float64 for float64), rounded once: no row depends on another, not even in its last
    bit, as it would in a matrix product. Differentiable.

    Args:
        x: [..., D], floating-point; D is a power of 2.

    Raises:
        RuntimeError: x violates one of these requirements.
    """
    check_is_tensor("hadamard_transform", "x", x)
    size = x.shape[-1] if x.dim() else 0
    if size == 0 or size & (size - 1) or not x.is_floating_point():
        fail("hadamard_transform", f"x must be floating-point [..., a power of 2], got {describe(x)}")
    y = x if x.dtype == torch.float64 else x.float()
    step = 1
    while step < size:
        first, second = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    result: Tensor = (y * size**-0.5).to(x.dtype)
    return result


def indexer_loss(
    scores: Tensor,
    p: Tensor,
    *,
    valid: Tensor | None = None,
    row_weights: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
) -> Tensor:
    """KL divergence between the attention's and the indexer's distribution: the indexer's loss in DeepSeek-V3.2.

    For each row, over the slots i that count, with the target t = p / sum(p)::

        loss = sum_i t_i * (log(t_i) - log(softmax(scores)_i))

    A slot counts if `valid` (when given) is true and the score is not -inf. A row in which no slot counts, or in which
    p is 0, has loss 0 and zero gradients. Value and gradient are computed in one pass.

    Args:
        scores: the indexer's scores [..., K], fp32 (float64 on the CPU): at the selected slots, or of all keys.
        p: attention weights of the same slots [..., K], like scores: from :func:`attn_dist`, normalized or not.
        valid: which slots count [..., K], bool; all by default.
        row_weights: factor on each row's loss [...], like scores.
        reduction: "none" returns the loss of each row [...], "sum" their sum, "mean" their sum divided by the number of
            rows or, with row_weights, by the sum of the weights (0 if that is 0).

    Returns:
        The loss, differentiable (once) with respect to scores only: p is a training target.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when an argument other than scores requires a gradient, or when there is no kernel
            for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    if reduction not in ("none", "mean", "sum"):
        raise RuntimeError(f"dsa::indexer_loss: reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    try:
        rows = loss_rows(scores, p, valid, row_weights)
    except AttributeError:
        check_are_tensors("indexer_loss", (scores, p, valid, row_weights))
        raise
    loss: Tensor
    loss, _ = torch.ops.dsa.indexer_loss.default(*rows)
    if reduction == "none":
        return loss.view(scores.shape[:-1]).clone()  # the gradient needs the loss; others may change it in place
    return reduced_loss(loss, row_weights, reduction)


def indexer_dense_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    *,
    row_weights: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    deterministic: bool = False,
) -> Tensor:
    """The indexer's loss over all keys that each query sees: the dense warm-up stage of DeepSeek-V3.2.

    The value and the gradients of ::

        scores = indexer_logits(q, k, weights, 0, causal ends)
        p = attn_dist(main_q, main_kv, all keys, lse)
        indexer_loss(scores, p, row_weights=row_weights, reduction=reduction)

    are computed together, in chunks of queries with at most 2^24 scores: no tensor of size S x S_kv is ever stored.

    Args:
        q, k, weights: the indexer's tensors [S, Hi, Di], [S_kv, Di] and [S, Hi], as for :func:`indexer_scores`.
        main_q, main_kv, lse: the attention's tensors [S, H, D], [S_kv, D] and [S, H], as for :func:`attn_dist`: D is
            576 or 512, H at most 128. lse is that of attention to all keys.
        row_weights: factor on each query's loss [S], like lse. A query of weight 0 may hold anything, NaN too.
        sm_scale: factor on main_q.main_kv, D**-0.5 by default.
        causal: query s sees the keys up to q_start + s; otherwise it sees all keys.
        q_start: position of the first query.
        starts, ends: instead of causal and q_start, the keys that a query sees [S], int32: those from starts on and
            below ends, for packed or padded sequences and for queries in any order.
        reduction: "sum" or "mean", as for :func:`indexer_loss`.
        deterministic: make the gradient of k deterministic (bitwise), as torch.use_deterministic_algorithms(True) does.

    Returns:
        The loss, differentiable (once) with respect to q, k and weights only.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when another argument requires a gradient, or when there is no kernel for the GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    if reduction not in ("mean", "sum"):
        raise RuntimeError(f"dsa::indexer_dense_loss: reduction must be 'mean' or 'sum', got {reduction!r}")
    loss: Tensor = torch.ops.dsa.indexer_dense_loss.default(
        q,
        k,
        weights,
        main_q,
        main_kv,
        lse,
        row_weights,
        sm_scale,
        causal,
        q_start,
        starts,
        ends,
        deterministic=deterministic,
    )[0]
    return loss.clone() if reduction == "sum" else mean_of_rows(loss, q.shape[0], row_weights)
