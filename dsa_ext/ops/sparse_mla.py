"""Sparse multi-query latent attention, its gradients, its attention weights summed over heads, and decoding."""

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
from dsa_ext.reference.decode import packed_bytes
from dsa_ext.reference.numerics import compute_dtype
from dsa_ext.reference.sparse_mla import HEADS_PER_BLOCK

WIDTHS = (576, 512)
MAX_HEADS_PER_GROUP = 128
VALUE_COLUMNS = 512
#: Arguments that say which slots a query sees.
_SLOTS = (
    "bool causal=True, SymInt q_start=0, SymInt positions_per_key=1, Tensor? topk_length=None, Tensor? starts=None, "
    "Tensor? ends=None"
)


def _check_common(a: Args, attn_sink: Tensor | None = None) -> None:
    """Checks shared by all operators."""
    dtype = differentiable_dtype(a.q)
    check_tensor(a.op, "q", a.q, dtype, B=None, S=None, H=None, Dqk=None)
    batch, seq, heads, d_qk = a.q.shape
    check_tensor(a.op, "kv", a.kv, dtype, B=batch, S_kv=None, G=None, Dqk=d_qk)
    groups = a.kv.shape[2]
    check_tensor(a.op, "indices", a.indices, torch.int32, B=batch, S=seq, G=groups, K=None)
    rows = {name: getattr(a, name) for name in ("topk_length", "starts", "ends")}
    for name, row in rows.items():
        if row is not None:
            check_tensor(a.op, name, row, torch.int32, B=batch, S=seq)
    if attn_sink is not None:
        check_tensor(a.op, "attn_sink", attn_sink, compute_dtype(a.q), H=heads)
    if groups < 1 or heads % groups != 0 or heads // groups > MAX_HEADS_PER_GROUP:
        expected = f"a multiple of kv's groups, at most {MAX_HEADS_PER_GROUP} per group"
        fail(a.op, f"q's heads must be {expected}, got {heads} heads and {groups} groups")
    if a.indices.shape[3] < 1:
        fail(a.op, f"indices must have at least one slot per row, got {describe(a.indices)}")
    check_scale(a.op, a.sm_scale)
    check_positions(a.op, a.q_start, a.starts, a.ends)
    if a.positions_per_key < 1:
        fail(a.op, f"positions_per_key must be at least 1, got {a.positions_per_key}")
    if a.starts is not None and a.positions_per_key != 1:
        fail(a.op, f"positions_per_key must be 1 with starts and ends, got {a.positions_per_key}")
    check_same_device(a.op, "q", a.q, kv=a.kv, indices=a.indices, **rows, attn_sink=attn_sink)


def _check(a: Args) -> None:
    _check_common(a, a.attn_sink)
    if a.q.shape[3] not in WIDTHS or a.d_v != VALUE_COLUMNS:
        fail(a.op, f"(Dqk, d_v) must be (576, 512) or (512, 512), got ({a.q.shape[3]}, {a.d_v})")


def _check_bwd(a: Args) -> None:
    _check(a)
    batch, seq, heads, _ = a.q.shape
    for name in ("dout", "out"):
        check_tensor(a.op, name, getattr(a, name), a.q.dtype, B=batch, S=seq, H=heads, Dv=a.d_v)
    check_tensor(a.op, "lse", a.lse, compute_dtype(a.q), B=batch, S=seq, H=heads)
    if a.dlse is not None:
        check_tensor(a.op, "dlse", a.dlse, compute_dtype(a.q), B=batch, S=seq, H=heads)
    check_same_device(a.op, "q", a.q, dout=a.dout, out=a.out, lse=a.lse, dlse=a.dlse)


def _check_dist(a: Args) -> None:
    _check_common(a)
    batch, seq, heads, d_qk = a.q.shape
    if d_qk not in WIDTHS:
        fail(a.op, f"Dqk must be 576 or 512, got {d_qk}")
    check_tensor(a.op, "lse", a.lse, compute_dtype(a.q), B=batch, S=seq, H=heads)
    check_same_device(a.op, "q", a.q, lse=a.lse)
    if a.normalize and a.per_head_block:
        reason = "rows are divided by the sum over all blocks"
        fail(a.op, f"normalize must be False when per_head_block is True: {reason}")


