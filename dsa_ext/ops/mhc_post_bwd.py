"""torch.ops.dsa.mhc_post_bwd: the gradients of mhc_post. Schema, checks, CPU and fake implementation."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor
from dsa_ext.ops._library import differentiable_once, explain_missing_cuda, follow_autocast, library
from dsa_ext.ops._mhc import check_post

_OP = "mhc_post_bwd"
_Results = tuple[Tensor, Tensor, Tensor, Tensor]
library.define(
    "mhc_post_bwd(Tensor dout, Tensor x, Tensor y, Tensor h_post, Tensor h_res, SymInt iterations=20) -> "
    "(Tensor dx, Tensor dy, Tensor dh_post, Tensor dh_res)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(dout: Tensor, x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int) -> None:
    check_post(_OP, x, y, h_post, h_res, iterations)
    batch, length, streams, columns = x.shape
    check_tensor(_OP, "dout", dout, x.dtype, B=batch, S=length, n=streams, D=columns)
    check_same_device(_OP, "x", x, dout=dout)


def _cpu(dout: Tensor, x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> _Results:
    _check(dout, x, y, h_post, h_res, iterations)
    return reference.mhc_post_bwd(dout, x, y, h_post, h_res, iterations)


def _fake(dout: Tensor, x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> _Results:
    _check(dout, x, y, h_post, h_res, iterations)
    dx, dy, dh_post, dh_res = (t.new_empty(t.shape) for t in (x, y, h_post, h_res))
    return dx, dy, dh_post, dh_res


library.impl(_OP, _cpu, "CPU")
differentiable_once(_OP)
follow_autocast(_OP)
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
