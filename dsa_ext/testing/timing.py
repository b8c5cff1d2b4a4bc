"""Timing of GPU work with CUDA events (the median of many calls, each with a cold L2), and of the host's work."""

import time
from collections.abc import Callable

import torch

#: Larger than the L2 cache of every Hopper GPU (50 MB).
_FLUSH_BYTES = 256 * 2**20


def time_ms(call: Callable[[], object], *, warmup_ms: float = 25, total_ms: float = 200) -> float:
    """Median milliseconds of one call, back to back on the current stream, L2 flushed before each."""
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    estimate = _elapsed_ms(call, 5) / 5
    for _ in range(max(1, round(warmup_ms / estimate))):
        call()

    calls = max(5, round(total_ms / estimate))
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(calls)]
    for start, end in zip(starts, ends, strict=True):
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times: list[float] = sorted(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))
    return times[len(times) // 2]


def _elapsed_ms(call: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed


def host_us(*calls: Callable[[], object]) -> list[float]:
    """Microseconds until each of `calls` returns: the fastest of 30 runs of 100 calls, since other work can only add
    time. The calls run in turn, so that what changes the host's speed for a while changes that of all.

    The GPU work must be so small that the GPU keeps up. 100 calls fit in its launch queue.
    """
    count = 100
    runs: list[list[float]] = [[] for _ in calls]
    for _ in range(30):
        for call, times in zip(calls, runs, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            times.append((time.perf_counter() - begin) / count * 1e6)
    return [min(times) for times in runs]
