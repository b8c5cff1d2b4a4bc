"""Times dsa::act_quant; writes its results file, with the peer's figures, and plot.

Rows of bf16. TB/s count every tensor that is read or written once. `rotating` cases are calls in one CUDA graph, each
with another input. Each time is compared with that of `copy`, PyTorch's copy of a tensor that moves as many bytes in
all. Every case is checked bit by bit against the reference on the CPU before it is timed.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.common import (
    Case,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    measure_rotating_ms,
    peer_figure,
    run,
    time_versus,
)
from dsa_ext import reference

OP = "act_quant"
PEERS = {"8192x7168", "8192x2048"}


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    rows: int
    columns: int
    rotating: bool = False


def specs() -> Iterator[Spec]:
    for rows, columns in itertools.product((64, 4096, 8192), (1536, 2048, 7168)):
        yield Spec(f"{rows} rows", f"{rows}x{columns}", rows, columns)
        if rows == 8192:
            yield Spec(f"{rows} rows", f"{rows}x{columns}_rotating", rows, columns, rotating=True)
    yield Spec("Queries of an indexer", "524288x128_rotating", 8192 * 64, 128, rotating=True)


def measure(spec: Spec, _times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(spec.rows, spec.columns, generator=generator, device="cuda").bfloat16()
    for got, expected in zip(torch.ops.dsa.act_quant(x), reference.act_quant(x.cpu()), strict=True):
        assert torch.equal(got.cpu().float(), expected.float())
    moved = x.nbytes + x.numel() + x.numel() // 32
    source = torch.zeros(moved // 2, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    if spec.rotating:
        ms = measure_rotating_ms(torch.ops.dsa.act_quant, [x.clone() for _ in range(8)])
        copy_ms = measure_rotating_ms(lambda t: t.clone(), [source.clone() for _ in range(8)])
    else:
        ms = measure_ms(lambda: torch.ops.dsa.act_quant(x))
        copy_ms = measure_ms(lambda: target.copy_(source))
    peer = None
    if spec.name in PEERS:
        peer = peer_figure(OP, "tilelang", spec.name)
    shape = {"M": spec.rows, "N": spec.columns}
    versus = time_versus(ms, "copy", {"copy": copy_ms})
    return make_case(spec.name, spec.group, shape, ms, peer=peer, tbps=round(moved / ms / 1e9, 3), **versus)


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 12) as axis:
        series = {
            "dsa_ext": [1e3 * c["ms"] for c in cases],
            "copy of as many bytes": [1e3 * c["ms"] / c["time_vs"]["copy"] for c in cases],
        }
        grouped_bars(axis, [case["name"].replace("_", "\n") for case in cases], series)
        axis.set(title="act_quant of bf16 rows", ylabel="µs")
        axis.legend(loc="upper left")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
