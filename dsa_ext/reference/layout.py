"""The memory layout of results that have the shape of an argument."""

import torch
from torch import Tensor


def empty_rows_like(x: Tensor) -> Tensor:
    """torch.empty_like(x), but contiguous if the last dimension has stride 1 in x and would not have it in the result:
    the strides of an expanded dimension, or of one of size 1 (where they mean nothing), can cause that."""
    like = torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format) if like.stride(-1) > x.stride(-1) == 1 else like
