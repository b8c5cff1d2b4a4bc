"""Times a whole decode step in CUDA graphs: indexer on a paged fp8 cache, selection, attention to the selected slots.

A step is one token of each sequence: indexer_topk_paged, whose slots go to sparse_mla_decode. Sizes are those of
DeepSeek-V3.2. Every graph has several steps with other queries and, unless one is larger than the L2, caches of their
own for the indexer. `operators_ms` are times of the operators by themselves, `peer_parts_ms` those of other people's
kernels for logits and attention where both are known; the time of their selection is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsa_ext
from bench.common import PEERS, Case, drawing, grouped_bars, make_case, measure_rotating_ms, peer_figure, run
from bench.sparse_mla.bench_sparse_mla_decode import COLUMNS, PAGE, TOPK, make_cache
from dsa_ext.testing.paged_inputs import PagedInputs, make_paged_inputs
from dsa_ext.testing.tolerances import errors

OP = "decode_step"
OPERATORS = ["indexer_topk_paged", "sparse_mla_decode"]
HEADS, INDEX_HEADS, INDEX_DIM = 128, 64, 128
_CACHED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Spec:
    batch: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.keys}"


@dataclass
class Step:
    """The inputs of a step."""

    indexer: PagedInputs
    q: Tensor
    cache: Tensor

    def slots(self) -> Tensor:
        """[batch, 1, topk]"""
        return dsa_ext.indexer_topk_paged(**vars(self.indexer), topk=TOPK, return_slots=True)[0][:, None]

    def run(self) -> tuple[Tensor, Tensor]:
        return dsa_ext.sparse_mla_decode(self.q, self.cache, self.slots())


def specs() -> Iterator[Spec]:
    for batch, keys in ((1, 131072), (8, 32768), (32, 32768), (128, 32768), (128, 131072)):
        yield Spec(batch, keys)


def make_steps(spec: Spec) -> list[Step]:
    torch.manual_seed(1)
    one = make_paged_inputs(
        spec.batch, 1, spec.keys, INDEX_HEADS, INDEX_DIM, PAGE, dtype=torch.float8_e4m3fn, device="cuda", spare=0
    )
    cache = make_cache(spec.batch, packed=True, context=spec.keys)
    steps = []
    for _ in range(min(16, max(2, _CACHED_BYTES // one.k_cache.numel()))):
        q_indexer = torch.randn(one.q.shape, device="cuda").to(one.q.dtype)
        k_cache = one.k_cache.clone() if one.k_cache.numel() < _CACHED_BYTES else one.k_cache
        q = torch.randn(spec.batch, 1, HEADS, COLUMNS, device="cuda").bfloat16()
        steps.append(Step(replace(one, q=q_indexer, k_cache=k_cache), q, cache))
    return steps


def peer_parts(spec: Spec) -> dict[str, float] | None:
    """Milliseconds of logits without their planning, and of attention with contexts of 32768 keys."""
    parts = [
        ("indexer_logits_paged", "deepgemm_n1", spec.name),
        ("sparse_mla_decode", f"flashmla_h{HEADS}", f"b{spec.batch}_n1"),
    ]
    if any(case not in PEERS[op]["figures"][key]["values"] for op, key, case in parts):
        return None
    return dict(peer_figure(*part) for part in parts)


@torch.inference_mode()
def measure(spec: Spec, _times: dict[str, float]) -> Case:
    steps = make_steps(spec)
    slots = [step.slots() for step in steps]
    some = slice(None, None, max(1, spec.batch // 2))
    args = {"q": steps[0].q[some], "kv_cache": steps[0].cache, "indices": slots[0][some]}
    out, lse = steps[0].run()
    found = errors("sparse_mla_decode", (out[some], lse[some]), args)
    found.check()

    ms = measure_rotating_ms(Step.run, steps)
    operators = {
        "indexer_topk_paged": measure_rotating_ms(Step.slots, steps),
        "sparse_mla_decode": measure_rotating_ms(
            lambda pair: dsa_ext.sparse_mla_decode(pair[0].q, pair[0].cache, pair[1]),
            list(zip(steps, slots, strict=True)),
        ),
    }
    others: dict[str, Any] = {"operators_ms": {name: round(value, 6) for name, value in operators.items()}}
    if (parts := peer_parts(spec)) is not None:
        others["peer_parts_ms"] = parts
    letters = {"B": spec.batch, "N": 1, "H": HEADS, "Hi": INDEX_HEADS, "Di": INDEX_DIM, "K": TOPK}
    return make_case(
        spec.name,
        "fp8 caches, 128 heads, indexer of 64 heads",
        {**letters, "S_kv": spec.keys, "page": PAGE},
        ms,
        err={"similarity": found.similarity},
        **others,
    )


def plot(cases: list[Case], path: Path) -> None:
    """The step, and its parts by themselves."""
    with drawing(path, 9) as axis:
        series = {"step": [case["ms"] * 1e3 for case in cases]}
        for name in OPERATORS:
            series[name] = [case["operators_ms"][name] * 1e3 for case in cases]
        grouped_bars(axis, [f"{case['args']['B']} x {case['args']['S_kv'] // 1024}K" for case in cases], series)
        axis.set(title="decode step, fp8, 128 heads, indexer of 64 heads", ylabel="us", yscale="log")
        axis.legend(loc="upper left", fontsize=8)


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, "CUDA graph of several steps, median", OPERATORS)
