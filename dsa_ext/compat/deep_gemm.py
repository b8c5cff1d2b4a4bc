"""The indexer logits of deep_gemm, with its signatures and conventions, on the operators of this package.

The functions are those of DeepGEMM at commit 54e2261, for fp8. Their results have no gradient; :func:`indexer_logits`
has. What is not served raises NotImplementedError.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from dsa_ext import functional as functional  # which registers the operators
from dsa_ext.compat._calls import check_paged, check_tensors, fail, without_gradient

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "set_num_sms",
]

_indexer_logits = torch.ops.dsa.indexer_logits.default
_indexer_logits_paged = torch.ops.dsa.indexer_logits_paged.default
#: Most logits of whole rows that are held to return rows that begin at their first key.
_LOGITS = 2**26
_num_sms: int | None = None


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"dsa_ext.compat.deep_gemm does not serve {name}")


def _not_served(text: str) -> NoReturn:
    raise NotImplementedError(f"dsa_ext.compat.deep_gemm does not serve {text}")


def get_num_sms() -> int:
    """The number of multiprocessors of the current GPU, or what `set_num_sms` set."""
    if _num_sms is not None:
        return _num_sms
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def set_num_sms(num_sms: int) -> None:
    """Sets what `get_num_sms` returns. The kernels use all multiprocessors all the same. (A package of `install-shim`
    leaves both functions to DeepGEMM if it is installed, whose GEMMs obey them.)"""
    global _num_sms
    _num_sms = num_sms


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> Tensor:
    """Scores of the lightning indexer: :func:`indexer_logits` with float8_e4m3fn queries and keys.

    Args:
        q: queries [S, Hi, Di], float8_e4m3fn. Hi is 8, 16, 32 or 64; Di is 64 or 128.
        kv: keys [S_kv, Di], float8_e4m3fn, and their scales [S_kv], fp32.
        weights: weight per head [S, Hi], fp32, including the scale of q.
        cu_seq_len_k_start, cu_seq_len_k_end: first key of each query, and one past its last [S], int32.
        clean_logits: write -inf outside of these bounds. If False, the entries there are unspecified.
        max_seqlen_k: if not 0, row s of the result begins at the first key of query s and has `max_seqlen_k` columns;
            `clean_logits` must be False. This takes further kernels.

    Returns:
        logits [S, S_kv] or [S, max_seqlen_k], fp32; the row stride is a multiple of 4 elements.

    Raises:
        RuntimeError: an argument is invalid; the message names it.
    """
    if not isinstance(kv, (tuple, list)) or len(kv) != 2 or not all(isinstance(part, Tensor) for part in kv):
        fail("fp8_mqa_logits", "kv", "two tensors, keys and their scales", kv)
    if not isinstance(max_seqlen_k, (int, torch.SymInt)) or max_seqlen_k < 0:
        fail("fp8_mqa_logits", "max_seqlen_k", "an integer from 0 on", max_seqlen_k)
    if max_seqlen_k and clean_logits:
        raise RuntimeError("fp8_mqa_logits: clean_logits must be False with max_seqlen_k, got True")
    bounds = (cu_seq_len_k_start, cu_seq_len_k_end)
    try:
        if max_seqlen_k:
            return _from_first_key(q, kv, weights, *bounds, max_seqlen_k)
        result: Tensor = without_gradient(_indexer_logits, q, kv[0], weights, *bounds, kv[1], clean_logits)
    except (AttributeError, RuntimeError, TypeError):
        check_tensors("fp8_mqa_logits", q=q, weights=weights, cu_seq_len_k_start=bounds[0], cu_seq_len_k_end=bounds[1])
        raise
    return result


def _from_first_key(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, starts: Tensor, ends: Tensor, columns: int
) -> Tensor:
    """Rows of `columns` scores from the first key of each query on."""
    for name, tensor, dims, shape in (("q", q, 3, "[S, Hi, Di]"), ("kv[0]", kv[0], 2, "[S_kv, Di]")):
        if tensor.dim() != dims:
            fail("fp8_mqa_logits", name, shape, tensor)
    for name, tensor in (("weights", weights), ("cu_seq_len_k_start", starts), ("cu_seq_len_k_end", ends)):
        if tensor.shape[:1] != q.shape[:1]:
            fail("fp8_mqa_logits", name, f"as long as q, which has {q.shape[0]} rows", tensor)
    rows, keys = len(q), len(kv[0])
    parts = []
    step = max(1, _LOGITS // max(1, keys, columns))
    offsets = torch.arange(columns, device=q.device)
    for first in range(0, max(1, rows), step):  # once without rows, for the operator's checks
        run = slice(first, first + step)
        logits = without_gradient(_indexer_logits, q[run], kv[0], weights[run], starts[run], ends[run], kv[1], False)
        if keys > 0:
            places = (starts[run, None].clamp(min=0) + offsets).clamp_(max=keys - 1)
            parts.append(torch.gather(logits, 1, places))
        else:
            parts.append(logits.new_empty(logits.shape[0], columns))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fp8_alone(function: str, q: Any) -> Tensor:
    if isinstance(q, Tensor):
        return q
    if not isinstance(q, (tuple, list)) or len(q) != 2 or not isinstance(q[0], Tensor):
        fail(function, "q", "a tensor, or (values, None)", q)
    if q[1] is not None:
        _not_served(f"fp4 queries, a scale of q, in {function}")
    values: Tensor = q[0]
    return values


def _of_dtype(function: str, logits: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype not in (torch.float32, torch.bfloat16):
        raise RuntimeError(f"{function}: logits_dtype must be float32 or bfloat16, got {dtype}")
    return logits.to(dtype)


def fp8_fp4_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`fp8_mqa_logits` of q = (values, None). bfloat16 as `logits_dtype` takes a further kernel."""
    values = _fp8_alone("fp8_fp4_mqa_logits", q)
    bounds = (cu_seq_len_k_start, cu_seq_len_k_end)
    logits = fp8_mqa_logits(values, kv, weights, *bounds, clean_logits, max_seqlen_k)
    return logits if logits_dtype == torch.float32 else _of_dtype("fp8_fp4_mqa_logits", logits, logits_dtype)


