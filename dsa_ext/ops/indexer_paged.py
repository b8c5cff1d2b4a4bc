"""The indexer's scores and selection of keys in a paged cache."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, differentiable_dtype, fail
from dsa_ext.ops._operator import Args, Operator
from dsa_ext.ops.indexer import check_heads, check_topk, fake_selection
from dsa_ext.reference.indexer import empty_logits
from dsa_ext.reference.numerics import compute_dtype

#: Most queries per sequence, and most columns of the logits.
MAX_QUERIES, MAX_COLUMNS = 6, 2**31 - 2**26

_PAGED = "Tensor q, Tensor k_cache, Tensor weights, Tensor context_lens, Tensor block_table"


def _columns(a: Args) -> int:
    """The columns of the logits. `a` has tensors or shapes."""
    cache, table = (getattr(x, "shape", x) for x in (a.k_cache, a.block_table))
    columns: int = table[1] * cache[1] if getattr(a, "max_len", None) is None else a.max_len
    return columns


def _check_paged(a: Args) -> None:
    fp8 = a.q.dtype == torch.float8_e4m3fn
    check_tensor(a.op, "q", a.q, (torch.float8_e4m3fn, differentiable_dtype(a.q)), B=None, N=None, Hi=None, Di=None)
    batch, queries, heads, dim = a.q.shape
    width = {"Di + 4": dim + 4} if fp8 else {"Di": dim}
    check_tensor(a.op, "k_cache", a.k_cache, torch.uint8 if fp8 else a.q.dtype, blocks=None, page=None, **width)
    check_tensor(a.op, "weights", a.weights, compute_dtype(a.q), **{"B * N": batch * queries, "Hi": heads})
    lens = {"B": batch} if a.context_lens.dim() == 1 else {"B": batch, "N": queries}
    check_tensor(a.op, "context_lens", a.context_lens, torch.int32, **lens)
    check_tensor(a.op, "block_table", a.block_table, torch.int32, B=batch, pages=None)
    if queries < 1 or queries > MAX_QUERIES:
        fail(a.op, f"q must have 1 to {MAX_QUERIES} queries per sequence, got {queries}")
    check_heads(a.op, heads, dim)
    if fp8 and a.k_cache.shape[1] % 4 != 0:
        fail(a.op, f"k_cache must have a multiple of 4 keys per page when q is float8_e4m3fn, got {a.k_cache.shape[1]}")
    columns = _columns(a)
    if columns < 0 or columns > MAX_COLUMNS:
        fail(a.op, f"the logits must have 0 to 2^31 - 2^26 columns (max_len, or pages * page), got {columns}")
    others = {"context_lens": a.context_lens, "block_table": a.block_table}
    check_same_device(a.op, "q", a.q, k_cache=a.k_cache, weights=a.weights, **others)


def _check_topk_paged(a: Args) -> None:
    _check_paged(a)
    check_topk(a)


def _flops(a: Args) -> int:
    """Operations over every column, visible or not: the count must not depend on data."""
    batch, queries, heads, dim = a.q
    count: int = 2 * batch * queries * heads * dim * _columns(a)
    return count


def _fake_logits(a: Args) -> Tensor:
    return empty_logits(a.q, a.q.shape[0] * a.q.shape[1], _columns(a))


Operator(
    f"indexer_logits_paged({_PAGED}, SymInt? max_len=None, bool clean=True) -> Tensor",
    check=_check_paged,
    fake=_fake_logits,
    reference=reference.indexer_logits_paged,
    cast=("q", "k_cache"),
    flops=_flops,
)
Operator(
    f"indexer_topk_paged({_PAGED}, SymInt topk, bool return_slots=False) -> (Tensor indices, Tensor values)",
    check=_check_topk_paged,
    fake=lambda a: fake_selection(a.q, a.q.shape[0] * a.q.shape[1], a.topk, compute_dtype(a.q)),
    reference=reference.indexer_topk_paged,
    cast=("q", "k_cache"),
    flops=_flops,
)
