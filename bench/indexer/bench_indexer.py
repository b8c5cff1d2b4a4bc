"""Times dsa::indexer_logits, topk_select and indexer_topk; writes their results, with the peers' figures, and plots.

The queries are the last tokens of the sequence; each sees the keys up to its own. Some queries or rows of every case,
spread over all, are checked before it is timed: logits against the reference in float64, selections for equality with
the reference's selection from the same logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsa_ext
from bench.common import (
    PEERS,
    Case,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    peer_figure,
    run,
)
from dsa_ext import reference
from dsa_ext.testing.inputs import IndexerInputs, make_indexer_inputs
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import check_selected, logits_errors

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
DIM = 128
TOPK = 2048
CHECKED_ROWS = 32


@dataclass(frozen=True)
class Scoring:
    """One measurement of indexer_logits or indexer_topk."""

    group: str
    name: str
    heads: int
    s_kv: int
    seq: int = 4096
    dtype: torch.dtype = FP8
    has_peer: bool = False

    def args(self) -> dict[str, Any]:
        return {"S": self.seq, "S_kv": self.s_kv, "Hi": self.heads, "Di": DIM, "dtype": dtype_name(self.dtype)}

    def inputs(self) -> IndexerInputs:
        return make_indexer_inputs(self.seq, self.s_kv, self.heads, DIM, dtype=self.dtype, device="cuda", seed=1)


@dataclass(frozen=True)
class Selection:
    """One measurement of topk_select."""

    group: str
    name: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.float32
    kind: str = "normal"  # or ascending, or logits: those of indexer_logits
    peer: str | None = None  # the name of its figures in peers_h200.json

    def args(self) -> dict[str, Any]:
        args = {"R": self.rows, "C": self.columns, "K": TOPK, "dtype": dtype_name(self.dtype)}
        return args | {"logits": self.kind}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, starts and ends."""
        if self.kind == "logits":
            scoring = make_indexer_inputs(self.rows, self.columns, device="cuda", seed=1)
            return logits_of(scoring), scoring.ks, scoring.ke
        generator = torch.Generator("cuda").manual_seed(1)
        logits = torch.randn(self.rows, self.columns, generator=generator, device="cuda").to(self.dtype)
        if self.kind == "ascending":
            logits = logits.sort(1).values
        starts = torch.zeros(self.rows, dtype=torch.int32, device="cuda")
        return logits, starts, torch.full_like(starts, self.columns)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def logits_of(i: IndexerInputs) -> Tensor:
    return dsa_ext.indexer_logits(i.q, i.k, i.weights, i.ks, i.ke, k_scale=i.k_scale)


def logits_specs() -> Iterator[Scoring]:
    for heads in (64, 32):
        for s_kv in (4096, 8192, 16384, 32768, 65536, 131072):
            yield Scoring("fp8, 4096 queries", f"h{heads}_skv{s_kv}", heads, s_kv, has_peer=True)
    for heads in (16, 8):
        yield Scoring("Other shapes", f"h{heads}_skv32768", heads, 32768)
    yield Scoring("Other shapes", "h64_skv32768_bf16", 64, 32768, dtype=BF16)
    for seq in (1, 4, 64):
        yield Scoring("Few queries", f"h64_skv131072_s{seq}", 64, 131072, seq=seq)


def select_specs() -> Iterator[Selection]:
    group = "fp32"
    yield Selection(group, "4096x8192", 4096, 8192, peer="sglang_v1")
    for columns in (16384, 32768, 65536, 131072):
        yield Selection(group, f"4096x{columns}", 4096, columns, peer="sglang_v2")
    yield Selection(group, "64x32768", 64, 32768, peer="tilelang")
    for columns in (131072, 1048576):
        yield Selection(group, f"1x{columns}", 1, columns)
    group = "Other logits"
    yield Selection(group, "4096x32768_bf16", 4096, 32768, BF16)
    for kind in ("logits", "ascending"):
        yield Selection(group, f"4096x131072_{kind}", 4096, 131072, kind=kind)


def topk_specs() -> Iterator[Scoring]:
    for heads in (64, 32):
        for s_kv in (32768, 131072):
            yield Scoring("4096 queries", f"h{heads}_skv{s_kv}", heads, s_kv, has_peer=True)
    for seq, s_kv in ((1, 131072), (32, 131072), (64, 131072), (64, 1048576)):
        yield Scoring("Few queries", f"h64_skv{s_kv}_s{seq}", 64, s_kv, seq=seq)
    for s_kv in (32768, 65536, 262144):
        yield Scoring("bf16, 32768 queries", f"h32_skv{s_kv}_bf16", 32, s_kv, seq=32768, dtype=BF16)


def peer_tflops(heads: int, s_kv: int) -> tuple[str, float]:
    """The best peer and its figure for this shape."""
    if (heads, s_kv) == (32, 4096):
        return peer_figure("indexer_logits", "deepgemm_h32", "4096")
    return peer_figure("indexer_logits", f"deepgemm_patched_h{heads}", str(s_kv))


def flops_of(spec: Scoring, inputs: IndexerInputs) -> int:
    return 2 * int((inputs.ke - inputs.ks).sum()) * spec.heads * DIM


