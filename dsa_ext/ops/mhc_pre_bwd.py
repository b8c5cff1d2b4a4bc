"""torch.ops.dsa.mhc_pre_bwd: gradients of mhc_pre_fwd. Schema, checks, CPU and fake implementation, FLOP formula."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor
from dsa_ext.ops._library import differentiable_once, explain_missing_cuda, follow_autocast, library
from dsa_ext.ops._mhc import check_eps, check_pre, check_token

_OP = "mhc_pre_bwd"
_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
library.define(
    "mhc_pre_bwd(Tensor dh_in, Tensor dh_post, Tensor dh_res, Tensor x, Tensor phi, Tensor alpha, Tensor? gamma, "
    "Tensor h_post, Tensor inv_rms, Tensor h_mix, Tensor h_pre, float eps=1e-6) -> "
    "(Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(
    dh_in: Tensor,
    dh_post: Tensor,
    dh_res: Tensor,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    gamma: Tensor | None,
    h_post: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor,
    eps: float = 1e-6,
) -> None:
    check_pre(_OP, x, phi, alpha, gamma)
    check_eps(_OP, eps)
    batch, length, streams, columns = x.shape
    check_tensor(_OP, "dh_in", dh_in, x.dtype, B=batch, S=length, D=columns)
    check_same_device(_OP, "x", x, dh_in=dh_in)
    check_token(
        _OP,
        x,
        dh_post=(dh_post, (streams,)),
        dh_res=(dh_res, (streams, streams)),
        h_post=(h_post, (streams,)),
        inv_rms=(inv_rms, ()),
        h_mix=(h_mix, (phi.shape[0],)),
        h_pre=(h_pre, (streams,)),
    )


def _cpu(*args: Any) -> _Results:
    _check(*args)
    return reference.mhc_pre_bwd(*args)


def _fake(*args: Any) -> _Results:
    _check(*args)
    x, phi, _, gamma = args[3:7]
    dgamma = phi.new_empty(0 if gamma is None else phi.shape[1])
    return x.new_empty(x.shape), phi.new_empty(phi.shape), phi.new_empty(3), phi.new_empty(phi.shape[0]), dgamma


library.impl(_OP, _cpu, "CPU")
differentiable_once(_OP)
follow_autocast(_OP)
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)


@register_flop_formula(torch.ops.dsa.mhc_pre_bwd)
def _flops(
    _dh_in: Any, _dh_post: Any, _dh_res: Any, x_shape: torch.Size, phi_shape: torch.Size, *args: Any, **kwargs: Any
) -> int:
    batch, length = x_shape[:2]
    return 2 * 2 * batch * length * phi_shape[0] * phi_shape[1]
