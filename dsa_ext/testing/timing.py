"""Timing of GPU work with CUDA events: the median of many calls, each with a cold L2."""

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