def _fake_bwd(a: Args) -> tuple[Tensor, ...]:
    d_sink = a.q.new_empty(0, dtype=torch.float32) if a.attn_sink is None else a.attn_sink.new_empty(a.attn_sink.shape)
    dist = _empty_dist(a, (_head_blocks(a), *a.indices.shape) if a.return_dist else (0,))
    return a.q.new_empty(a.q.shape), a.kv.new_empty(a.kv.shape), d_sink, dist


def _head_blocks(a: Args) -> int:
    blocks: int = -(-(a.q.shape[2] // a.kv.shape[2]) // HEADS_PER_BLOCK)
    return blocks


def _empty_dist(a: Args, shape: tuple[int, ...]) -> Tensor:
    result: Tensor = a.q.new_empty(shape, dtype=compute_dtype(a.q))
    return result


def _fake_dist(a: Args) -> Tensor:
    return _empty_dist(a, (_head_blocks(a), *a.indices.shape) if a.per_head_block else a.indices.shape)


def _backward(a: Args, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Tensor | None]:
    if dout is None:
        dout = torch.zeros_like(a.out)
    slots = (a.causal, a.q_start, a.positions_per_key, a.topk_length, a.starts, a.ends)
    options = (a.sm_scale, a.d_v, *slots, a.attn_sink, dlse, False, a.deterministic)
    dq, dkv, d_sink, _ = torch.ops.dsa.sparse_mla_bwd(dout, a.q, a.kv, a.out, a.lse, a.indices, *options)
    return {"q": dq, "kv": dkv, "attn_sink": None if a.attn_sink is None else d_sink}


def _fake_max(a: Args) -> tuple[Tensor, Tensor, Tensor]:
    lse, max_logits = (a.q.new_empty(a.q.shape[:3], dtype=compute_dtype(a.q)) for _ in range(2))
    return a.q.new_empty(*a.q.shape[:3], a.d_v), lse, max_logits


def _backward_max(a: Args, dout: Tensor | None, dlse: Tensor | None, _: None) -> dict[str, Tensor | None]:
    if a.inf_if_empty:
        a = a._replace(lse=a.lse.masked_fill(a.max_logits == -torch.inf, -torch.inf))
    return _backward(a, dout, dlse)


def _matmul_columns(a: Args, columns: int) -> int:
    """Operations of matmuls with so many columns over every slot, visible or not: the count must not depend on data."""
    batch, seq, heads, _ = a.q
    count: int = 2 * batch * seq * heads * a.indices[3] * columns
    return count


def _check_pack(a: Args) -> None:
    if a.kv.dtype != torch.bfloat16 or a.kv.dim() == 0 or a.kv.shape[-1] not in WIDTHS:
        fail(a.op, f"kv must be bfloat16 [.., D] with D 576 or 512, got {describe(a.kv)}")


def _check_decode(a: Args) -> None:
    dtype = differentiable_dtype(a.q)
    check_tensor(a.op, "q", a.q, dtype, B=None, N=None, H=None, Dqk=None)
    batch, tokens, heads, d_qk = a.q.shape
    if d_qk not in WIDTHS or a.d_v != VALUE_COLUMNS:
        fail(a.op, f"(Dqk, d_v) must be (576, 512) or (512, 512), got ({d_qk}, {a.d_v})")
    if a.kv_cache.dtype == torch.uint8:
        check_tensor(a.op, "kv_cache", a.kv_cache, torch.uint8, blocks=None, page=None, G=1, bytes=packed_bytes(d_qk))
    else:
        check_tensor(a.op, "kv_cache", a.kv_cache, (dtype, torch.uint8), blocks=None, page=None, G=1, Dqk=d_qk)
    check_tensor(a.op, "indices", a.indices, torch.int32, B=batch, N=tokens, K=None)
    if a.topk_length is not None:
        check_tensor(a.op, "topk_length", a.topk_length, torch.int32, B=batch, N=tokens)
    if a.attn_sink is not None:
        check_tensor(a.op, "attn_sink", a.attn_sink, compute_dtype(a.q), H=heads)
    if heads > MAX_HEADS_PER_GROUP:
        fail(a.op, f"q must have at most {MAX_HEADS_PER_GROUP} heads, got {heads}")
    if a.indices.shape[2] < 1:
        fail(a.op, f"indices must have at least one slot per row, got {describe(a.indices)}")
    check_scale(a.op, a.sm_scale)
    others = {name: getattr(a, name) for name in ("kv_cache", "indices", "topk_length", "attn_sink")}
    check_same_device(a.op, "q", a.q, **others)


def _fake_decode(a: Args) -> tuple[Tensor, Tensor]:
    return a.q.new_empty(*a.q.shape[:3], a.d_v), a.q.new_empty(a.q.shape[:3], dtype=compute_dtype(a.q))


def _flops_decode(a: Args) -> int:
    """Of the matrix products over every slot, valid or not: the count must not depend on data."""
    batch, tokens, heads, d_qk = a.q
    count: int = 2 * batch * tokens * heads * a.indices[2] * (d_qk + a.d_v)
    return count


Operator(
    "sparse_mla_fwd(Tensor q, Tensor kv, Tensor indices, float? sm_scale=None, SymInt d_v=512, "
    f"{_SLOTS}, Tensor? attn_sink=None, bool deterministic=False) -> (Tensor out, Tensor lse)",
    check=_check,
    fake=lambda a: (a.q.new_empty(*a.q.shape[:3], a.d_v), a.q.new_empty(a.q.shape[:3], dtype=compute_dtype(a.q))),
    reference=reference.sparse_mla_fwd,
    saves=("q", "kv", "indices", "topk_length", "starts", "ends", "attn_sink", "out", "lse"),
    backward=_backward,
    cast=("q", "kv"),
    flops=lambda a: _matmul_columns(a, a.q[3] + a.d_v),
)
Operator(
    "sparse_mla_max_fwd(Tensor q, Tensor kv, Tensor indices, float? sm_scale=None, SymInt d_v=512, "
    f"{_SLOTS}, Tensor? attn_sink=None, bool deterministic=False, bool inf_if_empty=False) -> "
    "(Tensor out, Tensor lse, Tensor max_logits)",
    check=_check,
    fake=_fake_max,
    reference=reference.sparse_mla_max_fwd,
    saves=("q", "kv", "indices", "topk_length", "starts", "ends", "attn_sink", "out", "lse", "max_logits"),
    backward=_backward_max,
    constant_results=("max_logits",),
    cast=("q", "kv"),
    flops=lambda a: _matmul_columns(a, a.q[3] + a.d_v),
)
Operator(
    "sparse_mla_bwd(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor indices, float? sm_scale=None, "
    f"SymInt d_v=512, {_SLOTS}, Tensor? attn_sink=None, Tensor? dlse=None, bool return_dist=False, "
    "bool deterministic=False) -> (Tensor dq, Tensor dkv, Tensor d_sink, Tensor dist)",
    check=_check_bwd,
    fake=_fake_bwd,
    reference=reference.sparse_mla_bwd,
    # Scores, dP, dQ, and the parts of dkv that come from the keys and from the values.
    flops=lambda a: _matmul_columns(a, 3 * a.q[3] + 2 * a.d_v),
)
Operator(
    f"attn_dist(Tensor q, Tensor kv, Tensor indices, Tensor lse, float? sm_scale=None, {_SLOTS}, "
    "bool normalize=False, bool per_head_block=False) -> Tensor",
    check=_check_dist,
    fake=_fake_dist,
    reference=reference.attn_dist,
    cast=("q", "kv"),
    flops=lambda a: _matmul_columns(a, a.q[3]),
)
Operator(
    "pack_kv_fp8(Tensor kv) -> Tensor",
    check=_check_pack,
    fake=lambda a: a.kv.new_empty(*a.kv.shape[:-1], packed_bytes(a.kv.shape[-1]), dtype=torch.uint8),
    reference=reference.pack_kv_fp8,
)
Operator(
    "sparse_mla_decode(Tensor q, Tensor kv_cache, Tensor indices, float? sm_scale=None, SymInt d_v=512, "
    "Tensor? topk_length=None, Tensor? attn_sink=None, bool batch_invariant=False, bool inf_if_empty=False) -> "
    "(Tensor out, Tensor lse)",
    check=_check_decode,
    fake=_fake_decode,
    reference=reference.sparse_mla_decode,
    cast=("q",),
    flops=_flops_decode,
)
