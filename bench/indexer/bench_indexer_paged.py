"""Times dsa::indexer_logits_paged and indexer_topk_paged in CUDA graphs; writes their results, with the peer's figures,
and plots.

All sequences have the same length. A call is timed within a graph of several calls, each with inputs of its own, which
together are larger than the L2. Logits of some sequences are compared with those of indexer_logits before, bit for bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsa_ext
from bench.common import PEERS, Case, drawing, grouped_bars, make_case, measure_rotating_ms, peer_figure, run
from dsa_ext.testing.paged_inputs import PagedInputs, gathered, make_paged_inputs
from dsa_ext.testing.tolerances import bits

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
DIM, PAGE, TOPK = 128, 64, 2048
TIMER = "CUDA graph of calls with rotating inputs, median"
_CACHED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Spec:
    group: str
    batch: int
    keys: int
    queries: int = 1
    heads: int = 64
    dtype: torch.dtype = FP8

    @property
    def name(self) -> str:
        kind = "" if self.dtype == FP8 else "_bf16"
        return f"h{self.heads}_{self.batch}x{self.keys}_n{self.queries}{kind}"

    def args(self) -> dict[str, Any]:
        sizes = {"B": self.batch, "N": self.queries, "S_kv": self.keys, "Hi": self.heads, "Di": DIM, "page": PAGE}
        return sizes | {"dtype": str(self.dtype).removeprefix("torch.")}

    def key_bytes(self) -> int:
        return self.batch * self.keys * (DIM + 4 if self.dtype == FP8 else 2 * DIM)


def specs() -> Iterator[Spec]:
    for queries in (1, 2):
        for batch, keys in ((1, 8192), (1, 32768), (1, 131072), (8, 131072), (64, 32768), (128, 8192), (128, 131072)):
            yield Spec(f"fp8, 64 heads, N = {queries}", batch, keys, queries)
    for heads in (32, 8):
        yield Spec("Other shapes", 128, 32768, heads=heads)
    yield Spec("Other shapes", 32, 32768, queries=6)
    yield Spec("Other shapes", 64, 32768, dtype=BF16)


def topk_specs() -> Iterator[Spec]:
    for batch, keys in ((1, 8192), (1, 131072), (32, 32768), (128, 32768)):
        yield Spec("fp8, 64 heads, N = 1", batch, keys)


def inputs_of(spec: Spec) -> list[PagedInputs]:
    """Several with caches of their own, unless one is so large that the L2 does not matter."""
    count = min(32, -(-_CACHED_BYTES // spec.key_bytes()))
    one = make_paged_inputs(
        spec.batch, spec.queries, spec.keys, spec.heads, DIM, PAGE, dtype=spec.dtype, device="cuda", seed=1
    )
    return [one, *(replace(one, k_cache=one.k_cache.clone()) for _ in range(count - 1))]


def check(spec: Spec, inputs: PagedInputs, logits: Tensor) -> None:
    for b in {0, spec.batch // 2, spec.batch - 1}:
        rows = slice(b * spec.queries, (b + 1) * spec.queries)
        k, k_scale = gathered(inputs, b)
        ends = torch.arange(spec.keys - spec.queries + 1, spec.keys + 1, device="cuda", dtype=torch.int32)
        bounds = torch.zeros_like(ends), ends
        expected = dsa_ext.indexer_logits(inputs.q[b], k, inputs.weights[rows], *bounds, k_scale=k_scale)
        assert torch.equal(bits(logits[rows]), bits(expected)), (spec.name, b)


def peer_of(spec: Spec) -> tuple[str, float] | None:
    """DeepGEMM without its planning kernel, in milliseconds."""
    if (spec.heads, spec.dtype) != (64, FP8):
        return None
    key, case = f"deepgemm_n{spec.queries}", f"{spec.batch}x{spec.keys}"
    figure = PEERS["indexer_logits_paged"]["figures"].get(key)
    return peer_figure("indexer_logits_paged", key, case) if figure and case in figure["values"] else None


@torch.inference_mode()
def measure_logits(spec: Spec, _times: dict[str, float]) -> Case:
    inputs = inputs_of(spec)
    check(spec, inputs[0], dsa_ext.indexer_logits_paged(**vars(inputs[0])))
    ms = measure_rotating_ms(lambda i: dsa_ext.indexer_logits_paged(**vars(i)), inputs)
    logits_bytes = 4 * spec.batch * spec.queries * spec.keys
    tbps = round((spec.key_bytes() + logits_bytes) / ms / 1e9, 3)
    return make_case(spec.name, spec.group, spec.args(), ms, peer=peer_of(spec), err={"differing": 0}, tbps=tbps)


@torch.inference_mode()
def measure_topk(spec: Spec, _times: dict[str, float]) -> Case:
    inputs = inputs_of(spec)
    ms = measure_rotating_ms(lambda i: dsa_ext.indexer_topk_paged(**vars(i), topk=TOPK, return_slots=True), inputs)
    return make_case(spec.name, spec.group, spec.args() | {"K": TOPK}, ms)


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 13, 2) as axes:
        for axis, queries in zip(axes, (1, 2), strict=True):
            shown = [case for case in cases if case["peer"] and case["args"]["N"] == queries]
            series = {
                "dsa_ext": [case["ms"] * 1e3 for case in shown],
                "DeepGEMM": [case["peer_value"] * 1e3 for case in shown],
            }
            names = [f"{case['args']['B']} x {case['args']['S_kv'] // 1024}K" for case in shown]
            grouped_bars(axis, names, series)
            axis.set(title=f"indexer_logits_paged, fp8, 64 heads, N = {queries}", ylabel="us", yscale="log")
            axis.legend(loc="upper left")


def plot_topk(cases: list[Case], path: Path) -> None:
    with drawing(path, 8) as axis:
        names = [f"{case['args']['B']} x {case['args']['S_kv'] // 1024}K" for case in cases]
        grouped_bars(axis, names, {"dsa_ext": [case["ms"] * 1e3 for case in cases]}, number="{:.1f}")
        axis.set(title="indexer_topk_paged, fp8, 64 heads, 2048 keys", ylabel="us")


#: For each operator its specs, and the functions that measure and plot them.
BENCHMARKS: dict[str, tuple[Callable[[], Iterator[Any]], Callable[..., Case], Callable[[list[Case], Path], None]]] = {
    "indexer_logits_paged": (specs, measure_logits, plot),
    "indexer_topk_paged": (topk_specs, measure_topk, plot_topk),
}


if __name__ == "__main__":
    for op, (make_specs, measure, draw) in BENCHMARKS.items():
        run(op, __doc__, make_specs(), measure, draw, timer=TIMER)
