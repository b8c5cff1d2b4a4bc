"""torch.ops.dsa.coarse_attn_fwd: schema, checks, CPU and fake implementation, autograd, FLOP formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._block_sparse import check_heads
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function
from dsa_ext.reference.block_sparse import blocks
from dsa_ext.reference.layout import empty_rows_like

_OP = "coarse_attn_fwd"
library.define(
    "coarse_attn_fwd(Tensor q, Tensor k, Tensor v, float? sm_scale=None) -> (Tensor out, Tensor lse, Tensor scores)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.dsa.coarse_attn_fwd.default.redispatch


def _cpu(q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    check_heads(_OP, q, k, v, sm_scale)
    return reference.coarse_attn_fwd(q, k, v, sm_scale)


def _fake(q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    check_heads(_OP, q, k, v, sm_scale)
    dtype = reference.sparse_mla.compute_dtype(q)
    scores = q.new_empty(*q.shape[:2], blocks(q.shape[2]), k.shape[2], dtype=dtype)
    return empty_rows_like(q), q.new_empty(q.shape[:3], dtype=dtype), scores


class _Autograd(torch.autograd.Function):
    """Saves the results of the forward; the gradients are those of block_sparse_attn_fwd, with lists of all blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sm_scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse, scores = _redispatch(keyset, q, k, v, sm_scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sm_scale = sm_scale
        ctx.mark_non_differentiable(scores)
        ctx.set_materialize_grads(False)
        return out, lse, scores

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _dscores: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rows = (*q.shape[:2], blocks(q.shape[2]))
        # Every list is the same memory. One without blocks names one that does not exist.
        everything = torch.arange(torch.sym_max(1, blocks(k.shape[2])), dtype=torch.int32, device=q.device)
        index, number = everything.expand(*rows, -1), (everything[-1] + 1).expand(rows)
        if dout is None:
            dout = torch.zeros_like(out)
        args = (dout, q, k, v, out, lse, index, number, None, ctx.sm_scale, dlse)
        return None, *torch.ops.dsa.block_sparse_attn_bwd(*args), None


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "q", "k", "v")


@register_flop_formula(torch.ops.dsa.coarse_attn_fwd)
def _flops(q_shape: torch.Size, k_shape: torch.Size, *args: Any, **kwargs: Any) -> int:
    """Two matmuls. The kernel computes the first one twice, and takes sums over queries aside."""
    batch, heads, length, dim = q_shape
    return 4 * batch * heads * length * k_shape[2] * dim
