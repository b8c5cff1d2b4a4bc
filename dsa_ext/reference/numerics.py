"""The numbers that the reference computes with: its precision, the range of ids, and a correction for an lse that fp32
does not resolve."""

import math

import torch
from torch import Tensor

#: Magnitude of lse above which its rounding is corrected for: 2^22 in units of log 2, far above ordinary values.
LARGE_LSE = 2.0**22 * math.log(2)


def compute_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which the reference computes and in which it returns lse: fp32, or float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def names_one_of(ids: Tensor, count: int) -> Tensor:
    """Which ids are from 0 to `count` - 1. In int64, since int32 may not hold `count`."""
    return (ids >= 0) & (ids.long() < count)


def raised(lse: Tensor) -> Tensor:
    """lse as used in probabilities exp(score - lse): in fp32 with a margin."""
    return lse if lse.dtype == torch.float64 else with_margin(lse)


def with_margin(lse: Tensor) -> Tensor:
    """lse, raised by a margin for its rounding where it is so large that rounding to fp32 could make a probability
    exceed sqrt(2), and eventually overflow."""
    is_large = (lse.abs() > LARGE_LSE) & (lse != -torch.inf)
    return torch.where(is_large, lse + (lse.abs() - LARGE_LSE) * 2.0**-22, lse)