def checked_rows(count: int) -> slice:
    """Some rows, evenly spread, including the last one."""
    step = -(-count // CHECKED_ROWS)
    return slice((count - 1) % step, None, step)


@torch.inference_mode()
def measure_logits(spec: Scoring, _times: dict[str, float]) -> Case:
    i = spec.inputs()
    rows = checked_rows(spec.seq)
    errors = logits_errors(logits_of(i)[rows], i.q[rows], i.k, i.weights[rows], i.ks[rows], i.ke[rows], i.k_scale)
    errors.check()
    ms = measure_ms(lambda: logits_of(i))
    return make_case(
        spec.name,
        spec.group,
        spec.args(),
        ms,
        tflops=flops_of(spec, i) / ms / 1e9,
        peer=peer_tflops(spec.heads, spec.s_kv) if spec.has_peer else None,
        err={"similarity": errors.similarity},
    )


@torch.inference_mode()
def measure_select(spec: Selection, _times: dict[str, float]) -> Case:
    logits, starts, ends = spec.inputs()
    rows = checked_rows(spec.rows)
    indices, values = dsa_ext.topk_select(logits, starts, ends, TOPK)
    check_selected((indices[rows], values[rows]), reference.topk_select(logits[rows], starts[rows], ends[rows], TOPK))
    ms = measure_ms(lambda: dsa_ext.topk_select(logits, starts, ends, TOPK))
    torch_ms = measure_ms(lambda: torch.topk(logits, TOPK))
    shape = f"{spec.rows}x{spec.columns}"
    return make_case(
        spec.name,
        spec.group,
        spec.args(),
        ms,
        peer=peer_figure("topk_select", spec.peer, shape) if spec.peer else None,
        err={"differing_rows": 0},
        tbps=round(int((ends - starts).sum()) * logits.element_size() / ms / 1e9, 3),
        time_vs={"torch.topk": round(ms / torch_ms, 3)},
    )


@torch.inference_mode()
def measure_topk(spec: Scoring, _times: dict[str, float]) -> Case:
    i = spec.inputs()
    rows = checked_rows(spec.seq)

    def ours() -> tuple[Tensor, Tensor]:
        return dsa_ext.indexer_topk(i.q, i.k, i.weights, i.ks, i.ke, TOPK, k_scale=i.k_scale)

    indices, values = ours()
    some = IndexerInputs(i.q[rows], i.k, i.weights[rows], i.k_scale, i.ks[rows], i.ke[rows])
    expected = reference.topk_select(logits_of(some), some.ks, some.ke, TOPK)
    check_selected((indices[rows], values[rows]), expected)
    peer = None
    if spec.has_peer:
        _, selecting_ms = peer_figure("topk_select", "sglang_v2", f"{spec.seq}x{spec.s_kv}")
        scoring_ms = flops_of(spec, i) / peer_tflops(spec.heads, spec.s_kv)[1] / 1e9
        peer = ("DeepGEMM + SGLang v2", round(scoring_ms + selecting_ms, 4))
    return make_case(
        spec.name,
        spec.group,
        spec.args() | {"K": TOPK},
        measure_ms(ours),
        peer=peer,
        err={"differing_rows": 0},
        extra_mb=round(workspace_bytes(ours) / 1e6, 1),
    )


def plot_logits(cases: list[Case], path: Path) -> None:
    with drawing(path, 13, 2) as axes:
        ceiling = PEERS["ceilings"]["fp8_matmul_8192_tflops"]
        for axis, heads in zip(axes, (64, 32), strict=True):
            shown = [case for case in cases if case["peer"] and case["args"]["Hi"] == heads]
            series = {"dsa_ext": [case["tflops"] for case in shown], "DeepGEMM": [case["peer_value"] for case in shown]}
            grouped_bars(axis, [f"{case['args']['S_kv'] // 1024}K" for case in shown], series)
            axis.axhline(ceiling, color="black", linestyle=":", linewidth=1)
            axis.text(-0.4, ceiling + 10, "dense fp8 matmul", fontsize=8)
            axis.set(title=f"indexer_logits, fp8, {heads} heads, 4096 queries", xlabel="S_kv", ylabel="TFLOP/s")
            axis.set_ylim(0, 1450)


def plot_select(cases: list[Case], path: Path) -> None:
    with drawing(path, 13, 2) as axes:
        shown = [case for case in cases if case["peer"] and case["args"]["R"] == 4096]
        series = {"dsa_ext": [case["ms"] for case in shown], "SGLang": [case["peer_value"] for case in shown]}
        grouped_bars(axes[0], [f"{case['args']['C'] // 1024}K" for case in shown], series, number="{:.2f}")
        axes[0].set(title="topk_select, 2048 of each of 4096 rows", xlabel="columns", ylabel="ms")
        axes[0].legend(loc="upper left")
        many = [case for case in cases if case["args"]["R"] == 4096]
        names = [case["name"].removeprefix("4096x").replace("_", "\n") for case in many]
        grouped_bars(axes[1], names, {"dsa_ext": [case["tbps"] for case in many]}, number="{:.2f}")
        axes[1].set(title="4096 rows, logits read", ylabel="TB/s")


def plot_topk(cases: list[Case], path: Path) -> None:
    with drawing(path, 8) as axis:
        shown = [case for case in cases if case["peer"]]
        series = {"dsa_ext": [case["ms"] for case in shown], shown[0]["peer"]: [case["peer_value"] for case in shown]}
        names = [f"{case['args']['Hi']} heads, {case['args']['S_kv'] // 1024}K" for case in shown]
        grouped_bars(axis, names, series, number="{:.2f}")
        axis.set(title="indexer_topk, fp8, 2048 keys for each of 4096 queries", ylabel="ms")
        axis.legend(loc="upper right")


#: For each operator its specs, and the functions that measure and plot them.
BENCHMARKS: dict[str, tuple[Callable[[], Iterator[Any]], Callable[..., Case], Callable[[list[Case], Path], None]]] = {
    "indexer_logits": (logits_specs, measure_logits, plot_logits),
    "topk_select": (select_specs, measure_select, plot_select),
    "indexer_topk": (topk_specs, measure_topk, plot_topk),
}


if __name__ == "__main__":
    for op, (specs, measure, plot) in BENCHMARKS.items():
        run(op, __doc__, specs(), measure, plot)
