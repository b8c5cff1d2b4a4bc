"""Ranks of tests with several processes, on the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def gloo_rank(rank: int, ranks: int, folder: str) -> Iterator[None]:
    """The process is a rank of a group of its own, whose ranks meet in a new `folder`. If nothing fails, it ends here
    and at once: an interpreter that ends while a thread of Gloo still runs is sometimes aborted."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    try:
        yield
        dist.monitored_barrier()
    finally:
        dist.destroy_process_group()
    os._exit(0)