def get_paged_mqa_logits_metadata(
    context_lens: Tensor, block_kv: int, num_sms: int, indices: Tensor | None = None
) -> Tensor:
    """A value for `schedule_meta`: a tensor [num_sms + 1, 2], int32, which is not initialized and which nothing reads.
    Callers may keep copies of it."""
    return torch.empty(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """Scores of the lightning indexer for a paged cache: :func:`indexer_logits_paged` with fp8 queries and keys.

    Args:
        q: queries [B, N, Hi, Di], float8_e4m3fn; N is 1 to 6.
        kv_cache: [blocks, page, 1, Di + 4], uint8: each page has its keys, float8_e4m3fn, then their scales, fp32.
        weights: weight per head [B * N, Hi], fp32, including the scale of q.
        context_lens: keys that each query sees [B, N], or of each sequence [B], whose last query sees them all; int32.
        block_table: the blocks of each sequence [B, pages], int32.
        schedule_meta: has no effect.
        max_context_len: columns of the result.
        clean_logits: write -inf beyond the keys of a query. If False, the entries there are unspecified.
        indices: not served.

    Returns:
        logits [B * N, max_context_len], fp32; the row stride is a multiple of 4 elements.

    Raises:
        NotImplementedError: an argument is not served.
        RuntimeError: an argument is invalid; the message names it.
    """
    if indices is not None:
        _not_served("indices of fp8_paged_mqa_logits, which queries share a sequence")
    try:
        if kv_cache.dim() != 4 or kv_cache.size(2) != 1:  # squeeze would take more
            check_paged("fp8_paged_mqa_logits", "kv_cache", kv_cache)
        args = (q, kv_cache.squeeze(2), weights, context_lens, block_table, max_context_len, clean_logits)
        result: Tensor = without_gradient(_indexer_logits_paged, *args)
    except (AttributeError, IndexError, RuntimeError):
        tables = {"context_lens": context_lens, "block_table": block_table}
        check_tensors("fp8_paged_mqa_logits", q=q, kv_cache=kv_cache, weights=weights, **tables)
        raise
    return result


def fp8_fp4_paged_mqa_logits(
    q: tuple[Tensor, Tensor | None],
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Tensor | None = None,
) -> Tensor:
    """`fp8_paged_mqa_logits` of q = (values, None). bfloat16 as `logits_dtype` takes a further kernel."""
    values = _fp8_alone("fp8_fp4_paged_mqa_logits", q)
    tables = (context_lens, block_table, schedule_meta)
    logits = fp8_paged_mqa_logits(values, kv_cache, weights, *tables, max_context_len, clean_logits, indices)
    return logits if logits_dtype == torch.float32 else _of_dtype("fp8_fp4_paged_mqa_logits", logits, logits_dtype)
