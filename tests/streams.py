"""Calls of kernels on a side stream and in CUDA graphs."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def written_late(value: Tensor, call: Callable[[Tensor], Result]) -> Result:
    """The result of `call` on a side stream. Its argument is a copy of `value` that is written late on that stream: a
    kernel on any other stream would read zeros."""
    late = torch.zeros_like(value)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(value)
        result = call(late)
    stream.synchronize()
    return result


def captured_and_aside(call: Callable[..., Result], *args: Tensor) -> tuple[Result, Result]:
    """The results of a graph of `call`, replayed once, and of `call` on the stream of the capture, with copies of
    `args` made late on that stream."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = call(*args)
    graph.replay()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        aside = call(*(t.clone() for t in args))
    torch.cuda.synchronize()
    return captured, aside


def check_replays(stream: torch.cuda.Stream, call: Callable[[], Any], expect: Callable[[], Any]) -> Any:
    """Captures `call` on the stream before `expect` is called. Two replays give the tensors that `expect` returns, bit
    for bit; returns those."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = call()
    expected = expect()
    for _ in range(2):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(captured, expected, rtol=0, atol=0)
    return expected


def check_script(script: str) -> None:
    """Runs a script in a new process, where no operator was called before. A script that succeeds prints `captured`."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "captured", done.stderr
