"""Times dsa::block_sparse_attn_fwd; writes its results file, with the peers' figures, and plot.

12 heads of 128 columns, bf16. Every block of queries lists the same number of blocks of keys, drawn at random, in
ascending order. TFLOP/s count 4 * 64 * 64 * 128 for each listed block. Some rows of every case are checked against the
reference in float64 before it is timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.common import (
    Case,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    peer_figure,
    run,
    time_versus,
)
from dsa_ext import reference
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "block_sparse_attn_fwd"
HEADS, COLUMNS, BLOCK = 12, 128, 64


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    queries: int
    keys: int
    sparsity: int  # percent of the blocks that are not listed
    peer: tuple[str, str] | None = None  # key and case of its figure in peers_h200.json
    sizes: bool = False  # each block of keys has 32 to 64 valid keys
    compare_to: str | None = None  # a case to divide this one's time by


def self_attention() -> Iterator[tuple[int, int]]:
    """Self-attention cases: the number of tokens, and the percent of the blocks that are not listed."""
    for tokens in (8192, 16384, 23296, 32768, 65536, 131072):
        for sparsity in (99, 90, 50, 1) if tokens < 131072 else (99, 90):
            yield tokens, sparsity


def specs() -> Iterator[Spec]:
    for tokens, sparsity in self_attention():
        has_peer = tokens in (23296, 32768) and sparsity != 99
        peer = ("fwd", f"{tokens}_{sparsity}pct") if has_peer else None
        yield Spec(f"{tokens} tokens", f"n{tokens}_{sparsity}", tokens, tokens, sparsity, peer)
    for sparsity in (90, 50):
        name = f"n23296_{sparsity}"
        yield Spec("Blocks of 32 to 64 keys", f"{name}_sizes", 23296, 23296, sparsity, sizes=True, compare_to=name)
    for sparsity in (99, 90, 50, 1):
        peer = ("decode_64q_23296kv", f"{sparsity}pct") if sparsity != 99 else None
        yield Spec("One block of queries", f"decode_23296_{sparsity}", BLOCK, 23296, sparsity, peer)


def draw(queries: int, keys: int, sparsity: int, generator: torch.Generator) -> tuple[list[Tensor], Tensor, Tensor]:
    """[q, k, v], and the listed blocks with their number."""
    tensors = [
        torch.randn(1, HEADS, n, COLUMNS, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (queries, keys, keys)
    ]
    q_blocks, kv_blocks = queries // BLOCK, keys // BLOCK
    listed = round(kv_blocks * (1 - sparsity / 100))
    drawn = torch.rand(HEADS, q_blocks, kv_blocks, generator=generator, device="cuda").topk(listed).indices
    number = torch.full((1, HEADS, q_blocks), listed, device="cuda", dtype=torch.int32)
    return tensors, drawn.sort(-1).values.int()[None], number


def products(index: Tensor) -> int:
    """Floating-point operations of one matmul over all listed blocks."""
    return 2 * index.numel() * BLOCK * BLOCK * COLUMNS


@torch.inference_mode()
def measure(spec: Spec, times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    (q, k, v), index, number = draw(spec.queries, spec.keys, spec.sparsity, generator)
    kv_blocks = spec.keys // BLOCK
    sizes = None
    if spec.sizes:
        sizes = torch.randint(32, 65, (kv_blocks,), generator=generator, device="cuda", dtype=torch.int32)
    out, _ = torch.ops.dsa.block_sparse_attn_fwd(q, k, v, index, number, sizes)
    last = slice(-BLOCK, None)
    expected, _ = reference.block_sparse_attn_fwd(
        q[:, :1, last].double(), k[:, :1].double(), v[:, :1].double(), index[:, :1, -1:], number[:, :1, -1:], sizes
    )
    error = similarity_error(out[:, :1, last], expected)
    assert error <= SIMILARITY, error

    ms = measure_ms(lambda: torch.ops.dsa.block_sparse_attn_fwd(q, k, v, index, number, sizes))
    flop = 2 * products(index)
    return make_case(
        spec.name,
        spec.group,
        {
            "B": 1,
            "H": HEADS,
            "Nq": spec.queries,
            "Nkv": spec.keys,
            "D": COLUMNS,
            "M": index.shape[3],
            "sizes": spec.sizes,
        },
        ms,
        tflops=flop / ms / 1e9,
        peer=peer_figure("block_sparse_attention", *spec.peer, flop) if spec.peer else None,
        err={"similarity": error},
        **time_versus(ms, spec.compare_to, times),
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 11) as axis:
        shown = [case for case in cases if case["peer"]]
        series = {"dsa_ext": [c["tflops"] for c in shown], "cuDNN frontend": [c["peer_value"] for c in shown]}
        grouped_bars(axis, [case["name"].replace("_", "\n", 1) for case in shown], series)
        axis.set(title=f"{path.stem}: tokens and percent of blocks left out", ylabel="TFLOP/s")
        axis.legend(loc="upper left")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
