"""Times training steps of a layer on several GPUs of one host, for `torchrun --nproc-per-node P`; writes its results
file and plot.

The layer is that of bench_sparse_mla_layer with 128 heads, in bf16; a step is the forward with the indexer's loss, and
the gradients of all parameters and of the input. "whole" is the layer on one GPU, and all GPUs run it at once. The
others divide its work among 2, 4 and 8 ranks, up to the number of GPUs; if there are more GPUs than that, several
groups of ranks run the same step side by side:

- "tensor": `parallelize(layer, mesh, tensor=...)`: all ranks have the whole sequence, and parts of the weights.
- "context": `parallelize(layer, mesh, context=...)`: the sequence is divided. Gradients of weights are summed over
  ranks beside the rest of the backward pass, each as soon as it is there, as data parallelism does.
- "heads": everything by heads, the usual way: every rank runs the whole indexer, with a loss for its own heads. The
  output, and the gradient of the input, are summed over ranks; the gradients of the indexer's weights are not.

All ranks begin a step together. Its time is that of the slowest rank; the median of as many steps as fit in a second,
at least one and at most ten. The memory is what a step needs besides the gradients, which remain until the next step.
The outputs of "tensor" and "context" are checked against the whole layer's. `predicted_ms` is the whole layer's time
divided by the ranks, and the collectives one after the other.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bench.common import Case, drawing, make_case, measure_all, parse_arguments, report
from bench.distributed.communication import predicted_ms
from bench.sparse_mla.bench_sparse_mla_layer import HIDDEN_SIZE, OPERATORS, TOPK
from dsa_ext.distributed import ParallelSparseMLA, parallelize
from dsa_ext.distributed.collectives import shared, summed
from dsa_ext.nn import SparseMLA
from dsa_ext.testing.tolerances import similarity_error

OP = "distributed"
HEADS, SEQUENCES = 128, (32768, 131072)
WAYS = ("tensor", "context", "heads")
GPUS = 4  # of the results in bench/results
#: Of outputs, between the layer on one GPU and on several: cuBLAS may compute products of other numbers of rows in
#: another way, and then a few selections differ where scores are almost equal.
SIMILARITY = 1e-3


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    seq: int
    ranks: int = 1
    way: str | None = None  # None: the whole layer on one GPU


def specs(gpus: int = GPUS) -> Iterator[Spec]:
    for seq in SEQUENCES:
        group = f"{seq // 1024}K tokens"
        yield Spec(group, f"s{seq}_whole", seq)
        for ranks in (2, 4, 8):
            for way in WAYS if gpus % ranks == 0 else ():
                yield Spec(group, f"s{seq}_p{ranks}_{way}", seq, ranks, way)


def make_layer(heads: int) -> SparseMLA:
    torch.manual_seed(1)  # the same weights on all ranks
    return SparseMLA(HIDDEN_SIZE[HEADS], heads, topk=TOPK, device="cuda", dtype=torch.bfloat16)


def make_rows(seq: int) -> tuple[Tensor, Tensor]:
    """The layer's input and the gradient of its output, the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(2)
    x, dout = (torch.randn(1, seq, HIDDEN_SIZE[HEADS], device="cuda", generator=generator) for _ in range(2))
    return x.bfloat16(), dout.bfloat16()


