"""torch.ops.dsa.gated_fusion_fwd: schema, checks, CPU and fake implementation, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._gated_fusion import check_inputs
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function
from dsa_ext.reference.layout import empty_rows_like

_OP = "gated_fusion_fwd"
library.define(
    "gated_fusion_fwd(Tensor fine, Tensor coarse, Tensor gate) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., Tensor] = torch.ops.dsa.gated_fusion_fwd.default.redispatch


def _cpu(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    check_inputs(_OP, fine, coarse, gate)
    return reference.gated_fusion_fwd(fine, coarse, gate)


def _fake(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    check_inputs(_OP, fine, coarse, gate)
    return empty_rows_like(fine)


class _Autograd(torch.autograd.Function):
    """Saves the arguments; the gradients come from dsa::gated_fusion_bwd."""

    @staticmethod
    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(fine, coarse, gate)
        with torch._C._AutoDispatchBelowAutograd():
            return _redispatch(keyset, fine, coarse, gate)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.ops.dsa.gated_fusion_bwd(dout, *ctx.saved_tensors)


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "fine", "coarse")
