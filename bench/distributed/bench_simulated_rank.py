"""Times a training step of one rank of several on one GPU; writes its results file and plot.

The layer is that of bench_sparse_mla_layer with 128 heads. Collectives fill
their results with what the rank itself sends. What they would take is added from the bytes that leave the rank, at the
bandwidths that were measured between two H200s, and without overlap: `collectives`. A case's time is the sum of both.

"queries" divides attention and the indexer by queries, as dsa_ext.distributed.parallelize does. "heads" divides
attention by heads, in the usual way: every rank runs the whole indexer, with a loss for its own heads.
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
from bench.sparse_mla.bench_sparse_mla_layer import HIDDEN_SIZE, OPERATORS, TOPK, Step, measure_step, total
from dsa_ext.distributed import collectives, parallelize
from dsa_ext.nn import SparseMLA

OP = "simulated_rank"
HEADS, SEQUENCES = 128, (32768, 131072)
#: GB/s out of each GPU between two H200s, 128 MB: of an all-to-all, and of the other collectives (an all-gather's).
EXCHANGE, OTHERS = 240, 231


@dataclass(frozen=True)
class Spec:
    """One measurement: the step of one of `ranks`, or of the whole layer."""

    group: str
    name: str
    seq: int
    ranks: int = 1
    shares: str = "queries"


def specs() -> Iterator[Spec]:
    for seq in SEQUENCES:
        group = f"{seq} tokens"
        yield Spec(group, f"s{seq}_whole", seq)
        for ranks in (2, 8):
            for shares in ("queries", "heads"):
                yield Spec(group, f"s{seq}_p{ranks}_{shares}", seq, ranks, shares)


class Done:
    """The work of a collective that is complete."""

    def wait(self) -> None:
        pass


class Collectives:
    """In its scope the collectives of dsa_ext.distributed fill their results with what the rank itself sends. Adds up
    what they would take, in milliseconds."""

    def __init__(self, ranks: int) -> None:
        self.ms, self._ranks = 0.0, ranks
        self._patches = [
            mock.patch.object(collectives, "_gather_single", self._gather),
            mock.patch.object(collectives, "_scatter_single", self._scatter),
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

    def _count(self, sent: Tensor, rate: float, times: int = 1) -> Done:
        self.ms += times * sent.nbytes * (self._ranks - 1) / self._ranks / rate / 1e6
        return Done()

    @staticmethod
    def _fill(received: Tensor, sent: Tensor) -> None:
        received, sent = received.view(-1), sent.reshape(-1)
        for begin in range(0, len(received), max(1, len(sent))):
            part = received[begin : begin + len(sent)]
            part.copy_(sent[: len(part)])

    def _gather(self, received: Tensor, sent: Tensor, **_: Any) -> Done:
        self._fill(received, sent)
        return self._count(received, OTHERS)

    def _scatter(self, received: Tensor, sent: Tensor, **_: Any) -> Done:
        self._fill(received, sent)
        return self._count(sent, OTHERS)

    def _exchange(self, received: Tensor, sent: Tensor, *_: Any, **__: Any) -> Done:
        self._fill(received, sent)
        return self._count(sent, EXCHANGE)

    def _sum(self, x: Tensor, *_: Any, **__: Any) -> Done:
        return self._count(x, OTHERS, times=2)


def make_layer(spec: Spec) -> SparseMLA:
    heads = HEADS // spec.ranks if spec.shares == "heads" else HEADS
    layer = SparseMLA(HIDDEN_SIZE[HEADS], heads, topk=TOPK, device="cuda", dtype=torch.bfloat16)
    if spec.ranks == 1 or spec.shares == "heads":
        return layer
    layer = parallelize(layer, init_device_mesh("cuda", (spec.ranks,), mesh_dim_names=("tp",)), tensor="tp")
    for parameter in layer.parameters():
        if isinstance(parameter, DTensor):  # its part came by a collective of the fake group, which may copy nothing
            nn.init.kaiming_uniform_(parameter.to_local(), a=math.sqrt(5))
    return layer


def collectives_ms(spec: Spec, step: Step) -> float:
    if spec.shares == "heads":  # all-reduces of the output, and of the gradients of what all heads read, in fp32
        inputs = 4 * (1536 + 512 + 64)
        sent = 2 * spec.seq * (2 * HIDDEN_SIZE[HEADS] + inputs) * (spec.ranks - 1) / spec.ranks
        return sent / OTHERS / 1e6
    with Collectives(spec.ranks) as of_step:
        step.backward(step.forward())
    return of_step.ms


def measure(spec: Spec, times: dict[str, float]) -> Case:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=spec.ranks, store=FakeStore())
    try:
        torch.manual_seed(1)
        layer = make_layer(spec)
        x, dout = (torch.randn(1, spec.seq, layer.hidden_size, device="cuda").bfloat16() for _ in range(2))
        step = Step(lambda: layer(x)[:2], [x.requires_grad_(), *layer.parameters()], dout)
        with Collectives(spec.ranks):
            compute = measure_step(step)
        if not math.isfinite(compute.rows.float().square().mean().item()):
            raise AssertionError("the output is not finite")
        communication = collectives_ms(spec, step) if spec.ranks > 1 else 0.0
    finally:
        dist.destroy_process_group()
    args = {"B": 1, "S": spec.seq, "H": HEADS, "K": TOPK, "hidden_size": HIDDEN_SIZE[HEADS], "P": spec.ranks}
    ms = total(compute.times) + communication
    others: dict[str, Any] = compute.fields()
    if communication:
        others["collectives_ms"] = round(communication, 4)
    return make_case(spec.name, spec.group, args, ms, **others, **time_versus(ms, f"s{spec.seq}_whole", times))


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 12, len(SEQUENCES)) as axes:
        for axis, seq in zip(axes, SEQUENCES, strict=True):
            whole, *parts = (case for case in cases if case["args"]["S"] == seq)
            labels = ["1 GPU", *(f"P = {case['args']['P']}" for case in parts[::2])]
            by = [[whole["ms"], *(case["ms"] for case in parts[first::2])] for first in range(2)]
            grouped_bars(axis, labels, {"divided by queries": by[0], "divided by heads": by[1]})
            axis.set(title=f"training step of a rank, {seq // 1024}K tokens", ylabel="ms")
            axis.legend(loc="upper right", fontsize=8)


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, timer="CUDA events, median", operators=OPERATORS)
