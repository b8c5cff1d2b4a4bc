"""Ranks of tests with several processes, on the CPU."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

#: What ranks import. They are copies of a process that has imported it, which takes each of them seconds otherwise.
IMPORTED = ["dsa_ext.distributed", "dsa_ext.nn", "pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp"]


def run_on_ranks(function: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """Calls function(rank, *args) in a process of its own for each rank, and raises what one of them raises."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTED)
    start_processes(function, args, ranks, start_method="forkserver")


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
