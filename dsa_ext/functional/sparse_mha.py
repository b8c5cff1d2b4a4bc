"""Sparse attention of heads with keys and values of their own, and its weights summed over heads."""

from typing import Literal, overload

import torch
from torch import Tensor

from dsa_ext.ops._checks import check_are_tensors


@overload
def sparse_mha(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = ...,
    causal: bool = ...,
    q_start: int = ...,
    starts: Tensor | None = ...,
    ends: Tensor | None = ...,
    window: int | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def sparse_mha(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = ...,
    causal: bool = ...,
    q_start: int = ...,
    starts: Tensor | None = ...,
    ends: Tensor | None = ...,
    window: int | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def sparse_mha(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    window: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Sparse latent attention without absorption: each head has keys and values of its own, and each query attends to
    the keys that it lists.

    For query (b, s) and head h, over the set of its visible keys t, with k_t = [k[b, t, h], k_rope[b, t]]::

        lse = log(sum_t exp(sm_scale * q.k_t))
        out = sum_t exp(sm_scale * q.k_t - lse) * v[b, t, h]

    With distinct ids it equals, up to rounding, :func:`sparse_mla` of absorbed queries with the same sm_scale, followed
    by the product with the value weights of kv_b_proj; the documentation shows the conversion. A pair of a query and a
    key takes 3.4 times fewer operations, but all pairs of a block of 128 queries and a block of 128 keys are computed
    if any query of the block lists a key there. So it is faster where queries list much of what they see: with 64 heads
    or more up to 4 times as many keys as are listed, with fewer heads more.

    A key is visible when its id is in [0, S_kv) and, with `causal`, at most q_start + s; with `starts` and `ends`,
    which replace the causal rule, when starts[b, s] <= id < ends[b, s]. All other slots are padding, at any place in
    the list. An id that is listed twice counts once. A query with no visible key has out = 0, lse = -inf and zero
    gradients. NaN or an infinity may reach results that do not depend on it, within its sequence: from v out of any
    query of the head, from k and k_rope the gradient of q, from q and the gradient of out those of k, k_rope and v.

    Args:
        q: queries [B, S, H, 192], bf16: 128 columns without RoPE, then 64 with. On the CPU also fp32 and float64.
        k: the columns without RoPE of each head's keys [B, S_kv, H, 128], like q.
        k_rope: the columns with RoPE of the keys, which all heads share [B, S_kv, 64], like q.
        v: values [B, S_kv, H, 128], like q. k and v may be views of one projection.
        indices: ids of the selected keys [B, S, K], int32, in any order.
        sm_scale: factor on q.k, from -2^127 to 2^127; 192**-0.5 by default.
        causal: hide keys after the query's position.
        q_start: position of the first query, for a chunk of a longer sequence; 0 to 2^62.
        starts, ends: ids that a query may see [B, S], int32: those from starts on and below ends. Both or neither.
            `causal` then has no effect, and q_start must have its default.
        window: also hide keys `window` or more positions before the query's, 1 to 2^62; needs `causal`, without starts
            and ends. No key of a sequence is hidden by a window of its length. With a window the backward needs memory
            for the keys within it only, which is what packed sequences need.
        return_lse: return lse as well.

    Returns:
        out [B, S, H, 128] in the dtype of q; with `return_lse` also lse [B, S, H], fp32 (float64 for float64 inputs),
        natural logarithm. Both are differentiable (once) with respect to q, k, k_rope and v.

    Forward and gradients are deterministic (bitwise). Nothing synchronizes with the host, and everything may be
    captured in a CUDA graph. A call needs B * S * S_kv / 8 bytes for the mask; a backward also up to 1.4 GB or, if that
    is more, 96 KB for each tile of 128 queries and 128 keys of one head that `causal` and `window` do not hide.

    On CUDA the last dimension of all tensors must have stride 1 and every row of q, k, k_rope and v must start 16-byte
    aligned; all other strides are arbitrary. At most 2^24 positions.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when the tensors are on a GPU that is not sm_90, or the kernels were not built.

    Source: the masked MHA mode of DeepSeek-V3.2 (arXiv 2512.02556), sections 2.1 and 2.3.
    """
    args = (q, k, k_rope, v, indices, sm_scale, causal, q_start, starts, ends, window)
    try:
        out, lse = torch.ops.dsa.sparse_mha_fwd.default(*args)
    except (AttributeError, RuntimeError):
        check_are_tensors("sparse_mha_fwd", args)
        raise
    return (out, lse) if return_lse else out


def sparse_mha_dist(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention weights of the listed keys, summed over heads, of heads with keys of their own: the indexer's training
    target, as :func:`attn_dist` gives it for absorbed queries.

    For query (b, s) and visible slot i with key t = indices[b, s, i] and k_t = [k[b, t, h], k_rope[b, t]]::

        dist[b, s, i] = sum_h exp(sm_scale * q[b, s, h].k_t - lse[b, s, h])

    and 0 for a slot that is not visible. With the lse of :func:`sparse_mha` each head contributes weights that sum to 1
    over the distinct keys; an id that is listed twice has the weight of its key in both slots. A head whose lse is -inf
    contributes nothing.

    Args:
        q, k, k_rope, indices, sm_scale, causal, q_start, starts, ends, window: as for :func:`sparse_mha`.
        lse: natural logarithm of each head's denominator [B, S, H], fp32 (float64 for float64 inputs).

    Returns:
        dist [B, S, K], fp32 (float64 for float64 inputs). With distinct ids a row sums to H; :func:`indexer_loss`
        divides by the sum. Not differentiable: it is a training target. Deterministic (bitwise); the last bits may
        depend on the other queries of the call, because small calls split the sum over heads. A call needs
        4 * B * S * S_kv bytes, small ones up to six times that. Layouts as for :func:`sparse_mha`.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when the tensors are on a GPU that is not sm_90, or the kernels were not built.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    args = (q, k, k_rope, indices, lse, sm_scale, causal, q_start, starts, ends, window)
    try:
        dist: Tensor = torch.ops.dsa.sparse_mha_dist.default(*args)
    except (AttributeError, RuntimeError):
        check_are_tensors("sparse_mha_dist", args)
        raise
    return dist
