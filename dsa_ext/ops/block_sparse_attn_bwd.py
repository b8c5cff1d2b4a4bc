"""torch.ops.dsa.block_sparse_attn_bwd: the gradients of block_sparse_attn_fwd. Schema, checks, CPU and fake, FLOPs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._block_sparse import check_inputs
from dsa_ext.ops._checks import check_same_device, check_tensor
from dsa_ext.ops._library import differentiable_once, explain_missing_cuda, follow_autocast, library
from dsa_ext.reference.layout import empty_rows_like

_OP = "block_sparse_attn_bwd"
library.define(
    "block_sparse_attn_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor q2k_index, "
    "Tensor q2k_num, Tensor? kv_block_size=None, float? sm_scale=None, Tensor? dlse=None) -> "
    "(Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None,
    sm_scale: float | None,
    dlse: Tensor | None,
) -> None:
    check_inputs(_OP, q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)
    batch, heads, length, dim = q.shape
    check_tensor(_OP, "dout", dout, q.dtype, B=batch, H=heads, Nq=length, D=dim)
    check_tensor(_OP, "out", out, q.dtype, B=batch, H=heads, Nq=length, D=dim)
    row_dtype = reference.sparse_mla.compute_dtype(q)
    check_tensor(_OP, "lse", lse, row_dtype, B=batch, H=heads, Nq=length)
    if dlse is not None:
        check_tensor(_OP, "dlse", dlse, row_dtype, B=batch, H=heads, Nq=length)
    check_same_device(_OP, "q", q, dout=dout, out=out, lse=lse, dlse=dlse)


def _cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = None,
    sm_scale: float | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, q, k, v, out, lse, q2k_index, q2k_num, kv_block_size, sm_scale, dlse)
    return reference.block_sparse_attn_bwd(dout, q, k, v, out, lse, q2k_index, q2k_num, kv_block_size, sm_scale, dlse)


def _fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = None,
    sm_scale: float | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, q, k, v, out, lse, q2k_index, q2k_num, kv_block_size, sm_scale, dlse)
    return empty_rows_like(q), empty_rows_like(k), empty_rows_like(v)


library.impl(_OP, _cpu, "CPU")
differentiable_once(_OP)
follow_autocast(_OP)
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)


@register_flop_formula(torch.ops.dsa.block_sparse_attn_bwd)
def _flops(
    dout_shape: torch.Size,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    out_shape_of_forward: torch.Size,
    lse_shape: torch.Size,
    index_shape: torch.Size,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Five matmuls over every listed block: scores, dP, dq, dk and dv."""
    batch, heads, length, dim = q_shape
    return 10 * batch * heads * length * index_shape[3] * reference.block_sparse.BLOCK * dim
