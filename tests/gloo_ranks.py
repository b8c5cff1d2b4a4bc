"""Ranks of tests with several processes, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def gloo_rank(rank: int, ranks: int, folder: str) -> Iterator[None]:
    """The process is a rank of a group of its own, whose ranks meet in a new `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    try:
        yield
        # Until all ranks are here, Gloo's threads have released the tensors of the last collective, which must not be
        # after the interpreter's end. This barrier does not run on these threads.
        dist.monitored_barrier()
    finally:
        dist.destroy_process_group()
