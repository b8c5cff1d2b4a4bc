"""torch.ops.dsa.attn_dist: schema, checks, CPU and fake implementation, FLOP formula. It has no gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, fail
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, without_gradient
from dsa_ext.ops._sparse_mla import check_inputs

_OP = "attn_dist"

library.define(
    "attn_dist(Tensor q, Tensor kv, Tensor indices, Tensor lse, float? sm_scale=None, bool causal=True, "
    "SymInt q_start=0, SymInt kv_stride=1, Tensor? topk_length=None, bool normalize=False, "
    "bool per_head_block=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None,
    q_start: int,
    kv_stride: int,
    topk_length: Tensor | None,
    normalize: bool,
    per_head_block: bool,
) -> None:
    check_inputs(_OP, q, kv, indices, sm_scale, None, q_start, kv_stride, topk_length, None)
    batch, seq, heads, _ = q.shape
    check_tensor(_OP, "lse", lse, reference.sparse_mla.compute_dtype(q), B=batch, S=seq, H=heads)
    check_same_device(_OP, "q", q, lse=lse)
    if normalize and per_head_block:
        reason = "since rows are to be divided by the sum of all blocks"
        fail(_OP, f"normalize must be False beside per_head_block, {reason}")


def _cpu(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    kv_stride: int = 1,
    topk_length: Tensor | None = None,
    normalize: bool = False,
    per_head_block: bool = False,
) -> Tensor:
    _check(q, kv, indices, lse, sm_scale, q_start, kv_stride, topk_length, normalize, per_head_block)
    return reference.attn_dist(
        q, kv, indices, lse, sm_scale, causal, q_start, kv_stride, topk_length, normalize, per_head_block
    )


def _fake(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    kv_stride: int = 1,
    topk_length: Tensor | None = None,
    normalize: bool = False,
    per_head_block: bool = False,
) -> Tensor:
    _check(q, kv, indices, lse, sm_scale, q_start, kv_stride, topk_length, normalize, per_head_block)
    blocks = -(-(q.shape[2] // kv.shape[2]) // reference.sparse_mla.HEADS_PER_BLOCK)
    shape = (blocks, *indices.shape) if per_head_block else indices.shape
    return q.new_empty(shape, dtype=reference.sparse_mla.compute_dtype(q))


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)
follow_autocast(_OP, "q", "kv")


@register_flop_formula(torch.ops.dsa.attn_dist)
def _flops(q_shape: torch.Size, kv_shape: torch.Size, indices_shape: torch.Size, *args: Any, **kwargs: Any) -> int:
    """One matmul over every listed slot, whether it takes part or not: the count must not depend on data."""
    batch, seq, heads, d_qk = q_shape
    return 2 * batch * seq * heads * indices_shape[3] * d_qk
