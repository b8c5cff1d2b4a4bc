"""Measures the GPU memory that a call needs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def bytes_beside_results(call: Callable[[], Sequence[Tensor]]) -> int:
    """Peak memory that `call` takes from PyTorch's allocator, in addition to the results it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    return torch.cuda.max_memory_allocated() - before - sum(tensor.nbytes for tensor in results)
