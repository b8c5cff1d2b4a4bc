"""Sparse attention of heads with keys and values of their own, its gradients, and its weights summed over heads."""

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
    fail,
)
from dsa_ext.ops._operator import Args, Operator
from dsa_ext.reference.numerics import compute_dtype

NOPE_COLUMNS, ROPE_COLUMNS, VALUE_COLUMNS = 128, 64, 128
_KEYS = "Tensor k, Tensor k_rope"
_SEEN = (
    "float? sm_scale=None, bool causal=True, SymInt q_start=0, Tensor? starts=None, Tensor? ends=None, "
    "SymInt? window=None"
)


def _check_scores(a: Args) -> None:
    """Checks shared by all operators."""
    dtype = differentiable_dtype(a.q)
    check_tensor(a.op, "q", a.q, dtype, B=None, S=None, H=None, Dqk=NOPE_COLUMNS + ROPE_COLUMNS)
    batch, seq, heads, _ = a.q.shape
    check_tensor(a.op, "k", a.k, dtype, B=batch, S_kv=None, H=heads, Dnope=NOPE_COLUMNS)
    s_kv = a.k.shape[1]
    check_tensor(a.op, "k_rope", a.k_rope, dtype, B=batch, S_kv=s_kv, Drope=ROPE_COLUMNS)
    check_tensor(a.op, "indices", a.indices, torch.int32, B=batch, S=seq, K=None)
    rows = {"starts": a.starts, "ends": a.ends}
    for name, row in rows.items():
        if row is not None:
            check_tensor(a.op, name, row, torch.int32, B=batch, S=seq)
    if a.indices.shape[2] < 1:
        fail(a.op, f"indices must have at least one slot per row, got {describe(a.indices)}")
    check_scale(a.op, a.sm_scale)
    check_positions(a.op, a.q_start, a.starts, a.ends)
    if a.window is not None:
        if not a.causal or a.starts is not None:
            fail(a.op, f"window must be None with causal=False, or with starts and ends, got {a.window}")
        if not 1 <= a.window <= 2**62:
            fail(a.op, f"window must be from 1 to 2^62, got {a.window}")
    check_same_device(a.op, "q", a.q, k=a.k, k_rope=a.k_rope, indices=a.indices, **rows)


def _check(a: Args) -> None:
    _check_scores(a)
    batch, s_kv, heads, _ = a.k.shape
    check_tensor(a.op, "v", a.v, differentiable_dtype(a.q), B=batch, S_kv=s_kv, H=heads, Dv=VALUE_COLUMNS)
    check_same_device(a.op, "q", a.q, v=a.v)


def _check_dist(a: Args) -> None:
    _check_scores(a)
    check_tensor(a.op, "lse", a.lse, compute_dtype(a.q), **dict(zip("BSH", a.q.shape[:3], strict=True)))
    check_same_device(a.op, "q", a.q, lse=a.lse)


def _check_bwd(a: Args) -> None:
    _check(a)
    batch, seq, heads, _ = a.q.shape
    for name in ("dout", "out"):
        check_tensor(a.op, name, getattr(a, name), a.q.dtype, B=batch, S=seq, H=heads, Dv=VALUE_COLUMNS)
    check_tensor(a.op, "lse", a.lse, compute_dtype(a.q), B=batch, S=seq, H=heads)
    if a.dlse is not None:
        check_tensor(a.op, "dlse", a.dlse, compute_dtype(a.q), B=batch, S=seq, H=heads)
    check_same_device(a.op, "q", a.q, dout=a.dout, out=a.out, lse=a.lse, dlse=a.dlse)


def _backward(a: Args, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Tensor | None]:
    if dout is None:
        dout = torch.zeros_like(a.out)
    options = (a.sm_scale, a.causal, a.q_start, a.starts, a.ends, a.window, dlse)
    gradients = torch.ops.dsa.sparse_mha_bwd(dout, a.q, a.k, a.k_rope, a.v, a.out, a.lse, a.indices, *options)
    return dict(zip(("q", "k", "k_rope", "v"), gradients, strict=True))


def _matmul_columns(a: Args, columns: int) -> int:
    """Operations of matmuls with so many columns over all pairs of a query and a key, listed or not: the count must not
    depend on data."""
    batch, seq, heads, _ = a.q
    count: int = 2 * batch * seq * heads * a.k[1] * columns
    return count


Operator(
    f"sparse_mha_fwd(Tensor q, {_KEYS}, Tensor v, Tensor indices, {_SEEN}) -> (Tensor out, Tensor lse)",
    check=_check,
    fake=lambda a: (
        a.q.new_empty(*a.q.shape[:3], VALUE_COLUMNS),
        a.q.new_empty(a.q.shape[:3], dtype=compute_dtype(a.q)),
    ),
    reference=reference.sparse_mha_fwd,
    saves=("q", "k", "k_rope", "v", "indices", "starts", "ends", "out", "lse"),
    backward=_backward,
    cast=("q", "k", "k_rope", "v"),
    flops=lambda a: _matmul_columns(a, NOPE_COLUMNS + ROPE_COLUMNS + VALUE_COLUMNS),
)
Operator(
    f"sparse_mha_bwd(Tensor dout, Tensor q, {_KEYS}, Tensor v, Tensor out, Tensor lse, Tensor indices, {_SEEN}, "
    "Tensor? dlse=None) -> (Tensor dq, Tensor dk, Tensor dk_rope, Tensor dv)",
    check=_check_bwd,
    fake=lambda a: tuple(t.new_empty(t.shape) for t in (a.q, a.k, a.k_rope, a.v)),
    reference=reference.sparse_mha_bwd,
    # Scores, dP, dq, dk and dv.
    flops=lambda a: _matmul_columns(a, 3 * (NOPE_COLUMNS + ROPE_COLUMNS) + 2 * VALUE_COLUMNS),
)
Operator(
    f"sparse_mha_dist(Tensor q, {_KEYS}, Tensor indices, Tensor lse, {_SEEN}) -> Tensor",
    check=_check_dist,
    fake=lambda a: a.q.new_empty(a.indices.shape, dtype=compute_dtype(a.q)),
    reference=reference.sparse_mha_dist,
    cast=("q", "k", "k_rope"),
    flops=lambda a: _matmul_columns(a, NOPE_COLUMNS + ROPE_COLUMNS),
)
