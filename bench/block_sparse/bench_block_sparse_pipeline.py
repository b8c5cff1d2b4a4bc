"""Times block-sparse attention from q, k and v to its fused output, stage by stage; writes its results file and plot.

12 heads of 128 columns, bf16, [B, N, H, D] in memory, as after the projections of dsa_ext.nn.BlockSparseAttention.
`prefill` is self-attention of all tokens. `decode` adds 64 tokens to a cache: it appends them, pools their blocks, and
lets them attend to everything in the cache. `attend` runs the stages from coarse attention to fusion one after another,
`whole` runs all stages, and `graph` runs all stages as one CUDA graph. The last block of queries is checked against the
references in float64 before anything is timed. It is not recorded how the reference pipeline was timed, so its figures
are listed without a ratio.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import dsa_ext
from bench.common import (
    Case,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    peer_figure,
    run,
)
from dsa_ext import reference
from dsa_ext.nn import BlockSparseAttention
from dsa_ext.nn.block_sparse import BLOCK
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "block_sparse_pipeline"
HEADS, COLUMNS, TOKENS = 12, 128, 23296
STAGES = ("pool", "append", "coarse", "select", "fine", "fusion", "attend", "whole", "graph")
OPERATORS = ["coarse_attn_fwd", "block_select", "block_sparse_attn_fwd", "gated_fusion_fwd"]
#: For each stage here, the corresponding stages of the reference pipeline.
PEERS = {"select": ("selection", "map_to_index"), "fine": ("kernel",), "fusion": ("fusion",)}
PEERS |= dict.fromkeys(("whole", "graph"), ("total",))


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    pipeline: str
    stage: str
    queries: int
    topk: int

    @property
    def name(self) -> str:
        return f"{self.pipeline}_{self.stage}"


def specs() -> Iterator[Spec]:
    for pipeline, queries, topk in (("prefill_90", TOKENS, 36), ("decode_90", BLOCK, 36), ("decode_99", BLOCK, 4)):
        group = f"{queries} tokens to {TOKENS}, {topk} of {TOKENS // BLOCK} blocks"
        for stage in STAGES:
            if stage != ("append" if queries == TOKENS else "pool"):
                yield Spec(group, pipeline, stage, queries, topk)


@functools.cache
def calls(queries: int, topk: int) -> dict[str, Callable[[], object]]:
    """The call of each stage, on the results of the stages before it."""
    torch.manual_seed(1)
    sizes = {"head_dim": COLUMNS, "mode": "topk", "topk": topk}
    layer = BlockSparseAttention(64, HEADS, **sizes, device="cuda", dtype=torch.bfloat16)
    cache = layer.make_cache(1, TOKENS)

    def tokens(count: int) -> list[Tensor]:
        return [torch.randn(1, count, HEADS, COLUMNS, device="cuda").bfloat16().transpose(1, 2) for _ in "kv"]

    def append() -> None:
        cache.length = TOKENS - queries
        cache.append(*new, layer.kv_pool)

    def whole() -> Tensor:
        if queries == TOKENS:
            return layer.attend(q, *new, *layer.pool(*new), gate)
        append()
        return layer.attend(q, *cache.tokens(), *cache.blocks(), gate)

    q, new, gate = tokens(queries)[0], tokens(queries), torch.randn(1, queries, HEADS, device="cuda").bfloat16().mT
    if queries < TOKENS:
        cache.append(*tokens(TOKENS - queries), layer.kv_pool)
        append()
        kv, pooled = cache.tokens(), cache.blocks()
    else:
        kv, pooled = new, layer.pool(*new)
    coarse, scores = dsa_ext.coarse_attn(q, *pooled)
    lists = layer.select(scores)
    fine = dsa_ext.block_sparse_attn(q, *kv, *lists)
    check(whole(), q, kv, pooled, lists, gate)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        whole()
    return {
        "pool": lambda: layer.pool(*new),
        "append": append,
        "coarse": lambda: dsa_ext.coarse_attn(q, *pooled),
        "select": lambda: layer.select(scores),
        "fine": lambda: dsa_ext.block_sparse_attn(q, *kv, *lists),
        "fusion": lambda: dsa_ext.gated_fusion(fine, coarse, gate),
        "attend": lambda: layer.attend(q, *kv, *pooled, gate),
        "whole": whole,
        "graph": graph.replay,
    }


def check(
    out: Tensor,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    pooled: tuple[Tensor, Tensor],
    lists: tuple[Tensor, Tensor],
    gate: Tensor,
) -> None:
    """Checks the last block of queries against the references in float64. Both branches and their sum are rounded."""
    last = slice(-BLOCK, None)
    q, gate = q[:, :, last].double(), gate[..., last].double()
    coarse, *_ = reference.coarse_attn_fwd(q, *(t.double() for t in pooled))
    fine, _ = reference.block_sparse_attn_fwd(q, *(t.double() for t in kv), *(t[:, :, -1:] for t in lists))
    error = similarity_error(out[:, :, last], reference.gated_fusion_fwd(fine, coarse, gate))
    assert error <= 2 * SIMILARITY, error


@torch.inference_mode()
def measure(spec: Spec, _times: dict[str, float]) -> Case:
    beside = {}
    if spec.pipeline == "decode_99" and spec.stage in PEERS:
        figures = [peer_figure(OP, "decode_64q_23296kv_99pct", part) for part in PEERS[spec.stage]]
        beside["not_compared_ms"] = {figures[0][0]: round(sum(ms for _, ms in figures), 6)}
    return make_case(
        spec.name,
        spec.group,
        {"B": 1, "H": HEADS, "Nq": spec.queries, "Nkv": TOKENS, "D": COLUMNS, "M": spec.topk},
        measure_ms(calls(spec.queries, spec.topk)[spec.stage]),
        **beside,
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 11) as axis:
        times = {case["name"]: 1e3 * case["ms"] for case in cases}
        series = {
            pipeline: [times.get(f"{pipeline}_{stage}", 0) for stage in STAGES]
            for pipeline in dict.fromkeys(spec.pipeline for spec in specs())
        }
        grouped_bars(axis, STAGES, series)
        axis.set(title="block-sparse attention behind its projections, by stages", ylabel="µs", yscale="log")
        axis.legend(loc="upper left")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, operators=OPERATORS)