def sum_gradients(layer: nn.Module, group: dist.ProcessGroup) -> list[dist.Work]:
    """Makes every later backward pass sum the gradients of the layer's parameters over ranks. Returns the list of the
    sums under way, which the caller awaits and removes."""
    works: list[dist.Work] = []

    def start(parameter: Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(start)
    return works


def make_step(spec: Spec, mesh: DeviceMesh) -> tuple[Callable[[], Tensor], Tensor | None]:
    """A step that returns the output, and the rows of it that this rank holds (None for all)."""
    x, dout = make_rows(spec.seq)
    rows = None
    layer: Any = make_layer(HEADS // spec.ranks if spec.way == "heads" else HEADS)
    if spec.way in ("tensor", "context"):
        layer = parallelize(layer, mesh, **{spec.way: "ranks"})
        assert isinstance(layer, ParallelSparseMLA)
        if spec.way == "context":
            rows = layer.rows_of_rank(spec.seq).cuda()
            x, dout = x[:, rows], dout[:, rows]
    x.requires_grad_()
    group = mesh.get_group()
    sums = sum_gradients(layer, group) if spec.way == "context" else []

    def step() -> Tensor:
        if spec.way == "heads":
            out, loss, _ = layer(*shared([x], group))
            out = summed(out, group)
        else:
            out, loss, _ = layer(x, seq_len=spec.seq) if isinstance(layer, ParallelSparseMLA) else layer(x)
        x.grad = None
        layer.zero_grad()
        torch.autograd.backward([out, loss], [dout, None])
        while sums:
            sums.pop().wait()
        assert all(leaf.grad is not None for leaf in (x, *layer.parameters()))
        result: Tensor = out.detach()
        return result

    return step, rows


def measure_step(step: Callable[[], Tensor]) -> tuple[float, float]:
    """Milliseconds of the slowest rank, and MB that a step needs beyond what it finds, on the rank that needs most."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    times: list[float] = []
    while len(times) < 10 and sum(times) < 1000:
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end), peak / 1e6], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(slowest[0].item())
        peak = slowest[1].item() * 1e6
    return sorted(times)[len(times) // 2], peak / 1e6


class Measurement:
    """Measures cases one after the other; those of one length are compared with the whole layer."""

    def __init__(self) -> None:
        self.out: Tensor | None = None  # of the whole layer
        self._meshes: dict[int, DeviceMesh] = {}

    def _mesh(self, ranks: int) -> DeviceMesh:
        """The group of so many ranks that this one is in."""
        if ranks not in self._meshes:
            shape = (dist.get_world_size() // ranks, ranks)
            self._meshes[ranks] = init_device_mesh("cuda", shape, mesh_dim_names=("groups", "ranks"))["ranks"]
        return self._meshes[ranks]

    def __call__(self, spec: Spec, times: dict[str, float]) -> Case:
        if spec.way is None:
            self.out = None
        torch.cuda.empty_cache()
        step, rows = make_step(spec, self._mesh(spec.ranks))
        out = step()
        error = None
        if spec.way is None:
            self.out = out
        elif spec.way != "heads" and self.out is not None:
            expected = self.out if rows is None else self.out[:, rows]
            error = similarity_error(out, expected)
            if not error <= SIMILARITY:
                raise AssertionError(f"{spec.name}: the output differs from the whole layer's by {error}")
        del out
        ms, peak_mb = measure_step(step)
        args = {"B": 1, "S": spec.seq, "H": HEADS, "K": TOPK, "hidden_size": HIDDEN_SIZE[HEADS], "P": spec.ranks}
        others: dict[str, Any] = {"peak_mb": round(peak_mb, 1)}
        whole = times.get(f"s{spec.seq}_whole")
        if whole is not None:
            others["speedup"] = round(whole / ms, 6)
        if whole is not None and spec.way in ("tensor", "context"):
            others["predicted_ms"] = round(predicted_ms(whole, spec.way, spec.seq, spec.ranks), 3)
        err = None if error is None else {"similarity": error}
        return make_case(spec.name, spec.group, args, ms, err=err, **others)


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 11, len(SEQUENCES)) as axes:
        for axis, seq in zip(axes, SEQUENCES, strict=True):
            whole, *parts = (case for case in cases if case["args"]["S"] == seq)
            gpus = [1, *sorted({case["args"]["P"] for case in parts})]
            axis.plot(gpus, gpus, ":", color="black", linewidth=1, label="linear")
            for way, colour in zip(WAYS, ("C0", "C1", "C2"), strict=True):
                of_way = [case for case in parts if case["name"].endswith(way)]
                axis.plot(gpus, [1, *(case["speedup"] for case in of_way)], "o-", color=colour, label=way)
                if "predicted_ms" in of_way[0]:
                    predicted = [1, *(whole["ms"] / case["predicted_ms"] for case in of_way)]
                    axis.plot(gpus, predicted, "--", color=colour, label=f"{way}, predicted")
            axis.set(title=f"training step, {seq // 1024}K tokens", xlabel="GPUs", ylabel="speedup", xticks=gpus)
            axis.legend(fontsize=8)


def main() -> None:
    args = parse_arguments(str(__doc__))
    if os.environ.get("WORLD_SIZE") not in ("2", "4", "8"):
        raise SystemExit("start it by torchrun --nproc-per-node 2, 4 or 8")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        cases = measure_all(OP, specs(dist.get_world_size()), Measurement(), args.only)
        if dist.get_rank() == 0:
            report(OP, cases, None if args.only else args.out, plot, "CUDA events, median", OPERATORS)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
