"""Sparse multi-query latent attention, its attention weights summed over heads, and decoding from a paged cache."""

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from dsa_ext.ops._checks import check_are_tensors, check_is_tensor, describe, fail
from dsa_ext.ops._library import is_transformed

_sparse_mla_fwd = torch.ops.dsa.sparse_mla_fwd.default
_sparse_mla_max_fwd = torch.ops.dsa.sparse_mla_max_fwd.default
#: The functions that calls of the overloads forward to; calling them directly saves one Python frame.
_sparse_mla_fwd_direct: Callable[..., tuple[Tensor, ...]] = _sparse_mla_fwd._op
_sparse_mla_max_fwd_direct: Callable[..., tuple[Tensor, ...]] = _sparse_mla_max_fwd._op
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def _with_batch(op: str, q: Tensor, kv: Tensor, indices: Tensor, *rows: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same arguments with a batch dimension of 1; `rows` are further tensors with one entry per query."""
    for name, tensor, forms in (("kv", kv, "[S_kv, D] or [S_kv, G, D]"), ("indices", indices, "[S, K] or [S, G, K]")):
        if tensor.dim() not in (2, 3):
            fail(op, f"{name} must be {forms} when q is [S, H, D], got {describe(tensor)}")
    kv, indices = (t if t.dim() == 3 else t.unsqueeze(1) for t in (kv, indices))
    return tuple(t if t is None else t.unsqueeze(0) for t in (q, kv, indices, *rows))


@overload
def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = ...,
    d_v: int = ...,
    causal: bool = ...,
    q_start: int = ...,
    positions_per_key: int = ...,
    topk_length: Tensor | None = ...,
    starts: Tensor | None = ...,
    ends: Tensor | None = ...,
    attn_sink: Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[False] = ...,
) -> Tensor: ...


@overload
def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = ...,
    d_v: int = ...,
    causal: bool = ...,
    q_start: int = ...,
    positions_per_key: int = ...,
    topk_length: Tensor | None = ...,
    starts: Tensor | None = ...,
    ends: Tensor | None = ...,
    attn_sink: Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = ...,
    d_v: int = ...,
    causal: bool = ...,
    q_start: int = ...,
    positions_per_key: int = ...,
    topk_length: Tensor | None = ...,
    starts: Tensor | None = ...,
    ends: Tensor | None = ...,
    attn_sink: Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = ...,
    d_v: int = ...,
    causal: bool = ...,
    q_start: int = ...,
    positions_per_key: int = ...,
    topk_length: Tensor | None = ...,
    starts: Tensor | None = ...,
    ends: Tensor | None = ...,
    attn_sink: Tensor | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    attn_sink: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Sparse multi-query latent attention of DeepSeek-V3.2: each query attends to the keys that it lists.

    For query (b, s) and head h of group g, over its visible slots i with key k_i = kv[b, indices[b, s, g, i], g]::

        lse = log(sum_i exp(sm_scale * q.k_i))
        out = sum_i exp(sm_scale * q.k_i) * k_i[:d_v]  /  (exp(lse) + exp(attn_sink[h]))

    A slot is visible when its id is in [0, S_kv), when the key is complete at the query's position (`causal`: id <=
    (q_start + s + 1) // positions_per_key - 1), and when it is one of the first topk_length[b, s]. With `starts` and
    `ends`, which replace the causal rule, a slot is visible when starts[b, s] <= id < ends[b, s]. All other slots are
    padding, at any place in the list, and the keys that they might name reach no result. A query with no visible slot
    has out = 0, lse = max_logits = -inf and zero gradients. An id that is listed twice counts twice.

    All tensors may be passed without the batch dimension: q [S, H, D], kv [S_kv, D] or [S_kv, G, D], indices [S, K] or
    [S, G, K], as :func:`indexer_topk` returns them, topk_length, starts and ends [S]; then out is [S, H, d_v] and lse
    [S, H]. This is the form for packed sequences, with ids that are rows of the packed kv. Ids that
    :func:`indexer_topk` selected lie within the bounds that it got, so they need only causal=False.

    Args:
        q: queries [B, S, H, D], bf16. On the CPU also fp32 and float64.
        kv: the latent keys [B, S_kv, G, D], like q; the first `d_v` columns of a key are its value. The H heads of q
            are split into G groups of H/G <= 128 consecutive heads.
        indices: ids of the selected keys [B, S, G, K], int32, in any order.
        sm_scale: factor on q.k, from -2^127 to 2^127; D**-0.5 by default.
        d_v: head dimension of a value. (D, d_v) is (576, 512) or (512, 512).
        causal: hide keys that are not complete at the query's position.
        q_start: position of the first query, for a chunk of a longer sequence; 0 to 2^62.
        positions_per_key: number of positions that one key stands for.
        topk_length: number of leading slots in use [B, S], int32; all of them by default.
        starts, ends: ids that a query may see [B, S], int32: those from starts on and below ends, for packed or padded
            sequences and for queries in any order. Both or neither. `causal` then has no effect, and q_start and
            positions_per_key must have their defaults.
        attn_sink: logit per head [H], fp32 (float64 for float64 inputs), that takes a share of the probability and
            adds no value. -inf disables the sink.
        deterministic: make the gradient of kv deterministic (bitwise), as torch.use_deterministic_algorithms(True)
            does. The results of a query then also do not depend on the lists of other queries, on which their last
            bits may depend in large calls with 8 or 16 heads.
        return_lse: return lse as well.
        return_max_logits: return max_logits as well.

    Returns:
        out [B, S, H, d_v] in the dtype of q; with `return_lse` also lse [B, S, H]: fp32, natural logarithm, without the
        sink; with `return_max_logits` also max_logits, like lse: max_i sm_scale * q.k_i. out and lse are differentiable
        (once) with respect to q, kv and attn_sink.

    The forward is deterministic (bitwise), and so are the gradients except that of kv, whose last bits depend on the
    order of additions. With `deterministic` it is too, and the backward takes about 1.3 times as long. Nothing
    synchronizes with the host, and everything may be captured in a CUDA graph. The backward is fastest when ids ascend
    along each row of `indices`.

    On CUDA the last dimension of q, kv and indices must have stride 1 and every row of q and kv must start 16-byte
    aligned; all other strides are arbitrary, with less than 2^31 elements between positions of kv.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when the tensors are on a GPU that is not sm_90, or the kernels were not built.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    slots = (causal, q_start, positions_per_key, topk_length, starts, ends)
    # Read here, since below autograd, where the backward pass reads it, it would add 3 us to each call.
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    args = (q, kv, indices, sm_scale, d_v, *slots, attn_sink, deterministic)
    forward, direct = _sparse_mla_fwd, _sparse_mla_fwd_direct
    if return_max_logits:
        forward, direct = _sparse_mla_max_fwd, _sparse_mla_max_fwd_direct
    result: tuple[Tensor, ...]
    try:
        if q.dim() == 3:
            batched: Any = _with_batch("sparse_mla_fwd", q, kv, indices, topk_length, starts, ends)
            result = forward(*batched[:3], *args[3:8], *batched[3:], attn_sink, deterministic)
            if not (return_lse or return_max_logits):
                return result[0][0]
            result = tuple(t[0] for t in result)
        elif (
            is_compiling()
            or (
                is_grad_enabled()
                and (q.requires_grad or kv.requires_grad or (attn_sink is not None and attn_sink.requires_grad))
            )
            or is_transformed()
        ):
            result = forward(*args)
        else:
            # The operator's autograd layer is Python: bypassing it, and saving frames, reduces the host time of a call.
            with _BelowAutograd():
                result = direct(*args)
    except (AttributeError, RuntimeError):
        check_are_tensors("sparse_mla_fwd", args)  # here, where it takes no time if there is no error
        raise
    if return_lse:
        return result
    return (result[0], result[2]) if return_max_logits else result[0]


def attn_dist(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    *,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    normalize: bool = False,
    per_head_block: bool = False,
) -> Tensor:
    """Attention weights of the listed keys, summed over heads: the indexer's training target in DeepSeek-V3.2.

    For query (b, s), group g and visible slot i with key k_i = kv[b, indices[b, s, g, i], g]::

        dist[b, s, g, i] = sum_h exp(sm_scale * q[b, s, h].k_i - lse[b, s, h])

    over the heads h of the group; 0 for a slot that is not visible. With the lse of :func:`sparse_mla` each head
    contributes weights that sum to 1. Any other lse serves as the denominator as it is: if it also counts a sink or
    keys that are not listed, a head's weights sum to less than 1. A head whose lse is -inf contributes nothing.

    Without the batch dimension, as for :func:`sparse_mla`, lse is [S, H] and dist [S, K] or [S, G, K], like indices.

    Args:
        q, kv, indices, sm_scale, causal, q_start, positions_per_key, topk_length, starts, ends: as for
            :func:`sparse_mla`.
        lse: natural logarithm of each head's denominator [B, S, H], fp32 (float64 for float64 inputs).
        normalize: divide each row by its sum, or by 1e-10 if that is larger.
        per_head_block: return one sum per block of 64 heads of a group instead of the total, for the caller to add up.

    Returns:
        dist [B, S, G, K], fp32 (float64 for float64 inputs); with `per_head_block` [ceil(H / G / 64), B, S, G, K].
        Not differentiable: it is a training target. Deterministic (bitwise).

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also with both `normalize` and `per_head_block`, or when there is no kernel for the
            GPU.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
    """
    slots: Any = (causal, q_start, positions_per_key, topk_length, starts, ends)
    args: Any = (q, kv, indices, lse, sm_scale, *slots, normalize, per_head_block)
    try:
        if q.dim() != 3:
            result: Tensor = torch.ops.dsa.attn_dist.default(*args)
            return result
        batched: Any = _with_batch("attn_dist", q, kv, indices, lse, topk_length, starts, ends)
    except AttributeError:
        check_are_tensors("attn_dist", args)
        raise
    dist: Tensor = torch.ops.dsa.attn_dist.default(*batched[:4], *args[4:8], *batched[4:], *args[11:])
    dist = dist.squeeze(1) if per_head_block else dist[0]
    return dist if indices.dim() == 3 else dist.squeeze(-2)


def pack_kv_fp8(kv: Tensor) -> Tensor:
    """Packs latent keys in fp8, as :func:`sparse_mla_decode` reads them from its cache.

    The first 512 columns are quantized as by :func:`act_quant`, with one scale per key and block of 128 columns; 64
    further columns, the rope part, stay in bf16. A packed key is a row of bytes: 512 of e4m3, 16 of the four scales in
    fp32, and 128 of the rope part if there is one. This is the layout of FlashMLA's fp8 cache. A block that contains a
    NaN or an infinity becomes NaN when it is unpacked.

    Args:
        kv: latent keys [..., D], bf16 (on the CPU too), with any strides; D is 576 or 512.

    Returns:
        uint8 [..., 656] for D = 576, [..., 528] for D = 512; contiguous. Not differentiable.

    Raises:
        RuntimeError: kv violates one of these requirements. Also when there is no kernel for the GPU.
    """
    check_is_tensor("pack_kv_fp8", "kv", kv)
    result: Tensor = torch.ops.dsa.pack_kv_fp8.default(kv)
    return result


def sparse_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    sm_scale: float | None = None,
    d_v: int = 512,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Sparse multi-query latent attention of a few new tokens per sequence over a paged cache.

    For token n of sequence b and head h, over the valid entries i of its list, with key k_i in cache slot
    indices[b, n, i]::

        lse = log(sum_i exp(sm_scale * q.k_i))
        out = sum_i exp(sm_scale * q.k_i) * k_i[:d_v]  /  (exp(lse) + exp(attn_sink[h]))

    The cache slot of row `offset` in page `block` is block * page + offset. An id that names no cache slot is
    padding, at any place in the list, and so are the ids from topk_length[b, n] on. Nothing but the listed keys is
    read: all else in the cache may hold anything. A token without a key has out = 0 and lse = -inf. An id that is
    listed twice counts twice. Cache slots from 2^31 - 1 on cannot be listed.

    There is no causal mask: the list alone decides. :func:`indexer_topk_paged` with `return_slots` lists no key after
    the token itself, also with N > 1.

    Args:
        q: queries [B, N, H, D], bf16, H <= 128. On the CPU also fp32 and float64.
        kv_cache: latent keys of all sequences, in pages: [blocks, page, 1, D] like q, or packed by :func:`pack_kv_fp8`,
            uint8 [blocks, page, 1, 656 for D = 576, 528 for D = 512]. The first `d_v` columns of a key are its value.
            Pages may have any size.
        indices: cache slots of the selected keys [B, N, K], int32, in any order.
        sm_scale: factor on q.k, from -2^127 to 2^127; D**-0.5 by default. Models with MLA need another one, that of
            their heads before absorption: (128 + 64)**-0.5 in DeepSeek-V3.2.
        d_v: head dimension of a value. (D, d_v) is (576, 512) or (512, 512).
        topk_length: number of leading ids in use, int32 [B, N], or [B] for all tokens of a sequence; all by default.
        attn_sink: logit per head [H], fp32 (float64 for float64 inputs), that takes a share of the probability and
            adds no value. -inf disables the sink.
        batch_invariant: on a GPU, make the bits of a token's results independent of the batch around it, of its size
            and its other tokens. Keys are then never split over SMs, so that small batches take longer; see the
            documentation of the operator for how much.

    Returns:
        out [B, N, H, d_v] in the dtype of q, and lse [B, N, H], fp32, natural logarithm, without the sink. Neither is
        differentiable. Deterministic (bitwise).

    Nothing synchronizes with the host, and a call may be captured in a CUDA graph: a replay takes the contents that q,
    the cache, indices and topk_length have then.

    On CUDA the last dimension of q, kv_cache and indices must have stride 1 and every row of q and kv_cache must start
    16-byte aligned; all other strides are arbitrary, so that the cache may be a slice of a larger buffer.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when the tensors are on a GPU that is not sm_90, or the kernels were not built.
    """
    lengths = topk_length
    try:
        if lengths is not None and q.dim() == 4 and lengths.shape == q.shape[:1] and lengths.dtype == torch.int32:
            lengths = lengths[:, None].expand(-1, q.shape[1])
        result: tuple[Tensor, Tensor] = torch.ops.dsa.sparse_mla_decode.default(
            q, kv_cache, indices, sm_scale, d_v, lengths, attn_sink, batch_invariant
        )
    except (AttributeError, RuntimeError):
        check_are_tensors("sparse_mla_decode", (q, kv_cache, indices, sm_scale, d_v, topk_length, attn_sink))
        raise
    return result
