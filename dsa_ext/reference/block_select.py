"""Selection of blocks of keys by coarse weights in plain PyTorch, on any device.

A mass is a weight that is scaled and rounded down to an integer. The few other operations are float64, each rounded
separately. So the result is a function of the weights alone, the same on every device.
"""

import math

import torch
from torch import Tensor

#: Bits of the largest mass of a row.
_MASS_BITS = 30


def slots(blocks: int, topk: int | None, min_blocks: int, max_ratio: float) -> int:
    """The maximum number of blocks that a row of `blocks` blocks can keep, whatever its weights; at least 1."""
    most = torch.sym_max(min_blocks, math.ceil(max_ratio * blocks)) if topk is None else topk
    width: int = torch.sym_max(1, torch.sym_min(blocks, most))
    return width


def weights_of(scores: Tensor) -> Tensor:
    """The scores in fp32, made finite and nonnegative. Negative scores and NaN become 0."""
    return scores.float().nan_to_num(0).clamp(0, torch.finfo(torch.float32).max)


def masses(weights: Tensor) -> Tensor:
    """floor(weight * 2^(30 - e)), int64, with e such that 2^(e - 1) <= the row's largest weight < 2^e."""
    wide = weights.double()
    _, exponent = torch.frexp(wide.amax(-1, keepdim=True))
    # The power of two is built from its bits: pow need not be exact.
    scale = ((1023 + _MASS_BITS - exponent.long()) << 52).view(torch.float64)
    return (wide * scale).floor().long()


def counts(mass: Tensor, tau: float, min_blocks: int, min_ratio: float, max_ratio: float) -> Tensor:
    """Number of blocks that each row keeps, given its masses in descending order."""
    n = mass.shape[-1]
    total = mass.sum(-1)
    # A block is needed if the blocks before it do not reach the wanted mass.
    before = mass.cumsum(-1) - mass
    wanted = tau * total.double()
    needed = (before.double() < wanted[..., None]).sum(-1)

    moment = (mass * torch.arange(n, 0, -1, device=mass.device)).sum(-1)
    gini = (2 * moment - (n + 1) * total).double() / (n * total).clamp(min=1).double()
    ratio = max_ratio - (max_ratio - min_ratio) * gini
    limit = (ratio * n).ceil().long()
    return needed.minimum(limit).clamp(min=min(min_blocks, n))


def block_select(
    scores: Tensor,
    topk: int | None = None,
    tau: float = 0.9,
    min_blocks: int = 1,
    min_ratio: float = 0.05,
    max_ratio: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.block_select`. The mode is "topk" if topk is given, else "gini_tau"; with both ratios 1 that
    is the same as "top_tau"."""
    n = scores.shape[3]
    width = slots(n, topk, min_blocks, max_ratio)
    if n == 0:
        return (
            scores.new_full((*scores.shape[:3], width), -1, dtype=torch.int32),
            scores.new_zeros(scores.shape[:3], dtype=torch.int32),
        )
    weights, ids = weights_of(scores).sort(dim=-1, descending=True, stable=True)
    if topk is None:
        count = counts(masses(weights), tau, min_blocks, min_ratio, max_ratio)
    else:
        count = torch.full(scores.shape[:3], min(topk, n), device=scores.device)
    kept = torch.arange(n, device=scores.device) < count[..., None]
    index = torch.where(kept, ids, n)[..., :width].sort(dim=-1).values
    return index.masked_fill(index == n, -1).int().contiguous(), count.int()
