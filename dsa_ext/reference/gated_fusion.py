"""Sum of two branches, weighted by one gate per row, in plain PyTorch, forward and backward, on any device."""

import torch
from torch import Tensor

from dsa_ext.reference.layout import empty_rows_like
from dsa_ext.reference.numerics import compute_dtype


def shares(fine: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """s and 1 - s [B, H, N, 1], both with full relative precision, in the compute dtype."""
    wide = gate.to(compute_dtype(fine))[..., None]
    return wide.sigmoid(), (-wide).sigmoid()


def gated_fusion_fwd(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    """See :func:`dsa_ext.gated_fusion`. Takes any D."""
    fine_share, coarse_share = shares(fine, gate)
    return empty_rows_like(fine).copy_(fine_share * fine + coarse_share * coarse)


def gated_fusion_bwd(dout: Tensor, fine: Tensor, coarse: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gated_fusion_fwd: dfine, dcoarse and dgate, like fine, coarse and gate."""
    fine_share, coarse_share = shares(fine, gate)
    upstream = dout.to(fine_share.dtype)
    along = (upstream * (fine.to(fine_share.dtype) - coarse.to(fine_share.dtype))).sum(-1, keepdim=True)
    dgate = (fine_share * coarse_share * along).squeeze(-1)
    dfine, dcoarse = (empty_rows_like(x).copy_(s * upstream) for x, s in ((fine, fine_share), (coarse, coarse_share)))
    return dfine, dcoarse, torch.empty_like(gate).copy_(dgate)
