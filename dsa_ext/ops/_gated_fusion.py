"""The arguments that gated_fusion_fwd and its gradients share, and what must hold of them."""

import torch
from torch import Tensor

from dsa_ext.ops._checks import check_same_device, check_tensor, differentiable_dtype, fail

_COLUMNS = (64, 128)


def check_inputs(op: str, fine: Tensor, coarse: Tensor, gate: Tensor) -> None:
    """Fails unless the arguments, all but those of one kernel's memory layout, are legal."""
    dtype = differentiable_dtype(fine)
    gate_dtypes = (torch.bfloat16, torch.float32, *([dtype] if dtype == torch.float64 else []))
    check_tensor(op, "fine", fine, dtype, B=None, H=None, N=None, D=None)
    batch, heads, length, dim = fine.shape
    check_tensor(op, "coarse", coarse, dtype, B=batch, H=heads, N=length, D=dim)
    check_tensor(op, "gate", gate, gate_dtypes, B=batch, H=heads, N=length)
    if dim not in _COLUMNS:
        fail(op, f"fine's columns must be 64 or 128, got {dim}")
    check_same_device(op, "fine", fine, coarse=coarse, gate=gate)
