"""torch.ops.dsa.sparse_mla_bwd: the gradients of sparse_mla_fwd. Schema, checks, CPU and fake implementation, FLOPs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor
from dsa_ext.ops._library import (
    differentiable_once,
    explain_missing_cuda,
    follow_autocast,
    follow_deterministic_switch,
    library,
)
from dsa_ext.ops._sparse_mla import check_inputs

_OP = "sparse_mla_bwd"

library.define(
    "sparse_mla_bwd(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor indices, float? sm_scale=None, "
    "SymInt d_v=512, bool causal=True, SymInt q_start=0, SymInt kv_stride=1, Tensor? topk_length=None, "
    "Tensor? attn_sink=None, Tensor? dlse=None, bool deterministic=False) -> (Tensor dq, Tensor dkv, Tensor d_sink)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sm_scale: float | None,
    d_v: int,
    q_start: int,
    kv_stride: int,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    dlse: Tensor | None,
) -> None:
    check_inputs(_OP, q, kv, indices, sm_scale, d_v, q_start, kv_stride, topk_length, attn_sink)
    batch, seq, heads, _ = q.shape
    check_tensor(_OP, "dout", dout, q.dtype, B=batch, S=seq, H=heads, Dv=d_v)
    check_tensor(_OP, "out", out, q.dtype, B=batch, S=seq, H=heads, Dv=d_v)
    row_dtype = reference.sparse_mla.compute_dtype(q)
    check_tensor(_OP, "lse", lse, row_dtype, B=batch, S=seq, H=heads)
    if dlse is not None:
        check_tensor(_OP, "dlse", dlse, row_dtype, B=batch, S=seq, H=heads)
    check_same_device(_OP, "q", q, dout=dout, out=out, lse=lse, dlse=dlse)


def _cpu(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    q_start: int = 0,
    kv_stride: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,  # index_add_ on the CPU always is
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, q, kv, out, lse, indices, sm_scale, d_v, q_start, kv_stride, topk_length, attn_sink, dlse)
    return reference.sparse_mla_bwd(
        dout, q, kv, out, lse, indices, sm_scale, causal, q_start, kv_stride, topk_length, attn_sink, dlse
    )


def _fake(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    q_start: int = 0,
    kv_stride: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, q, kv, out, lse, indices, sm_scale, d_v, q_start, kv_stride, topk_length, attn_sink, dlse)
    d_sink = q.new_empty(0, dtype=torch.float32) if attn_sink is None else attn_sink.new_empty(attn_sink.shape)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), d_sink


library.impl(_OP, _cpu, "CPU")
differentiable_once(_OP)
follow_deterministic_switch(_OP)
follow_autocast(_OP)
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)


@register_flop_formula(torch.ops.dsa.sparse_mla_bwd)
def _flops(
    dout_shape: torch.Size,
    q_shape: torch.Size,
    kv_shape: torch.Size,
    out_shape_of_forward: torch.Size,
    lse_shape: torch.Size,
    indices_shape: torch.Size,
    *args: Any,
    out_shape: Any,
    **kwargs: Any,
) -> int:
    """Five matmuls over every listed slot: scores, dP, dQ, and the key's and the value's part of dkv."""
    batch, seq, heads, d_qk = q_shape
    d_v = dout_shape[3]
    return 2 * batch * seq * heads * indices_shape[3] * (3 * d_qk + 2 * d_v)
