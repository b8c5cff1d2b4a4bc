"""The precision in which the reference computes, and what it does about lse that fp32 does not resolve."""

import math

import torch
from torch import Tensor

#: Of an lse from which on its rounding is taken care of: 2^22 in units of log 2, far above ordinary ones.
LARGE_LSE = 2.0**22 * math.log(2)


def compute_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which the reference computes and in which it returns lse: fp32, or float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def raised(lse: Tensor) -> Tensor:
    """lse as probabilities exp(score - lse) take it: in fp32 with a margin."""
    return lse if lse.dtype == torch.float64 else with_margin(lse)


def with_margin(lse: Tensor) -> Tensor:
    """lse, raised where it is so large that its rounding to fp32 could make a probability more than sqrt(2), and in the
    end overflow, by as much."""
    is_large = (lse.abs() > LARGE_LSE) & (lse != -torch.inf)
    return torch.where(is_large, lse + (lse.abs() - LARGE_LSE) * 2.0**-22, lse)
