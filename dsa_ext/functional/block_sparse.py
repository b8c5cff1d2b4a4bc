"""Attention between blocks of queries and of keys, coarse attention, block selection, and the fusion of branches."""

from typing import Literal, overload

import torch
from torch import Tensor


@overload
def block_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = ...,
    *,
    sm_scale: float | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def block_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = ...,
    *,
    sm_scale: float | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def block_sparse_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = None,
    *,
    sm_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of blocks of 64 queries to the blocks of 64 keys that each lists.

    Query n of head h belongs to block m = n // 64 and attends to the valid keys of the blocks q2k_index[b, h, m, i],
    i < q2k_num[b, h, m]::

        lse = log(sum_t exp(sm_scale * q.k_t)),    out = sum_t exp(sm_scale * q.k_t - lse) * v_t

    Valid keys of block j are its first kv_block_size[j], as far as k reaches. Ids outside [0, Mkv) name no block, and
    keys that no query may see are never read; a query that sees none has out = 0, lse = -inf and zero gradients. A
    block that is listed twice counts twice.

    Args:
        q: queries [B, H, Nq, D], bf16. On the CPU also fp32 and float64. D is 64 or 128.
        k, v: keys and values [B, Hkv, Nkv, D], like q. Head h of q reads head h // (H / Hkv). Nq and Nkv are any
            numbers; the last blocks may be shorter.
        q2k_index: ids of the listed blocks of keys [B, H, ceil(Nq / 64), M], int32, in any order.
        q2k_num: how many leading slots are in use [B, H, ceil(Nq / 64)], int32.
        kv_block_size: valid keys of each block [ceil(Nkv / 64)], int32, 0 to 64; all by default.
        sm_scale: factor on q.k, from -2^127 to 2^127; D**-0.5 by default.
        return_lse: return lse as well.

    Returns:
        out, like q, its layout included (as torch.empty_like makes it); with `return_lse` also lse [B, H, Nq], fp32
        (float64 for float64 inputs), natural logarithm. Both are differentiable with respect to q, k and v (once),
        bitwise repeatably.

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also when a GPU has no kernel.
    """
    args = (q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)
    result: tuple[Tensor, Tensor] = torch.ops.dsa.block_sparse_attn_fwd.default(*args)
    return result if return_lse else result[0]


def coarse_attn(q: Tensor, k: Tensor, v: Tensor, *, sm_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention to pooled keys, and how much of it each of them gets from a block of 64 queries.

    With keys and values that stand for a block each, this is the coarse half of block-sparse attention: an output of
    its own, and the weights from which :func:`block_select` takes the blocks that are to be looked at closely::

        p_nt = exp(sm_scale * q_n.k_t) / sum_t exp(sm_scale * q_n.k_t)
        out_n = sum_t p_nt * v_t,    scores_mt = mean of p_nt over the queries n of block m

    Args:
        q: queries [B, H, Nq, D], bf16. On the CPU also fp32 and float64. D is 64 or 128.
        k, v: pooled keys and values [B, Hkv, Nkv, D], like q. Head h of q reads head h // (H / Hkv). Nq and Nkv are
            any numbers; the last block of queries may be shorter.
        sm_scale: factor on q.k, from -2^127 to 2^127; D**-0.5 by default.

    Returns:
        out, like q, its layout included: 0 where there are no keys; and scores [B, H, ceil(Nq / 64), Nkv], fp32
        (float64 for float64 inputs). Only out is differentiable, with respect to q, k and v (once). Both are bitwise
        repeatable.

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also when a GPU has no kernel.
    """
    out, _, scores = torch.ops.dsa.coarse_attn_fwd.default(q, k, v, sm_scale)
    return out, scores


def block_select(
    scores: Tensor,
    mode: Literal["gini_tau", "top_tau", "topk"] = "gini_tau",
    *,
    topk: int | None = None,
    tau: float = 0.9,
    min_blocks: int = 1,
    min_ratio: float = 0.05,
    max_ratio: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """The blocks of keys that each block of queries is to attend to: lists for :func:`block_sparse_attn`.

    A row of scores weighs the blocks. They are ordered by descending weight, equal ones by the lower id, and the first
    `count` are kept::

        topk      count = topk
        top_tau   count = the fewest whose weights sum to tau of the row's, at least min_blocks
        gini_tau  count = max(min_blocks, min(that number, ceil(ratio * Mkv)))
                  ratio = max_ratio - (max_ratio - min_ratio) * gini

    and never more than Mkv. With x ascending and i from 1, ::

        gini = 2 * sum_i(i * x_i) / (Mkv * sum(x)) - (Mkv + 1) / Mkv

    is 0 where all weights are equal, and near 1 where one has everything: what is concentrated needs fewer blocks.
    A row without any weight keeps min_blocks.

    What is negative or NaN weighs 0, and +inf as much as the largest finite number of fp32. Sums are of integers, the
    weights rounded down to multiples of 2^-29 to 2^-30 of the row's largest, so that the result is exact, and the same
    on every device.

    Args:
        scores: weights [B, H, Mq, Mkv], fp32 or bf16, such as the probabilities of a coarse attention; they need not
            sum to 1. Mkv is at most 16384.
        mode: what decides how many are kept.
        topk: how many in mode "topk", from 1; it may exceed Mkv. None in the others.
        tau: which share of a row's weight to keep, above 0 and at most 1.
        min_blocks: how many to keep at least, from 0; it may exceed Mkv.
        min_ratio, max_ratio: which share of the blocks is the limit of a row with gini 1 and with gini 0, ascending,
            from 0 to 1.

    Returns:
        q2k_index [B, H, Mq, M], int32: the kept ids, ascending along a row, then -1; and q2k_num [B, H, Mq], int32: how
        many. M is the most that any weights could keep, at least 1: min(topk, Mkv), Mkv, or
        min(Mkv, max(min_blocks, ceil(max_ratio * Mkv))). Neither has a gradient.

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also when a GPU has no kernel.
    """
    if mode not in ("gini_tau", "top_tau", "topk"):
        raise RuntimeError(f"dsa::block_select: mode must be 'gini_tau', 'top_tau' or 'topk', got {mode!r}")
    if (mode == "topk") != (topk is not None):
        expected = "a number" if mode == "topk" else "None"
        raise RuntimeError(f"dsa::block_select: topk must be {expected} in mode {mode!r}, got {topk}")
    if mode == "top_tau":
        min_ratio = max_ratio = 1.0  # a limit that is none
    result: tuple[Tensor, Tensor] = torch.ops.dsa.block_select.default(
        scores, topk, tau, min_blocks, min_ratio, max_ratio
    )
    return result


def gated_fusion(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    """The sum of two branches, weighted by a gate per head and token: what joins fine and coarse attention.

    ::

        out = s * fine + (1 - s) * coarse,    s = sigmoid(gate)

    Args:
        fine, coarse: [B, H, N, D], bf16. On the CPU also fp32 and float64. D is 64 or 128.
        gate: [B, H, N], bf16 or fp32, with any strides; also float64 if fine is.

    Returns:
        out, like `fine`, its layout included; computed in fp32. It is differentiable with respect to all three (once),
        bitwise repeatably.

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also when a GPU has no kernel.
    """
    result: Tensor = torch.ops.dsa.gated_fusion_fwd.default(fine, coarse, gate)
    return result
