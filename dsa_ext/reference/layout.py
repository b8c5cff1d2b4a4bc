"""The memory layout of results that are like an argument."""

import torch
from torch import Tensor


def empty_rows_like(x: Tensor) -> Tensor:
    """torch.empty_like(x), but contiguous where that would tear the rows of the last dimension of x apart: the place of
    a dimension of one element, whose stride means nothing, and an expanded dimension may bring it to that."""
    like = torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format) if like.stride(-1) > x.stride(-1) == 1 else like
