"""Times a training step of one rank of several on one GPU; writes its results file and plot.

The layer is that of bench_sparse_mla_layer with 128 heads. A rank's share is computed with PyTorch's "fake" process
group, whose collectives copy on one GPU what the rank itself has, instead of receiving it from others. What they would
take is added from the bytes that leave the rank, at the bandwidths that were measured between two H200s, and without
overlap: `collectives`. A case's time is the sum of both.

"queries" divides attention and the indexer by queries, as dsa_ext.distributed.parallelize does. "heads" divides
attention by heads, in the usual way: every rank runs the whole indexer, with a loss for its own heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common import Case, drawing, grouped_bars, make_case, run, time_versus
from bench.sparse_mla.bench_sparse_mla_layer import HIDDEN_SIZE, OPERATORS, TOPK, Step, measure_step, total
from dsa_ext.distributed import parallelize
from dsa_ext.nn import SparseMLA

OP = "simulated_rank"
HEADS, SEQUENCES = 128, (32768, 131072)
#: GB/s out of each GPU between two H200s, 128 MB: of an all-to-all, and of the other collectives (an all-gather's).
EXCHANGE, OTHERS = 240, 231
#: The argument of each collective whose bytes, times (P - 1) / P and a factor, leave a rank of P.
SENT = {"alltoall_base_": (1, 1), "_allgather_base_": (0, 1), "_reduce_scatter_base_": (1, 1), "allreduce_": (0, 2)}


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


class Collectives(TorchDispatchMode):
    """Adds up what the collectives that are called in its scope would take, in milliseconds."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ms, self._ranks = 0.0, ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            argument, times = SENT[func._opname]
            sent = args[argument][0] if isinstance(args[argument], list) else args[argument]
            rate = EXCHANGE if func._opname == "alltoall_base_" else OTHERS
            self.ms += times * sent.nbytes * (self._ranks - 1) / self._ranks / rate / 1e6
        return func(*args, **(kwargs or {}))


def make_layer(spec: Spec) -> SparseMLA:
    heads = HEADS // spec.ranks if spec.shares == "heads" else HEADS
    layer = SparseMLA(HIDDEN_SIZE[HEADS], heads, topk=TOPK, device="cuda", dtype=torch.bfloat16)
    if spec.ranks == 1 or spec.shares == "heads":
        return layer
    return parallelize(layer, init_device_mesh("cuda", (spec.ranks,), mesh_dim_names=("tp",)), tensor="tp")


def collectives_ms(spec: Spec, step: Step) -> float:
    if spec.shares == "heads":  # all-reduces of the output, and of the gradients of what all heads read, in fp32
        inputs = 4 * (1536 + 512 + 64)
        sent = 2 * spec.seq * (2 * HIDDEN_SIZE[HEADS] + inputs) * (spec.ranks - 1) / spec.ranks
        return sent / OTHERS / 1e6
    with Collectives(spec.ranks) as collectives:
        step.backward(step.forward())
    return collectives.ms


def measure(spec: Spec, times: dict[str, float]) -> Case:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=spec.ranks, store=FakeStore())
    try:
        torch.manual_seed(1)
        layer = make_layer(spec)
        x, dout = (torch.randn(1, spec.seq, layer.hidden_size, device="cuda").bfloat16() for _ in range(2))
        step = Step(lambda: layer(x)[:2], [x.requires_grad_(), *layer.parameters()], dout)
        compute = measure_step(step)
        if not math.isfinite(compute.rows.float().square().mean().item()):
            raise AssertionError("the output is not finite: the collectives of this version of PyTorch copy nothing")
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
