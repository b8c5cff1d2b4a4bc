"""The indexer's scores of all keys and of listed keys, top-k selection, its loss, and their gradients."""

import math
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import (
    check_positions,
    check_same_device,
    check_scale,
    check_tensor,
    describe,
    differentiable_dtype,
    dtype_name,
    fail,
)
from dsa_ext.ops._library import not_differentiable_again
from dsa_ext.ops._operator import OPERATORS, Args, Operator
from dsa_ext.ops.sparse_mla import MAX_HEADS_PER_GROUP, WIDTHS
from dsa_ext.reference.indexer import empty_logits, runs
from dsa_ext.reference.numerics import compute_dtype

#: Dtypes that the kernels take, and those that the reference takes in addition on the CPU.
_DTYPES, _CPU_DTYPES = (torch.float8_e4m3fn, torch.bfloat16), (torch.float32, torch.float64)
_SELECT_DTYPES = (torch.float32, torch.bfloat16)
HEADS = (8, 16, 32, 64)
DIMS = (64, 128)
MAX_TOPK = 4096

_TENSORS = "Tensor q, Tensor k, Tensor weights"
_BOUNDED = f"{_TENSORS}, Tensor starts, Tensor ends"
_GRADIENTS = "Tensor dq, Tensor dk, Tensor dweights"


