"""What the modules of magnitudes.py share: a case, and how its tensors are spoiled."""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsa_ext.testing.calls import FP8, Args

POISONS = (math.nan, math.inf, -math.inf)


@dataclass
class Case:
    name: str
    args: Args
    #: The same call with NaN or Inf in elements that are never read: the results must be bitwise equal.
    hidden: Args | None = None
    #: Whether the results must contain NaN. It shows that a NaN in elements that are read is noticed.
    spreads: bool = False


def filled(x: Tensor, place: Any, value: float) -> Tensor:
    """A copy with `value` at `place`."""
    wide = x.float() if x.dtype == FP8 else x.clone()
    wide[place] = value
    return wide.to(x.dtype)
