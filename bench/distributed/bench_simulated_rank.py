"""Times a training step of one rank of several on one GPU; writes its results file and plot.

The layer is that of bench_sparse_mla_layer with 128 heads. A collective fills its result with what the rank itself
sends, in a stream of its own, and then occupies that stream for the time that its bytes would take at the bandwidth
that was measured between two H200s. As with NCCL, the step waits where it needs the result, and collectives run one
after the other. `collectives_ms` is the sum of their times, of which a part runs beside other work.

"tensor" and "context" are those of dsa_ext.distributed.parallelize; "context" without the sum of the gradients of
weights, which is data parallelism's. "heads" divides attention by heads, in the usual way: every rank runs the whole
indexer, with a loss for its own heads. Its collectives are added without overlap.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bench.common import Case, drawing, grouped_bars, make_case, run, time_versus
from bench.distributed.communication import NVLINK
from bench.sparse_mla.bench_sparse_mla_layer import HIDDEN_SIZE, OPERATORS, TOPK, Step, measure_step, total
from dsa_ext.distributed import ParallelSparseMLA, collectives, parallelize
from dsa_ext.nn import SparseMLA

OP = "simulated_rank"
HEADS, SEQUENCES = 128, (32768, 131072)
WAYS = ("tensor", "context", "heads")


@dataclass(frozen=True)
class Spec:
    """One measurement: the step of one of `ranks`, or of the whole layer."""

    group: str
    name: str
    seq: int
    ranks: int = 1
    way: str = "whole"


def specs() -> Iterator[Spec]:
    for seq in SEQUENCES:
        group = f"{seq // 1024}K tokens"
        yield Spec(group, f"s{seq}_whole", seq)
        for ranks in (2, 8):
            for way in WAYS:
                yield Spec(group, f"s{seq}_p{ranks}_{way}", seq, ranks, way)


#: A kernel of one thread that takes so many nanoseconds.
DELAY = """
__device__ long long now() { long long t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
extern "C" __global__ void delay(long long ns) { for (long long end = now() + ns; now() < end;) {} }
"""


class Done:
    """The work of a collective."""

    def __init__(self, end: torch.cuda.Event) -> None:
        self._end = end

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._end)


class Collectives:
    """In its scope the collectives of dsa_ext.distributed are simulated. `ms` is the sum of their times."""

    def __init__(self, ranks: int) -> None:
        self.ms, self._ranks, self._stream = 0.0, ranks, torch.cuda.Stream()
        self._delay = torch.cuda._compile_kernel(DELAY, "delay")
        self._patches = [
            mock.patch.object(collectives, "_gather_single", self._gather),
            mock.patch.object(dist, "all_to_all_single", self._exchange),
            mock.patch.object(dist, "all_reduce", self._sum),
        ]

    def __enter__(self) -> "Collectives":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def _run(self, received: Tensor, sent: Tensor, moved: int, async_op: bool) -> Done:
        """`moved` bytes leave the rank."""
        ms = moved * (self._ranks - 1) / self._ranks / NVLINK / 1e6
        self.ms += ms
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            received, sent = received.view(-1), sent.reshape(-1)
            for begin in range(0, len(received), max(1, len(sent))) if received.data_ptr() != sent.data_ptr() else ():
                part = received[begin : begin + len(sent)]
                part.copy_(sent[: len(part)])
            self._delay((1, 1, 1), (1, 1, 1), (int(ms * 1e6),))
            done = Done(self._stream.record_event())
        if not async_op:
            done.wait()
        return done

    def _gather(self, received: Tensor, sent: Tensor, *, group: Any, async_op: bool = False) -> Done:
        return self._run(received, sent, received.nbytes, async_op)

    def _exchange(self, received: Tensor, sent: Tensor, *, group: Any, async_op: bool = False) -> Done:
        return self._run(received, sent, sent.nbytes, async_op)

    def _sum(self, x: Tensor, *, group: Any) -> None:
        self._run(x, x, 2 * x.nbytes, False)


def make_layer(spec: Spec) -> SparseMLA:
    heads = HEADS // spec.ranks if spec.way == "heads" else HEADS
    layer = SparseMLA(HIDDEN_SIZE[HEADS], heads, topk=TOPK, device="cuda", dtype=torch.bfloat16)
    if spec.way not in ("tensor", "context"):
        return layer
    layer = parallelize(
        layer, init_device_mesh("cuda", (spec.ranks,), mesh_dim_names=("ranks",)), **{spec.way: "ranks"}
    )
    for parameter in layer.parameters():
        if isinstance(parameter, DTensor):  # its part came by a collective of the fake group, which may copy nothing
            nn.init.kaiming_uniform_(parameter.to_local(), a=math.sqrt(5))
    return layer


def make_step(spec: Spec) -> Step:
    layer: Any = make_layer(spec)
    rows = spec.seq if spec.way != "context" else len(layer.rows_of_rank(spec.seq))
    x, dout = (torch.randn(1, rows, layer.hidden_size, device="cuda").bfloat16() for _ in range(2))
    options = {"seq_len": spec.seq} if isinstance(layer, ParallelSparseMLA) else {}
    return Step(lambda: layer(x, **options)[:2], [x.requires_grad_(), *layer.parameters()], dout)


def collectives_of_heads(spec: Spec) -> float:
    """Milliseconds of all-reduces of the output, and of the gradients, in fp32, of the latents that all heads read."""
    latents = 4 * (1536 + 512 + 64)
    return 2 * spec.seq * (2 * HIDDEN_SIZE[HEADS] + latents) * (spec.ranks - 1) / spec.ranks / NVLINK / 1e6


def measure(spec: Spec, times: dict[str, float]) -> Case:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=spec.ranks, store=FakeStore())
    try:
        torch.manual_seed(1)
        step = make_step(spec)
        with Collectives(spec.ranks) as simulated:
            step.backward(step.forward())
            collectives_ms = simulated.ms
            compute = measure_step(step)
        if not math.isfinite(compute.rows.float().square().mean().item()):
            raise AssertionError("the output is not finite")
    finally:
        dist.destroy_process_group()
    args = {"B": 1, "S": spec.seq, "H": HEADS, "K": TOPK, "hidden_size": HIDDEN_SIZE[HEADS], "P": spec.ranks}
    ms = total(compute.times)
    if spec.way == "heads":
        collectives_ms = collectives_of_heads(spec)
        ms += collectives_ms
    others: dict[str, Any] = {**compute.fields(), "collectives_ms": round(collectives_ms, 4)}
    return make_case(spec.name, spec.group, args, ms, **others, **time_versus(ms, f"s{spec.seq}_whole", times))


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 12, len(SEQUENCES)) as axes:
        for axis, seq in zip(axes, SEQUENCES, strict=True):
            whole, *parts = (case for case in cases if case["args"]["S"] == seq)
            labels = ["1 GPU", *(f"P = {case['args']['P']}" for case in parts[:: len(WAYS)])]
            by = {way: [whole["ms"], *(c["ms"] for c in parts[i :: len(WAYS)])] for i, way in enumerate(WAYS)}
            grouped_bars(axis, labels, by)
            axis.set(title=f"training step of a rank, {seq // 1024}K tokens", ylabel="ms")
            axis.legend(loc="upper right", fontsize=8)


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, timer="CUDA events, median", operators=OPERATORS)
