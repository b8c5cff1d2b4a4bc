"""Block-sparse attention, coarse attention, block selection and gated fusion."""

from typing import Literal, overload

import torch
from torch import Tensor

from dsa_ext.ops._checks import check_is_tensor


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
    """Block-sparse attention: each block of 64 queries attends to the blocks of 64 keys that it lists.

    Query n of head h belongs to block m = n // 64 and attends to the valid keys of the blocks q2k_index[b, h, m, i],
    i < q2k_num[b, h, m]::

        lse = log(sum_t exp(sm_scale * q.k_t)),    out = sum_t exp(sm_scale * q.k_t - lse) * v_t

    The valid keys of block j are its first kv_block_size[j], up to the end of k. Ids outside [0, Mkv), where
    Mkv = ceil(Nkv / 64), are skipped. Keys that no query may see are never read. A query that sees no key has out = 0,
    lse = -inf and zero gradients. A block that is listed twice counts twice.

    Args:
        q: queries [B, H, Nq, D], bf16. On the CPU also fp32 and float64. D is 64 or 128.
        k, v: keys and values [B, Hkv, Nkv, D], like q. Head h of q reads head h // (H / Hkv). Nq and Nkv are
            arbitrary; the last blocks may be shorter.
        q2k_index: ids of the listed blocks of keys [B, H, ceil(Nq / 64), M], int32, in any order.
        q2k_num: number of leading slots in use [B, H, ceil(Nq / 64)], int32.
        kv_block_size: number of valid keys per block [ceil(Nkv / 64)], int32, 0 to 64; all by default.
        sm_scale: factor on q.k, from -2^127 to 2^127; D**-0.5 by default.
        return_lse: return lse as well.

    Returns:
        out, with the shape, dtype and memory layout of q (that of torch.empty_like(q)); with `return_lse` also
        lse [B, H, Nq], fp32 (float64 for float64 inputs), natural logarithm. Both are differentiable (once) with
        respect to q, k and v. The gradients are deterministic (bitwise).

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.
    """
    args = (q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)
    result: tuple[Tensor, Tensor] = torch.ops.dsa.block_sparse_attn_fwd.default(*args)
    return result if return_lse else result[0]


def coarse_attn(q: Tensor, k: Tensor, v: Tensor, *, sm_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention to pooled keys, with the mean attention weights of each block of 64 queries.

    With one pooled key and value per block, this is the coarse branch of block-sparse attention. It returns an output
    of its own, and the scores from which :func:`block_select` selects the blocks for the fine branch::

        p_nt = exp(sm_scale * q_n.k_t) / sum_t exp(sm_scale * q_n.k_t)
        out_n = sum_t p_nt * v_t,    scores_mt = mean of p_nt over the queries n of block m

    Args:
        q: queries [B, H, Nq, D], bf16. On the CPU also fp32 and float64. D is 64 or 128.
        k, v: pooled keys and values [B, Hkv, Nkv, D], like q. Head h of q reads head h // (H / Hkv). Nq and Nkv are
            arbitrary; the last block of queries may be shorter.
        sm_scale: factor on q.k, from -2^127 to 2^127; D**-0.5 by default.

    Returns:
        out, with the shape, dtype and memory layout of q, 0 if there are no keys; and scores
        [B, H, ceil(Nq / 64), Nkv], fp32 (float64 for float64 inputs). Only out is differentiable (once), with respect
        to q, k and v. Both are deterministic (bitwise).

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.
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
    """Selects the blocks of keys that each block of queries attends to: the lists for :func:`block_sparse_attn`.

    A row of scores holds one weight per block of keys. Blocks are sorted by descending weight, ties by the lower id,
    and the first `count` are kept::

        topk      count = topk
        top_tau   count = the smallest number whose weights sum to tau times the row's sum, at least min_blocks
        gini_tau  count = max(min_blocks, min(that number, ceil(ratio * Mkv)))
                  ratio = max_ratio - (max_ratio - min_ratio) * gini

    and never more than Mkv. gini is the Gini coefficient of the row, with its weights x in ascending order and i
    from 1::

        gini = 2 * sum_i(i * x_i) / (Mkv * sum(x)) - (Mkv + 1) / Mkv

    It is 0 if all weights are equal, and near 1 if one block has all the weight: a concentrated row needs fewer blocks.
    A row whose weights are all 0 keeps min_blocks.

    A negative or NaN score counts as weight 0, +inf as the largest finite fp32 number. Sums are computed in integers,
    from weights rounded down to multiples of 2^-29 to 2^-30 of the row's largest, so that the result is exact, and the
    same on every device.

    Args:
        scores: weights [B, H, Mq, Mkv], fp32 or bf16, such as the scores of :func:`coarse_attn`; they need not sum
            to 1. Mkv is at most 16384.
        mode: how the number of blocks is determined.
        topk: number of blocks in mode "topk", at least 1; it may exceed Mkv. None in the other modes.
        tau: fraction of a row's total weight to keep, above 0 and at most 1.
        min_blocks: minimum number of blocks to keep, at least 0; it may exceed Mkv.
        min_ratio, max_ratio: maximum fraction of the blocks to keep in a row with gini 1 (min_ratio) and with gini 0
            (max_ratio); 0 <= min_ratio <= max_ratio <= 1.

    Returns:
        q2k_index [B, H, Mq, M], int32: the ids of the kept blocks, ascending along a row, then -1; and
        q2k_num [B, H, Mq], int32: their number. M is the largest number that any weights could keep, at least 1:
        min(topk, Mkv) in mode "topk", Mkv in mode "top_tau", or min(Mkv, max(min_blocks, ceil(max_ratio * Mkv))) in
        mode "gini_tau". Neither is differentiable.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.
    """
    check_is_tensor("block_select", "scores", scores)  # without a tensor, the dispatcher finds no implementation
    if mode not in ("gini_tau", "top_tau", "topk"):
        raise RuntimeError(f"dsa::block_select: mode must be 'gini_tau', 'top_tau' or 'topk', got {mode!r}")
    if (mode == "topk") != (topk is not None):
        expected = "a number" if mode == "topk" else "None"
        raise RuntimeError(f"dsa::block_select: topk must be {expected} in mode {mode!r}, got {topk}")
    if mode == "top_tau":
        min_ratio = max_ratio = 1.0  # no limit
    result: tuple[Tensor, Tensor] = torch.ops.dsa.block_select.default(
        scores, topk, tau, min_blocks, min_ratio, max_ratio
    )
    return result


def gated_fusion(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    """Sum of two branches, weighted by a sigmoid gate per head and token: combines fine and coarse attention.

    ::

        out = s * fine + (1 - s) * coarse,    s = sigmoid(gate)

    Args:
        fine, coarse: [B, H, N, D], bf16. On the CPU also fp32 and float64. D is 64 or 128.
        gate: [B, H, N], bf16 or fp32, with any strides; also float64 if `fine` is float64.

    Returns:
        out, with the shape, dtype and memory layout of `fine`; computed in fp32. Differentiable (once) with respect to
        all three arguments. The gradients are deterministic (bitwise).

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.
    """
    result: Tensor = torch.ops.dsa.gated_fusion_fwd.default(fine, coarse, gate)
    return result
