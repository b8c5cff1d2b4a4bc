"""torch.ops.dsa.gated_fusion_bwd: the gradients of gated_fusion_fwd. Schema, checks, CPU and fake implementation."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor
from dsa_ext.ops._gated_fusion import check_inputs
from dsa_ext.ops._library import differentiable_once, explain_missing_cuda, follow_autocast, library
from dsa_ext.reference.layout import empty_rows_like

_OP = "gated_fusion_bwd"
library.define(
    "gated_fusion_bwd(Tensor dout, Tensor fine, Tensor coarse, Tensor gate) -> "
    "(Tensor dfine, Tensor dcoarse, Tensor dgate)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(dout: Tensor, fine: Tensor, coarse: Tensor, gate: Tensor) -> None:
    check_inputs(_OP, fine, coarse, gate)
    batch, heads, length, dim = fine.shape
    check_tensor(_OP, "dout", dout, fine.dtype, B=batch, H=heads, N=length, D=dim)
    check_same_device(_OP, "fine", fine, dout=dout)


def _cpu(dout: Tensor, fine: Tensor, coarse: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, fine, coarse, gate)
    return reference.gated_fusion_bwd(dout, fine, coarse, gate)


def _fake(dout: Tensor, fine: Tensor, coarse: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, fine, coarse, gate)
    return empty_rows_like(fine), empty_rows_like(coarse), torch.empty_like(gate)


library.impl(_OP, _cpu, "CPU")
differentiable_once(_OP)
follow_autocast(_OP)
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
