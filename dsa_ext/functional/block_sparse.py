"""Attention between blocks of queries and of keys."""

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
        sm_scale: factor on q.k; D**-0.5 by default.
        return_lse: return lse as well.

    Returns:
        out, like q, its layout included; with `return_lse` also lse [B, H, Nq], fp32 (float64 for float64 inputs),
        natural logarithm. Both are differentiable with respect to q, k and v (once), bitwise repeatably.

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also on a GPU: there is no kernel yet.
    """
    args = (q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)
    result: tuple[Tensor, Tensor] = torch.ops.dsa.block_sparse_attn_fwd.default(*args)
    return result if return_lse else result[0]