def _on_cpu(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in dtypes


# ---- scores


def _check_tensors(a: Args, dtype: torch.dtype | tuple[torch.dtype, ...]) -> None:
    """Checks dtypes and shapes of q, which must be of `dtype`, k and weights."""
    check_tensor(a.op, "q", a.q, dtype, S=None, Hi=None, Di=None)
    seq, heads, dim = a.q.shape
    check_tensor(a.op, "k", a.k, a.q.dtype, S_kv=None, Di=dim)
    check_tensor(a.op, "weights", a.weights, compute_dtype(a.q), S=seq, Hi=heads)


def check_heads(op: str, heads: int, dim: int) -> None:
    if heads not in HEADS:
        fail(op, f"q's heads must be 8, 16, 32 or 64, got {heads}")
    if dim not in DIMS:
        fail(op, f"q's head dimension must be 64 or 128, got {dim}")


def _check_bounded(a: Args, k_scale: Tensor | None = None) -> None:
    """Checks shared by the operators on all keys within bounds."""
    _check_tensors(a, a.q.dtype if _on_cpu(a.q, *_CPU_DTYPES) else _DTYPES)
    bounds = {"starts": a.starts, "ends": a.ends}
    for name, bound in bounds.items():
        check_tensor(a.op, name, bound, torch.int32, S=a.q.shape[0])
    if a.q.dtype == torch.float8_e4m3fn:
        if k_scale is None:
            fail(a.op, "k_scale (float32 [S_kv]) is required when q is float8_e4m3fn, got None")
        check_tensor(a.op, "k_scale", k_scale, torch.float32, S_kv=a.k.shape[0])
    elif k_scale is not None:
        fail(a.op, f"k_scale must be None when q is {dtype_name(a.q.dtype)}, got {describe(k_scale)}")
    check_heads(a.op, *a.q.shape[1:])
    check_same_device(a.op, "q", a.q, k=a.k, weights=a.weights, **bounds, k_scale=k_scale)


def _refuse_fp8(a: Args, where: str = "") -> None:
    if a.q.dtype == torch.float8_e4m3fn:
        fail(a.op, f"q must be bfloat16{where}, got float8_e4m3fn")


def _check_bounded_bwd(a: Args) -> None:
    _refuse_fp8(a)
    _check_bounded(a)
    check_tensor(a.op, "dlogits", a.dlogits, compute_dtype(a.q), S=a.q.shape[0], S_kv=a.k.shape[0])
    check_same_device(a.op, "q", a.q, dlogits=a.dlogits)


def _check_unbounded(a: Args) -> None:
    """Checks shared by the operators without bounds."""
    _check_tensors(a, differentiable_dtype(a.q))
    check_heads(a.op, *a.q.shape[1:])
    check_same_device(a.op, "q", a.q, k=a.k, weights=a.weights)


def _check_listed(a: Args) -> None:
    _check_unbounded(a)
    check_tensor(a.op, "indices", a.indices, torch.int32, S=a.q.shape[0], K=None)
    check_same_device(a.op, "q", a.q, indices=a.indices)


def _check_listed_bwd(a: Args) -> None:
    _check_listed(a)
    check_tensor(a.op, "dscores", a.dscores, compute_dtype(a.q), S=a.q.shape[0], K=a.indices.shape[1])
    check_same_device(a.op, "q", a.q, dscores=a.dscores)


def _fake_gradients(a: Args) -> tuple[Tensor, Tensor, Tensor]:
    return a.q.new_empty(a.q.shape), a.k.new_empty(a.k.shape), a.weights.new_empty(a.weights.shape)


class _LogitsFunction(torch.autograd.Function):
    """Rejects fp8, which has no gradient: autograd calls this only if a gradient is required."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> Tensor:
        operator = OPERATORS["indexer_logits"]
        a = operator.bind(*args)
        _refuse_fp8(a, " where an argument requires a gradient")
        with torch._C._AutoDispatchBelowAutograd():
            logits: Tensor = operator.overload.redispatch(keyset, *args)
        ctx.save_for_backward(*args[:5])
        ctx.deterministic = a.deterministic
        return logits

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.dsa.indexer_logits_bwd(dlogits, *ctx.saved_tensors, ctx.deterministic)
        return None, *gradients, *(None,) * 5


def _listed_backward(a: Args, dscores: Tensor | None) -> dict[str, Tensor | None]:
    if dscores is None:
        dscores = a.weights.new_zeros(a.indices.shape)
    gradients = torch.ops.dsa.indexer_scores_bwd(dscores, a.q, a.k, a.weights, a.indices, a.deterministic)
    return dict(zip(("q", "k", "weights"), gradients, strict=True))


def _matmul(a: Args, keys: int) -> int:
    """Operations of one matmul over every key or slot, visible or not: the count must not depend on data."""
    seq, heads, dim = a.q
    count: int = 2 * seq * heads * keys * dim
    return count


Operator(
    f"indexer_logits({_BOUNDED}, Tensor? k_scale=None, bool clean=True, bool deterministic=False) -> Tensor",
    check=lambda a: _check_bounded(a, a.k_scale),
    fake=lambda a: empty_logits(a.q, a.q.shape[0], a.k.shape[0]),
    reference=reference.indexer_logits,
    autograd=_LogitsFunction,
    cast=("q", "k"),
    flops=lambda a: _matmul(a, a.k[0]),
)
Operator(
    f"indexer_logits_bwd(Tensor dlogits, {_BOUNDED}, bool deterministic=False) -> ({_GRADIENTS})",
    check=_check_bounded_bwd,
    fake=_fake_gradients,
    reference=reference.indexer_logits_bwd,
    flops=lambda a: 3 * _matmul(a, a.k[0]),  # the scores again, dq and dk
)
Operator(
    f"indexer_scores({_TENSORS}, Tensor indices, bool deterministic=False) -> Tensor",
    check=_check_listed,
    fake=lambda a: a.q.new_empty(a.indices.shape, dtype=compute_dtype(a.q)),
    reference=reference.indexer_scores,
    saves=("q", "k", "weights", "indices"),
    backward=_listed_backward,
    cast=("q", "k"),
    flops=lambda a: _matmul(a, a.indices[1]),
)
Operator(
    f"indexer_scores_bwd(Tensor dscores, {_TENSORS}, Tensor indices, bool deterministic=False) -> ({_GRADIENTS})",
    check=_check_listed_bwd,
    fake=_fake_gradients,
    reference=reference.indexer_scores_bwd,
    flops=lambda a: 3 * _matmul(a, a.indices[1]),
)


# ---- selection


def check_topk(a: Args) -> None:
    if a.topk < 1 or a.topk > MAX_TOPK:
        fail(a.op, f"topk must be from 1 to {MAX_TOPK}, got {a.topk}")


def _check_indexer_topk(a: Args) -> None:
    _check_bounded(a, a.k_scale)
    check_topk(a)


def _check_select(a: Args) -> None:
    dtype = a.logits.dtype if _on_cpu(a.logits, torch.float64) else _SELECT_DTYPES
    check_tensor(a.op, "logits", a.logits, dtype, R=None, C=None)
    for name in ("starts", "ends"):
        check_tensor(a.op, name, getattr(a, name), torch.int32, R=a.logits.shape[0])
    check_topk(a)
    _check_page_table(a)
    tables = {"page_table": a.page_table, "row_to_sequence": a.row_to_sequence}
    check_same_device(a.op, "logits", a.logits, starts=a.starts, ends=a.ends, **tables)


def _check_page_table(a: Args) -> None:
    if a.page_table is None:
        if a.row_to_sequence is not None:
            fail(a.op, f"row_to_sequence must be None without page_table, got {describe(a.row_to_sequence)}")
        return
    rows = a.logits.shape[0]
    check_tensor(a.op, "page_table", a.page_table, torch.int32, B=None, pages=None)
    if a.page_size < 1 or a.page_size >= 2**31:
        fail(a.op, f"page_size must be from 1 to 2^31 - 1, got {a.page_size}")
    if a.row_to_sequence is not None:
        check_tensor(a.op, "row_to_sequence", a.row_to_sequence, torch.int32, R=rows)
        return
    sequences = a.page_table.shape[0]
    if rows % sequences != 0 if sequences > 0 else rows > 0:
        expected = f"int32 [B, pages] with a B that divides R={rows}, or row_to_sequence given"
        fail(a.op, f"page_table must be {expected}, got {describe(a.page_table)}")


def fake_selection(like: Tensor, rows: int, topk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (rows, topk)
    return like.new_empty(shape, dtype=torch.int32), like.new_empty(shape, dtype=dtype)


Operator(
    f"indexer_topk({_BOUNDED}, SymInt topk, Tensor? k_scale=None) -> (Tensor indices, Tensor values)",
    check=_check_indexer_topk,
    fake=lambda a: fake_selection(a.q, a.q.shape[0], a.topk, compute_dtype(a.q)),
    reference=reference.indexer_topk,
    cast=("q", "k"),
    flops=lambda a: _matmul(a, a.k[0]),
)
Operator(
    "topk_select(Tensor logits, Tensor starts, Tensor ends, SymInt topk, Tensor? page_table=None, "
    "SymInt page_size=64, Tensor? row_to_sequence=None) -> (Tensor indices, Tensor values)",
    check=_check_select,
    fake=lambda a: fake_selection(a.logits, a.logits.shape[0], a.topk, a.logits.dtype),
    reference=reference.topk_select,
)


# ---- loss


def _check_loss(a: Args) -> None:
    dtype = torch.float64 if _on_cpu(a.scores, torch.float64) else torch.float32
    check_tensor(a.op, "scores", a.scores, dtype, R=None, K=None)
    rows, slots = a.scores.shape
    check_tensor(a.op, "p", a.p, dtype, R=rows, K=slots)
    if a.valid is not None:
        check_tensor(a.op, "valid", a.valid, torch.bool, R=rows, K=slots)
    if a.row_weights is not None:
        check_tensor(a.op, "row_weights", a.row_weights, dtype, R=rows)
    check_same_device(a.op, "scores", a.scores, p=a.p, valid=a.valid, row_weights=a.row_weights)


def _check_dense_loss(a: Args) -> None:
    _refuse_fp8(a)
    _check_unbounded(a)
    seq = a.q.shape[0]
    check_tensor(a.op, "main_q", a.main_q, a.q.dtype, S=seq, H=None, D=None)
    heads, columns = a.main_q.shape[1:]
    if heads > MAX_HEADS_PER_GROUP:
        fail(a.op, f"main_q's heads must be at most {MAX_HEADS_PER_GROUP}, got {heads}")
    if columns not in WIDTHS:
        fail(a.op, f"main_q's head dimension must be 576 or 512, got {columns}")
    check_tensor(a.op, "main_kv", a.main_kv, a.q.dtype, S_kv=a.k.shape[0], D=columns)
    check_tensor(a.op, "lse", a.lse, a.weights.dtype, S=seq, H=heads)
    if a.row_weights is not None:
        check_tensor(a.op, "row_weights", a.row_weights, a.weights.dtype, S=seq)
    bounds = {"starts": a.starts, "ends": a.ends}
    for name, bound in bounds.items():
        if bound is not None:
            check_tensor(a.op, name, bound, torch.int32, S=seq)
    main = {"main_q": a.main_q, "main_kv": a.main_kv, "lse": a.lse}
    check_same_device(a.op, "q", a.q, **main, row_weights=a.row_weights, **bounds)
    check_scale(a.op, a.sm_scale)
    check_positions(a.op, a.q_start, a.starts, a.ends)


def _bounds(q: Tensor, first: int, last: int, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    """starts and ends of the queries at positions [first, last), for `keys` keys."""
    ks = torch.zeros(last - first, device=q.device, dtype=torch.int32)
    if not causal:
        return ks, torch.full_like(ks, keys)
    return ks, torch.arange(first + 1, last + 1, device=q.device).clamp(max=keys).int()


def _dense_loss(a: Args) -> tuple[Tensor, ...]:
    """indexer_loss over all keys, in chunks of queries."""
    seq, s_kv = a.q.shape[0], a.k.shape[0]
    loss = a.weights.new_zeros(())
    dq, dweights = a.q.new_zeros(a.q.shape), a.weights.new_zeros(a.weights.shape)
    dk = a.k.new_zeros(a.k.shape, dtype=a.weights.dtype)
    ids = torch.arange(s_kv, device=a.q.device, dtype=torch.int32)
    for run in runs(seq if s_kv > 0 else 0, s_kv):
        if a.starts is None:
            first, last = a.q_start + run.start, a.q_start + min(run.stop, seq)
            keys = min(s_kv, last) if a.causal else s_kv
            starts, ends = _bounds(a.q, first, last, keys, a.causal)
        else:
            keys, starts, ends = s_kv, a.starts[run], a.ends[run]
        row_weights = None if a.row_weights is None else a.row_weights[run]
        if row_weights is not None:  # a row that does not count sees no key, so that NaN in it reaches nothing
            ends = torch.where(row_weights == 0, starts, ends)
        bounded = a.q[run], a.k[:keys], a.weights[run], starts, ends
        logits = torch.ops.dsa.indexer_logits(*bounded)
        listed = ids[:keys].expand(1, len(starts), 1, keys)
        main = a.main_q[None, run], a.main_kv[None, :keys, None], listed, a.lse[None, run]
        p = torch.ops.dsa.attn_dist(*main, a.sm_scale, starts=starts[None], ends=ends[None])
        losses, dlogits = torch.ops.dsa.indexer_loss(logits, p[0, :, 0], None, row_weights)
        loss += losses.sum()
        if a.gradients:
            dq[run], more_dk, dweights[run] = torch.ops.dsa.indexer_logits_bwd(dlogits, *bounded, a.deterministic)
            dk[:keys] += more_dk
    return (loss, dq, dk.to(a.k.dtype), dweights) if a.gradients else (loss, *_no_gradients(a))


def _no_gradients(a: Args) -> tuple[Tensor, ...]:
    return a.q.new_empty(0), a.k.new_empty(0), a.weights.new_empty(0)


def _fake_dense_loss(a: Args) -> tuple[Tensor, ...]:
    return a.weights.new_empty(()), *(_fake_gradients(a) if a.gradients else _no_gradients(a))


def _dense_loss_products(a: Args) -> int:
    """Operations of the scores, with their gradients if these are computed, and of the attention to all keys."""
    attention: int = 2 * math.prod(a.main_q) * a.k[0]
    return attention + (4 if a.gradients else 1) * _matmul(a, a.k[0])


def _forward_with_gradients(
    ctx: Any, keyset: torch._C.DispatchKeySet, a: Args, count: int, only: str
) -> tuple[Tensor, ...]:
    """Forward of a loss that also returns the gradients with respect to its first `count` arguments. No other argument
    may require a gradient."""
    for name, value in zip(a._fields[count:], a[count:], strict=True):
        if isinstance(value, Tensor) and value.requires_grad:
            fail(a.op, f"{name} must not require a gradient: only {only}")
    with torch._C._AutoDispatchBelowAutograd():
        results: tuple[Tensor, ...] = OPERATORS[a.op].overload.redispatch(keyset, *a)
    ctx.save_for_backward(*results)
    ctx.mark_non_differentiable(*results[1:])
    ctx.set_materialize_grads(False)  # they would be zeros, as large as the gradients
    return results


def _saved_gradients(ctx: Any, op: str, factor: Tensor | None) -> tuple[Tensor | None, ...]:
    """What the backward of a loss returns: the gradients that its forward computed, times `factor`, from the incoming
    gradient; None for the dispatch keys and all other arguments."""
    arguments = len(OPERATORS[op].arguments)
    if factor is None:  # no gradient arrives
        return (None,) * (1 + arguments)
    loss, *saved = ctx.saved_tensors
    gradients = not_differentiable_again(op, tuple(gradient * factor for gradient in saved), loss)
    return None, *gradients, *(None,) * (arguments - len(gradients))


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        a = OPERATORS["indexer_loss"].bind(*args)
        return _forward_with_gradients(ctx, keyset, a, 1, "scores has one")

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return _saved_gradients(ctx, "indexer_loss", None if dloss is None else dloss[:, None])


class _DenseLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        a = OPERATORS["indexer_dense_loss"].bind(*args)._replace(gradients=True)
        return _forward_with_gradients(ctx, keyset, a, 3, "q, k and weights have one")

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return _saved_gradients(ctx, "indexer_dense_loss", dloss)


Operator(
    "indexer_loss(Tensor scores, Tensor p, Tensor? valid=None, Tensor? row_weights=None) -> "
    "(Tensor loss, Tensor dscores)",
    check=_check_loss,
    fake=lambda a: (a.scores.new_empty(a.scores.shape[0]), a.scores.new_empty(a.scores.shape)),
    reference=reference.indexer_loss,
    autograd=_LossFunction,
)
Operator(
    f"indexer_dense_loss({_TENSORS}, Tensor main_q, Tensor main_kv, Tensor lse, Tensor? row_weights=None, "
    "float? sm_scale=None, bool causal=True, SymInt q_start=0, Tensor? starts=None, Tensor? ends=None, "
    "bool gradients=False, bool deterministic=False) -> "
    f"(Tensor loss, {_GRADIENTS})",
    check=_check_dense_loss,
    fake=_fake_dense_loss,
    composite=_dense_loss,
    autograd=_DenseLossFunction,
    cast=("q", "k", "main_q", "main_kv"),
    flops=_dense_loss_products,
)
