"""torch.ops.dsa.mhc_pre_fwd: schema, checks, CPU and fake implementation, autograd, FLOP formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function
from dsa_ext.ops._mhc import check_eps, check_pre
from dsa_ext.reference.sparse_mla import compute_dtype

_OP = "mhc_pre_fwd"
_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
library.define(
    "mhc_pre_fwd(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma=None, float eps=1e-6) -> "
    "(Tensor h_in, Tensor h_post, Tensor h_res, Tensor inv_rms, Tensor h_mix, Tensor h_pre)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., _Results] = torch.ops.dsa.mhc_pre_fwd.default.redispatch


def _check(x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, eps: float) -> None:
    check_pre(_OP, x, phi, alpha, gamma, bias)
    check_eps(_OP, eps)


def _cpu(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, eps: float = 1e-6
) -> _Results:
    _check(x, phi, alpha, bias, gamma, eps)
    return reference.mhc_pre_fwd(x, phi, alpha, bias, gamma, eps)


def _fake(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, eps: float = 1e-6
) -> _Results:
    _check(x, phi, alpha, bias, gamma, eps)
    (batch, length, streams, columns), dtype = x.shape, compute_dtype(x)
    sizes = ((streams,), (streams, streams), (), (streams * streams + 2 * streams,), (streams,))
    h_post, h_res, inv_rms, h_mix, h_pre = (x.new_empty(batch, length, *size, dtype=dtype) for size in sizes)
    return x.new_empty(batch, length, columns), h_post, h_res, inv_rms, h_mix, h_pre


class _Autograd(torch.autograd.Function):
    """Saves the arguments but for the bias, and what the gates were; the gradients come from dsa::mhc_pre_bwd."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        x: Tensor,
        phi: Tensor,
        alpha: Tensor,
        bias: Tensor,
        gamma: Tensor | None = None,
        eps: float = 1e-6,
    ) -> _Results:
        with torch._C._AutoDispatchBelowAutograd():
            results = _redispatch(keyset, x, phi, alpha, bias, gamma, eps)
        _, h_post, _, inv_rms, h_mix, h_pre = results
        ctx.save_for_backward(x, phi, alpha, gamma, h_post, inv_rms, h_mix, h_pre)
        ctx.eps = eps
        ctx.mark_non_differentiable(inv_rms, h_mix, h_pre)
        return results

    @staticmethod
    def backward(ctx: Any, dh_in: Tensor, dh_post: Tensor, dh_res: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.dsa.mhc_pre_bwd(dh_in, dh_post, dh_res, *ctx.saved_tensors, ctx.eps)
        has_gamma = ctx.saved_tensors[3] is not None
        return None, *(gradients if has_gamma else (*gradients[:4], None)), None


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "x")


@register_flop_formula(torch.ops.dsa.mhc_pre_fwd)
def _flops(x_shape: torch.Size, phi_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    batch, length = x_shape[:2]
    return 2 * batch * length * phi_shape[0] * phi_shape[1]
