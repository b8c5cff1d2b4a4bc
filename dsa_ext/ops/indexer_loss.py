"""torch.ops.dsa.indexer_loss: schema, checks, CPU and fake implementation, autograd. It counts no FLOPs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, fail
from dsa_ext.ops._library import (
    explain_missing_cuda,
    follow_autocast,
    library,
    not_differentiable_again,
    use_autograd_function,
)

_OP = "indexer_loss"

library.define(
    "indexer_loss(Tensor scores, Tensor p, Tensor? valid=None, Tensor? row_weights=None) -> "
    "(Tensor loss, Tensor dscores)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., tuple[Tensor, Tensor]] = torch.ops.dsa.indexer_loss.default.redispatch


def _check(scores: Tensor, p: Tensor, valid: Tensor | None, row_weights: Tensor | None) -> None:
    on_cpu = scores.device.type == "cpu" and scores.dtype == torch.float64
    dtype = torch.float64 if on_cpu else torch.float32
    check_tensor(_OP, "scores", scores, dtype, R=None, K=None)
    rows, slots = scores.shape
    check_tensor(_OP, "p", p, dtype, R=rows, K=slots)
    if valid is not None:
        check_tensor(_OP, "valid", valid, torch.bool, R=rows, K=slots)
    if row_weights is not None:
        check_tensor(_OP, "row_weights", row_weights, dtype, R=rows)
    check_same_device(_OP, "scores", scores, p=p, valid=valid, row_weights=row_weights)


def _cpu(
    scores: Tensor, p: Tensor, valid: Tensor | None = None, row_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check(scores, p, valid, row_weights)
    return reference.indexer_loss(scores, p, valid, row_weights)


def _fake(
    scores: Tensor, p: Tensor, valid: Tensor | None = None, row_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check(scores, p, valid, row_weights)
    return scores.new_empty(scores.shape[0]), scores.new_empty(scores.shape)


class _Autograd(torch.autograd.Function):
    """The forward has the gradient already."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        scores: Tensor,
        p: Tensor,
        valid: Tensor | None = None,
        row_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        for name, tensor in (("p", p), ("row_weights", row_weights)):
            if tensor is not None and tensor.requires_grad:
                fail(_OP, f"{name} must not require a gradient: only scores has one")
        with torch._C._AutoDispatchBelowAutograd():
            loss, dscores = _redispatch(keyset, scores, p, valid, row_weights)
        ctx.save_for_backward(loss, dscores)
        ctx.mark_non_differentiable(dscores)
        return loss, dscores

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        loss, dscores = ctx.saved_tensors
        return None, *not_differentiable_again(_OP, (dscores * dloss[:, None],), loss), None, None, None


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP)
