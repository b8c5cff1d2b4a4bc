"""Times training steps of dsa_ext.nn.SparseMLA on all GPUs of this machine; writes its results file and plot.

A layer has the sizes of DeepSeek-V3.2: 128 heads, hidden_size 7168, an indexer of 64 heads, 2048 keys per query. A step
is the forward with the indexer's loss, and the gradients of all parameters and of the input, in bf16. The time is that
of the slowest rank, the median of at most ten steps.

- `one`: on one GPU, the peer of the others.
- `tensor`: parallelize(tensor=...), which divides attention by queries; `context`: parallelize(context=...).
- `heads`: what tensor parallelism does without it: each rank has a part of the heads, all queries and a whole indexer.
- `rank_of_8`: one of eight tensor-parallel ranks, whose collectives do nothing; `collectives_ms` is the time of these
  at the bandwidths measured between two GPUs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.common import Case, drawing, grouped_bars, make_case, parse_arguments, report
from dsa_ext.distributed import parallelize
from dsa_ext.distributed.collectives import summed
from dsa_ext.nn import SparseMLA
from dsa_ext.testing.progress import Progress

OP = "distributed"
OPERATORS = ["indexer_topk", "sparse_mla_fwd", "attn_dist", "indexer_scores", "indexer_loss"]
OPERATORS += ["indexer_scores_bwd", "sparse_mla_bwd"]
HEADS, HIDDEN_SIZE, RANKS_OF_A_GROUP = 128, 7168, 8
#: Bytes per second that each of two GPUs sends: all-to-all, and all-gather or reduce-scatter.
ALL_TO_ALL, GATHER = 240e9, 231e9


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    how: str  # one, tensor, context, heads or rank_of_8
    seq: int

    @property
    def name(self) -> str:
        return f"{self.how}_s{self.seq}"


def specs(how: tuple[str, ...]) -> Iterator[Spec]:
    for seq in (32768, 131072):
        yield from (Spec(name, seq) for name in how)


def make_layer(heads: int = HEADS) -> SparseMLA:
    torch.manual_seed(0)
    return SparseMLA(HIDDEN_SIZE, heads, rope="interleaved", device="cuda", dtype=torch.bfloat16)


class HeadsOfARank(nn.Module):
    """Tensor parallelism by heads alone."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.layer = make_layer(HEADS // dist.get_world_size(group))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        out, loss, _ = self.layer(x)
        return summed(out, self.group), loss


def collectives_ms(seq: int, ranks: int) -> float:
    """Milliseconds of the collectives of a step: see docs/guide/several-gpus.md."""
    layer = make_layer()
    sent = (ranks - 1) / ranks
    exchanged = 2 * 2 * seq * HEADS // ranks * (layer.nope_dim + layer.rope_dim + layer.v_dim) * sent
    fp32_sums = seq * (layer.q_a_proj.out_features + layer.kv_lora_rank + layer.rope_dim + layer.indexer.head_dim)
    fp32_sums += layer.indexer.wq_b.weight.numel() + layer.indexer.weights_proj.weight.numel()
    outputs = 2 * seq * HIDDEN_SIZE  # bf16
    kv_b = (2 + 4) * layer.kv_b_proj.weight.numel()  # gathered in bf16, its gradient scattered in fp32
    return 1e3 * (exchanged / ALL_TO_ALL + (2 * (4 * fp32_sums + outputs) + kv_b) * sent / GATHER)


def median_step(module: Callable[[Tensor], Any], parameters: list[Any], seq: int) -> float:
    """Milliseconds of a step on the slowest rank."""
    x = torch.randn(1, seq, HIDDEN_SIZE, device="cuda").bfloat16().requires_grad_()
    dout = torch.randn_like(x)
    times: list[float] = []
    for _ in range(8):
        if dist.is_initialized():
            dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out, loss = module(x)[:2]
        torch.autograd.grad([out, loss], [x, *parameters], [dout, torch.ones_like(loss)])
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    ms = torch.tensor(sorted(times[2:])[len(times[2:]) // 2], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(ms, dist.ReduceOp.MAX)
    return float(ms)


def measure(spec: Spec) -> float:
    torch.cuda.empty_cache()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if spec.how == "one":
        module: Any = make_layer()
    elif spec.how == "heads":
        module = HeadsOfARank(dist.group.WORLD)
    else:
        dimension = "context" if spec.how == "context" else "tensor"
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=(dimension,))
        module = parallelize(make_layer(), mesh, **{dimension: dimension})
    seq = spec.seq // ranks if spec.how == "context" else spec.seq
    return median_step(module, list(module.parameters()), seq)


def run_ranks(rank: int, ranks: int, port: int, chosen: list[Spec], times: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        for spec in chosen:
            times[spec.name] = measure(spec)
    finally:
        dist.destroy_process_group()


def run_one_of_eight(rank: int, chosen: list[Spec], times: Any) -> None:
    """Collectives of the backend "fake" return without communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS_OF_A_GROUP)
    for spec in chosen:
        times[spec.name] = measure(spec)


def cases_of(times: dict[str, float], ranks: int) -> list[Case]:
    cases = []
    for how in ("one", "tensor", "context", "heads", "rank_of_8"):
        for spec in specs((how,)):
            if spec.name not in times:
                continue
            others: dict[str, Any] = {}
            ms = times[spec.name]
            if how == "rank_of_8":
                others["collectives_ms"] = round(collectives_ms(spec.seq, RANKS_OF_A_GROUP), 3)
                ms += others["collectives_ms"]
            one = times.get(f"one_s{spec.seq}")
            peer = None if how == "one" or one is None else ("one GPU", round(one, 4))
            args = {"S": spec.seq, "H": HEADS, "ranks": {"one": 1, "rank_of_8": 8}.get(how, ranks)}
            cases.append(make_case(spec.name, f"{spec.seq} tokens", args, ms, peer=peer, **others))
    return cases


def plot(cases: list[Case], path: Path) -> None:
    groups = list(dict.fromkeys(case["group"] for case in cases))
    with drawing(path, 12, len(groups)) as axes:
        for axis, group in zip(axes, groups, strict=True):
            shown = [case for case in cases if case["group"] == group]
            grouped_bars(axis, [case["name"].rsplit("_s", 1)[0] for case in shown], {"ms": [c["ms"] for c in shown]})
            axis.set(title=f"training step of a layer, {group}", ylabel="ms")


def main() -> None:
    args = parse_arguments(__doc__)
    ranks = torch.cuda.device_count()
    several = [spec for spec in specs(("tensor", "context", "heads")) if ranks > 1 and args.only in spec.name]
    alone = [spec for spec in specs(("one",)) if args.only in spec.name]
    simulated = [spec for spec in specs(("rank_of_8",)) if args.only in spec.name]
    progress = Progress(total=3)
    with torch.multiprocessing.Manager() as manager:
        times = manager.dict()
        for spec in alone:
            times[spec.name] = measure(spec)
        progress.step("one GPU")
        torch.cuda.empty_cache()
        torch.multiprocessing.spawn(run_one_of_eight, (simulated, times), nprocs=1)
        progress.step("one rank of eight")
        if several:
            torch.multiprocessing.spawn(run_ranks, (ranks, 29500, several, times), nprocs=ranks)
        progress.step(f"{ranks} GPUs")
        cases = cases_of(dict(times), ranks)
    report(OP, cases, None if args.only else args.out, plot, "CUDA events, median", OPERATORS)


if __name__ == "__main__":
    main()
