"""torch.ops.dsa.indexer_logits: schema, checks, CPU and fake implementation, autograd, FLOP formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import fail
from dsa_ext.ops._indexer import check_scoring, scoring_flops
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function

_OP = "indexer_logits"
library.define(
    "indexer_logits(Tensor q, Tensor k, Tensor weights, Tensor cu_seqlen_ks, Tensor cu_seqlen_ke, "
    "Tensor? k_scale=None, bool clean=True) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., Tensor] = torch.ops.dsa.indexer_logits.default.redispatch


def _cpu(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None = None,
    clean: bool = True,
) -> Tensor:
    check_scoring(_OP, q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    return reference.indexer_logits(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale, clean)


def _fake(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None = None,
    clean: bool = True,
) -> Tensor:
    check_scoring(_OP, q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    return reference.indexer.empty_logits(q, k)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        cu_seqlen_ks: Tensor,
        cu_seqlen_ke: Tensor,
        k_scale: Tensor | None = None,
        clean: bool = True,
    ) -> Tensor:
        if q.dtype == torch.float8_e4m3fn:
            fail(_OP, "q must be bfloat16 where an argument requires a gradient, got float8_e4m3fn")
        with torch._C._AutoDispatchBelowAutograd():
            logits = _redispatch(keyset, q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale, clean)
        ctx.save_for_backward(q, k, weights, cu_seqlen_ks, cu_seqlen_ke)
        return logits

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dweights = torch.ops.dsa.indexer_logits_bwd(dlogits, *ctx.saved_tensors)
        return None, dq, dk, dweights, *(None,) * 4


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "q", "k")


@register_flop_formula(torch.ops.dsa.indexer_logits)
def _flops(q_shape: torch.Size, k_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return scoring_flops(q_shape, k_shape)
