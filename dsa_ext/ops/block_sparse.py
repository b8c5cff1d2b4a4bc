"""Block-sparse attention over listed blocks, coarse attention over all keys, block selection and gated fusion."""

import math

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_scale, check_tensor, describe, differentiable_dtype, fail
from dsa_ext.ops._operator import Args, Operator
from dsa_ext.reference.block_select import slots
from dsa_ext.reference.block_sparse import BLOCK, blocks
from dsa_ext.reference.layout import empty_rows_like
from dsa_ext.reference.numerics import compute_dtype

_COLUMNS = (64, 128)
#: Maximum number of blocks of keys that block_select takes.
_MAX_BLOCKS = 16384
#: Arguments that say which keys a block of queries sees.
_LISTS = "Tensor q2k_index, Tensor q2k_num, Tensor? kv_block_size=None"


def _check_columns(a: Args, name: str) -> None:
    columns = getattr(a, name).shape[3]
    if columns not in _COLUMNS:
        fail(a.op, f"{name}'s head dimension must be 64 or 128, got {columns}")


def _check_attention(a: Args) -> None:
    """Checks shared by all three attention operators."""
    dtype = differentiable_dtype(a.q)
    check_tensor(a.op, "q", a.q, dtype, B=None, H=None, Nq=None, D=None)
    batch, heads, _, dim = a.q.shape
    check_tensor(a.op, "k", a.k, dtype, B=batch, Hkv=None, Nkv=None, D=dim)
    kv_heads, kv_length = a.k.shape[1:3]
    check_tensor(a.op, "v", a.v, dtype, B=batch, Hkv=kv_heads, Nkv=kv_length, D=dim)
    _check_columns(a, "q")
    if kv_heads < 1 or heads % kv_heads != 0:
        fail(a.op, f"q's heads must be a multiple of k's, got {heads} and {kv_heads}")
    check_scale(a.op, a.sm_scale)
    check_same_device(a.op, "q", a.q, k=a.k, v=a.v)


def _check_sparse(a: Args) -> None:
    _check_attention(a)
    rows = {"B": a.q.shape[0], "H": a.q.shape[1], "Mq": blocks(a.q.shape[2])}
    check_tensor(a.op, "q2k_index", a.q2k_index, torch.int32, **rows, M=None)
    check_tensor(a.op, "q2k_num", a.q2k_num, torch.int32, **rows)
    if a.kv_block_size is not None:
        check_tensor(a.op, "kv_block_size", a.kv_block_size, torch.int32, Mkv=blocks(a.k.shape[2]))
    if a.q2k_index.shape[3] < 1:
        fail(a.op, f"q2k_index must have at least one slot per row, got {describe(a.q2k_index)}")
    check_same_device(a.op, "q", a.q, q2k_index=a.q2k_index, q2k_num=a.q2k_num, kv_block_size=a.kv_block_size)


def _check_sparse_bwd(a: Args) -> None:
    _check_sparse(a)
    batch, heads, length, dim = a.q.shape
    rows = {"B": batch, "H": heads, "Nq": length}
    check_tensor(a.op, "dout", a.dout, a.q.dtype, **rows, D=dim)
    check_tensor(a.op, "out", a.out, a.q.dtype, **rows, D=dim)
    check_tensor(a.op, "lse", a.lse, compute_dtype(a.q), **rows)
    if a.dlse is not None:
        check_tensor(a.op, "dlse", a.dlse, compute_dtype(a.q), **rows)
    check_same_device(a.op, "q", a.q, dout=a.dout, out=a.out, lse=a.lse, dlse=a.dlse)


def _check_select(a: Args) -> None:
    check_tensor(a.op, "scores", a.scores, (torch.float32, torch.bfloat16), B=None, H=None, Mq=None, Mkv=None)
    if a.scores.shape[3] > _MAX_BLOCKS:
        fail(a.op, f"scores must have at most {_MAX_BLOCKS} blocks per row, got {a.scores.shape[3]}")
    if a.topk is not None and a.topk < 1:
        fail(a.op, f"topk must be at least 1, got {a.topk}")
    if not 0 < a.tau <= 1:
        fail(a.op, f"tau must be above 0 and at most 1, got {a.tau:g}")
    if a.min_blocks < 0:
        fail(a.op, f"min_blocks must be at least 0, got {a.min_blocks}")
    if not 0 <= a.min_ratio <= a.max_ratio <= 1:
        got = f"{a.min_ratio:g} and {a.max_ratio:g}"
        fail(a.op, f"min_ratio and max_ratio must be ascending, from 0 to 1, got {got}")


def _check_fusion(a: Args) -> None:
    dtype = differentiable_dtype(a.fine)
    gate_dtypes = (torch.bfloat16, torch.float32, *([dtype] if dtype == torch.float64 else []))
    check_tensor(a.op, "fine", a.fine, dtype, B=None, H=None, N=None, D=None)
    batch, heads, length, dim = a.fine.shape
    check_tensor(a.op, "coarse", a.coarse, dtype, B=batch, H=heads, N=length, D=dim)
    check_tensor(a.op, "gate", a.gate, gate_dtypes, B=batch, H=heads, N=length)
    _check_columns(a, "fine")
    check_same_device(a.op, "fine", a.fine, coarse=a.coarse, gate=a.gate)


def _check_fusion_bwd(a: Args) -> None:
    _check_fusion(a)
    batch, heads, length, dim = a.fine.shape
    check_tensor(a.op, "dout", a.dout, a.fine.dtype, B=batch, H=heads, N=length, D=dim)
    check_same_device(a.op, "fine", a.fine, dout=a.dout)


