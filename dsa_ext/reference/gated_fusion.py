"""Weighted sum of two branches by a gate a row in plain PyTorch, forward and backward, on any device."""

import torch
from torch import Tensor

from dsa_ext.reference.sparse_mla import compute_dtype


def shares(fine: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """s and 1 - s [B, H, N, 1], both to all their digits, in the dtype that is computed in."""
    wide = gate.to(compute_dtype(fine))[..., None]
    return wide.sigmoid(), (-wide).sigmoid()


def gated_fusion_fwd(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    """See :func:`dsa_ext.gated_fusion`. Takes any D."""
    of_fine, of_coarse = shares(fine, gate)
    return torch.empty_like(fine).copy_(of_fine * fine + of_coarse * coarse)


def gated_fusion_bwd(dout: Tensor, fine: Tensor, coarse: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gated_fusion_fwd, each like what it is the gradient of."""
    of_fine, of_coarse = shares(fine, gate)
    upstream = dout.to(of_fine.dtype)
    along = (upstream * (fine.to(of_fine.dtype) - coarse.to(of_fine.dtype))).sum(-1, keepdim=True)
    dgate = (of_fine * of_coarse * along).squeeze(-1)
    gradients = ((fine, of_fine * upstream), (coarse, of_coarse * upstream), (gate, dgate))
    dfine, dcoarse, dgate = (torch.empty_like(like).copy_(gradient) for like, gradient in gradients)
    return dfine, dcoarse, dgate
