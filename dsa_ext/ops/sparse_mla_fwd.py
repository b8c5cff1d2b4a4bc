"""torch.ops.dsa.sparse_mla_fwd: schema, checks, CPU and fake implementation, autograd, FLOP formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function
from dsa_ext.ops._sparse_mla import check_inputs

_OP = "sparse_mla_fwd"
library.define(
    "sparse_mla_fwd(Tensor q, Tensor kv, Tensor indices, float? sm_scale=None, SymInt d_v=512, bool causal=True, "
    "SymInt q_start=0, SymInt kv_stride=1, Tensor? topk_length=None, Tensor? attn_sink=None) -> "
    "(Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., tuple[Tensor, Tensor]] = torch.ops.dsa.sparse_mla_fwd.default.redispatch


def _cpu(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    q_start: int = 0,
    kv_stride: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_inputs(_OP, q, kv, indices, sm_scale, d_v, q_start, kv_stride, topk_length, attn_sink)
    return reference.sparse_mla_fwd(q, kv, indices, sm_scale, d_v, causal, q_start, kv_stride, topk_length, attn_sink)


def _fake(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    q_start: int = 0,
    kv_stride: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_inputs(_OP, q, kv, indices, sm_scale, d_v, q_start, kv_stride, topk_length, attn_sink)
    lse = q.new_empty(q.shape[:3], dtype=reference.sparse_mla.compute_dtype(q))
    return q.new_empty(*q.shape[:3], d_v), lse


class _Autograd(torch.autograd.Function):
    """Saves the results of the forward; the gradients come from dsa::sparse_mla_bwd."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float | None = None,
        d_v: int = 512,
        causal: bool = True,
        q_start: int = 0,
        kv_stride: int = 1,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _redispatch(
                keyset, q, kv, indices, sm_scale, d_v, causal, q_start, kv_stride, topk_length, attn_sink
            )
        ctx.save_for_backward(q, kv, indices, topk_length, attn_sink, out, lse)
        ctx.options = (sm_scale, d_v, causal, q_start, kv_stride)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, kv, indices, topk_length, attn_sink, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dkv, d_sink = torch.ops.dsa.sparse_mla_bwd(
            dout,
            q,
            kv,
            out,
            lse,
            indices,
            *ctx.options,
            topk_length,
            attn_sink,
            dlse,
        )
        return None, dq, dkv, *(None,) * 7, None if attn_sink is None else d_sink


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "q", "kv")


@register_flop_formula(torch.ops.dsa.sparse_mla_fwd)
def _flops(
    q_shape: torch.Size, kv_shape: torch.Size, indices_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any
) -> int:
    """Two matmuls over every listed slot, whether it takes part or not: the count must not depend on data."""
    batch, seq, heads, d_qk = q_shape
    d_v: int = out_shape[0][3]
    return 2 * batch * seq * heads * indices_shape[3] * (d_qk + d_v)