def _fake_attention(a: Args) -> tuple[Tensor, Tensor]:
    return empty_rows_like(a.q), a.q.new_empty(a.q.shape[:3], dtype=compute_dtype(a.q))


def _fake_coarse(a: Args) -> tuple[Tensor, ...]:
    shape = (*a.q.shape[:2], blocks(a.q.shape[2]), a.k.shape[2])
    return *_fake_attention(a), a.q.new_empty(shape, dtype=compute_dtype(a.q))


def _fake_select(a: Args) -> tuple[Tensor, Tensor]:
    rows, width = a.scores.shape[:3], slots(a.scores.shape[3], a.topk, a.min_blocks, a.max_ratio)
    return a.scores.new_empty(*rows, width, dtype=torch.int32), a.scores.new_empty(rows, dtype=torch.int32)


def _sparse_backward(a: Args, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Tensor | None]:
    return _attention_backward(a, dout, dlse, a.q2k_index, a.q2k_num, a.kv_block_size)


def _coarse_backward(
    a: Args, dout: Tensor | None, dlse: Tensor | None, _dscores: Tensor | None
) -> dict[str, Tensor | None]:
    """Gradients by block_sparse_attn_bwd, with lists of all blocks."""
    rows = (*a.q.shape[:2], blocks(a.q.shape[2]))
    # All lists are views of the same memory. If there are no blocks, they list one that does not exist: it is skipped.
    everything = torch.arange(torch.sym_max(1, blocks(a.k.shape[2])), dtype=torch.int32, device=a.q.device)
    return _attention_backward(a, dout, dlse, everything.expand(*rows, -1), (everything[-1] + 1).expand(rows), None)


def _attention_backward(
    a: Args, dout: Tensor | None, dlse: Tensor | None, index: Tensor, number: Tensor, kv_block_size: Tensor | None
) -> dict[str, Tensor | None]:
    if dout is None:
        dout = torch.zeros_like(a.out)
    args = (dout, a.q, a.k, a.v, a.out, a.lse, index, number, kv_block_size, a.sm_scale, dlse)
    return dict(zip("qkv", torch.ops.dsa.block_sparse_attn_bwd(*args), strict=True))


def _fusion_backward(a: Args, dout: Tensor | None) -> dict[str, Tensor | None]:
    if dout is None:
        dout = a.fine.new_zeros(a.fine.shape)
    gradients = torch.ops.dsa.gated_fusion_bwd(dout, a.fine, a.coarse, a.gate)
    return dict(zip(("fine", "coarse", "gate"), gradients, strict=True))


Operator(
    f"block_sparse_attn_fwd(Tensor q, Tensor k, Tensor v, {_LISTS}, float? sm_scale=None) -> (Tensor out, Tensor lse)",
    check=_check_sparse,
    fake=_fake_attention,
    reference=reference.block_sparse_attn_fwd,
    saves=("q", "k", "v", "out", "lse", "q2k_index", "q2k_num", "kv_block_size"),
    backward=_sparse_backward,
    cast=("q", "k", "v"),
    # Two matmuls over every slot of the lists, in use or not: the count must not depend on data.
    flops=lambda a: 4 * math.prod(a.q) * a.q2k_index[3] * BLOCK,
)
Operator(
    f"block_sparse_attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_LISTS}, "
    "float? sm_scale=None, Tensor? dlse=None) -> (Tensor dq, Tensor dk, Tensor dv)",
    check=_check_sparse_bwd,
    fake=lambda a: tuple(map(empty_rows_like, (a.q, a.k, a.v))),
    reference=reference.block_sparse_attn_bwd,
    # Five matmuls over every slot of the lists: scores, dP, dq, dk and dv.
    flops=lambda a: 10 * math.prod(a.q) * a.q2k_index[3] * BLOCK,
)
Operator(
    "coarse_attn_fwd(Tensor q, Tensor k, Tensor v, float? sm_scale=None) -> (Tensor out, Tensor lse, Tensor scores)",
    check=_check_attention,
    fake=_fake_coarse,
    reference=reference.coarse_attn_fwd,
    saves=("q", "k", "v", "out", "lse"),
    backward=_coarse_backward,
    constant_results=("scores",),
    cast=("q", "k", "v"),
    # Two matmuls. Not counted: the kernel computes the first one twice, and sums over queries.
    flops=lambda a: 4 * math.prod(a.q) * a.k[2],
)
Operator(
    "block_select(Tensor scores, SymInt? topk=None, float tau=0.9, SymInt min_blocks=1, float min_ratio=0.05, "
    "float max_ratio=0.5) -> (Tensor q2k_index, Tensor q2k_num)",
    check=_check_select,
    fake=_fake_select,
    reference=reference.block_select,
)
Operator(
    "gated_fusion_fwd(Tensor fine, Tensor coarse, Tensor gate) -> Tensor",
    check=_check_fusion,
    fake=lambda a: empty_rows_like(a.fine),
    reference=reference.gated_fusion_fwd,
    saves=("fine", "coarse", "gate"),
    backward=_fusion_backward,
    cast=("fine", "coarse"),
)
Operator(
    "gated_fusion_bwd(Tensor dout, Tensor fine, Tensor coarse, Tensor gate) -> "
    "(Tensor dfine, Tensor dcoarse, Tensor dgate)",
    check=_check_fusion_bwd,
    fake=lambda a: (empty_rows_like(a.fine), empty_rows_like(a.coarse), torch.empty_like(a.gate)),
    reference=reference.gated_fusion_bwd,
)
