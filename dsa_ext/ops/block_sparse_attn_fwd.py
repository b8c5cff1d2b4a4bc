"""torch.ops.dsa.block_sparse_attn_fwd: schema, checks, CPU and fake implementation, autograd, FLOP formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._block_sparse import check_inputs
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function
from dsa_ext.reference.layout import empty_rows_like

_OP = "block_sparse_attn_fwd"
library.define(
    "block_sparse_attn_fwd(Tensor q, Tensor k, Tensor v, Tensor q2k_index, Tensor q2k_num, Tensor? kv_block_size=None, "
    "float? sm_scale=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., tuple[Tensor, Tensor]] = torch.ops.dsa.block_sparse_attn_fwd.default.redispatch


def _cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = None,
    sm_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    check_inputs(_OP, q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)
    return reference.block_sparse_attn_fwd(q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None = None,
    sm_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    check_inputs(_OP, q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)
    return empty_rows_like(q), q.new_empty(q.shape[:3], dtype=reference.sparse_mla.compute_dtype(q))


class _Autograd(torch.autograd.Function):
    """Saves the results of the forward; the gradients come from dsa::block_sparse_attn_bwd."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q2k_index: Tensor,
        q2k_num: Tensor,
        kv_block_size: Tensor | None = None,
        sm_scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = _redispatch(keyset, q, k, v, q2k_index, q2k_num, kv_block_size, sm_scale)
        ctx.save_for_backward(q, k, v, out, lse, q2k_index, q2k_num, kv_block_size)
        ctx.sm_scale = sm_scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            dout = torch.zeros_like(ctx.saved_tensors[3])
        gradients = torch.ops.dsa.block_sparse_attn_bwd(dout, *ctx.saved_tensors, ctx.sm_scale, dlse)
        return None, *gradients, *(None,) * 4


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "q", "k", "v")


@register_flop_formula(torch.ops.dsa.block_sparse_attn_fwd)
def _flops(
    q_shape: torch.Size, k_shape: torch.Size, v_shape: torch.Size, index_shape: torch.Size, *args: Any, **kwargs: Any
) -> int:
    """Two matmuls over every listed block, whether it takes part or not: the count must not depend on data."""
    batch, heads, length, dim = q_shape
    return 4 * batch * heads * length * index_shape[3] * reference.block_sparse.BLOCK * dim
