"""The sparse attention of flash_mla, with its signatures and conventions, on the operators of this package.

The functions are those of FlashMLA at commit 9241ae3, with the further arguments of sgl-flash-mla 1.0.0. Their results
have no gradient; :func:`sparse_mla` has. What is not served raises NotImplementedError.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from dsa_ext import functional as functional  # which registers the operators
from dsa_ext.compat._calls import check_lengths, check_paged, check_tensors, fail, without_gradient

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]

_forward = torch.ops.dsa.sparse_mla_fwd.default
_forward_with_max = torch.ops.dsa.sparse_mla_max_fwd.default
_decode = torch.ops.dsa.sparse_mla_decode.default
#: Bytes per token of the caches of DeepSeek-V3.2, with and without rope columns, and of DeepSeek-V4.
_V32, _V32_NO_ROPE, _V4 = 656, 528, 584
_PACKED = (torch.int8, torch.float8_e4m3fn)


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"dsa_ext.compat.flash_mla does not serve {name}")


def _not_served(text: str) -> NoReturn:
    raise NotImplementedError(f"dsa_ext.compat.flash_mla does not serve {text}")


@dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata` returns: nothing is planned in advance, so the fields stay as they are."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """A value for `tile_scheduler_metadata`, which nothing reads, and None for `num_splits`. Takes any arguments."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(seqlens_k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Tensors for `tile_scheduler_metadata` [1, 8] and `num_splits` [B + 1], int32, which are not initialized and which
    nothing reads: for callers that keep copies of them."""
    metadata = torch.empty(1, 8, dtype=torch.int32, device=seqlens_k.device)
    return metadata, torch.empty(len(seqlens_k) + 1, dtype=torch.int32, device=seqlens_k.device)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    out: None = None,
    indexer_topk: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of each query to the keys that it lists: :func:`sparse_mla` without a causal mask.

    Args:
        q: queries [S, H, D], bf16; D is 576 or 512, H any number with at most 128 heads for each of the G groups.
        kv: keys [S_kv, G, D], bf16; the first `d_v` columns of a key are its value.
        indices: ids of the keys [S, G, K], int32; ids outside of [0, S_kv) are skipped.
        sm_scale: factor on q.k.
        d_v: 512.
        attn_sink: logit per head [H], fp32, which takes a share of the probability.
        topk_length: number of leading slots in use [S], int32.
        use_legacy: has no effect.
        return_log2_lse: False returns None for the last two results. True is not served.
        out, indexer_topk: not served.

    Returns:
        out [S, H, 512], bf16; the largest score max_logits [S, H] and lse [S, H], fp32, in units of the natural
        logarithm. For a row without keys: 0, -inf, +inf.

    Raises:
        NotImplementedError: an argument is not served.
        RuntimeError: an argument is invalid; the message names it.
    """
    if out is not None:
        _not_served("out of flash_mla_sparse_fwd, a tensor for the result")
    if indexer_topk:
        _not_served("indexer_topk of flash_mla_sparse_fwd, a second lse")
    if return_log2_lse:
        _not_served("return_log2_lse=True of flash_mla_sparse_fwd")
    if topk_length is not None:
        check_lengths("flash_mla_sparse_fwd", "topk_length", topk_length)
    try:
        lengths = None if topk_length is None else topk_length.unsqueeze(0)
        args = (q.unsqueeze(0), kv.unsqueeze(0), indices.unsqueeze(0), sm_scale, d_v)
        options = (False, 0, 1, lengths, None, None, attn_sink, False)
        if return_log2_lse is None:
            result, lse, max_logits = without_gradient(_forward_with_max, *args, *options, True)
            return result[0], max_logits[0], lse[0]
        return without_gradient(_forward, *args, *options)[0][0], None, None
    except (AttributeError, RuntimeError):
        check_tensors("flash_mla_sparse_fwd", q=q, kv=kv, indices=indices)
        raise


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int = 512,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: None = None,
    extra_indices_in_kvcache: None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: None = None,
    descale_k: None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to the slots of a paged cache that it lists: :func:`sparse_mla_decode`.

    Args:
        q: queries [B, N, H, D], bf16; D is 576 or 512, H is 1 to 128.
        k_cache: the cache [blocks, page, 1, 656] for D = 576, uint8, int8 or float8_e4m3fn: 512 e4m3 numbers, four fp32
            scales and 64 bf16 rope columns per token; or [blocks, page, 1, 528] for D = 512 with
            kv_format="V32_NO_ROPE", the same without rope columns; or [blocks, page, 1, D], bf16. Any page size, and
            pages and tokens may be parts of larger ones.
        block_table, cache_seqlens, tile_scheduler_metadata, num_splits, is_fp8_kvcache, use_legacy: have no effect.
        head_dim_v: 512.
        softmax_scale: factor on q.k, D**-0.5 by default.
        causal: must be False.
        indices: slots of the keys, block * page + offset [B, N, K], int32; slots that do not exist are skipped.
        attn_sink: logit per head [H], fp32, which takes a share of the probability.
        topk_length: number of leading entries of indices in use [B], int32.
        enable_batch_invariant: the bits of a query's results do not depend on the batch.
        kv_format: None, "V32" or "V32_NO_ROPE".
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length, descale_q, descale_k: not served.

    Returns:
        out [B, N, H, 512], bf16, and lse [B, H, N], fp32, natural logarithm. For a row without keys: 0 and +inf.

    Raises:
        NotImplementedError: an argument is not served.
        RuntimeError: an argument is invalid; the message names it.
    """
    if indices is None:
        _not_served("dense decoding (flash_mla_with_kvcache without indices)")
    if extra_k_cache is not None or extra_indices_in_kvcache is not None or extra_topk_length is not None:
        _not_served("extra_k_cache of flash_mla_with_kvcache, a second cache")
    if descale_q is not None or descale_k is not None:
        _not_served("descale_q and descale_k of flash_mla_with_kvcache")
    if causal:
        raise RuntimeError("flash_mla_with_kvcache: causal must be False with indices, got True")
    try:
        kind = k_cache.dtype
        if kind == torch.uint8:
            _check_format(k_cache, kv_format)
        elif kind in _PACKED:
            k_cache = k_cache.view(torch.uint8)
            _check_format(k_cache, kv_format)
        elif kind != torch.bfloat16:
            fail("flash_mla_with_kvcache", "k_cache", "uint8, int8, float8_e4m3fn or bfloat16", k_cache)
        elif kv_format is not None:
            fail("flash_mla_with_kvcache", "kv_format", "None with a cache in bfloat16", repr(kv_format))
        if topk_length is not None:
            check_lengths("flash_mla_with_kvcache", "topk_length", topk_length)
            topk_length = topk_length.unsqueeze(1).expand(-1, q.shape[1])
        options = (softmax_scale, head_dim_v, topk_length, attn_sink, enable_batch_invariant, True)
        out, lse = without_gradient(_decode, q, k_cache, indices, *options)
    except (AttributeError, IndexError, RuntimeError):
        check_tensors("flash_mla_with_kvcache", q=q, k_cache=k_cache, indices=indices)
        if q.dim() != 4:
            fail("flash_mla_with_kvcache", "q", "[B, N, H, D]", q)
        check_paged("flash_mla_with_kvcache", "k_cache", k_cache)
        raise
    return out, lse.transpose(1, 2)


def _check_format(k_cache: Tensor, kv_format: str | None) -> None:
    width = k_cache.shape[-1]
    if kv_format not in (None, "V32", "V32_NO_ROPE", "V4"):
        fail("flash_mla_with_kvcache", "kv_format", "None, 'V32' or 'V32_NO_ROPE'", repr(kv_format))
    if width == _V32 and kv_format in (None, "V32"):
        return
    if width == _V32_NO_ROPE and kv_format == "V32_NO_ROPE":
        return
    if width == _V4 or kv_format == "V4":
        _not_served("caches of DeepSeek-V4 (584 bytes per token)")
    if width == _V32_NO_ROPE and kv_format is None:
        reason = 'DeepSeek-V4.1; kv_format="V32_NO_ROPE" selects that of DeepSeek-V3.2 without rope'
        _not_served(f"caches of 528 bytes per token without kv_format, the layout of {reason}")
    raise RuntimeError(
        "flash_mla_with_kvcache: k_cache must have 656 bytes per token, or 528 and kv_format='V32_NO_ROPE', got "
        f"{width} and kv_format={kv_format!r}"
    )
