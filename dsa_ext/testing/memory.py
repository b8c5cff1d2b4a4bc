"""Measures the GPU memory that a call needs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def workspace_bytes(call: Callable[[], Sequence[Tensor]]) -> int:
    """Peak memory that `call` requests from PyTorch's allocator, in addition to the results it returns.

    The blocks that the allocator finds for it may be up to 1 MiB larger each.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_stats()["requested_bytes.all.current"]
    results = call()
    peak: int = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return peak - before - sum(tensor.nbytes for tensor in results)
