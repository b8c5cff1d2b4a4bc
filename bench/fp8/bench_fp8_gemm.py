"""Times dsa::fp8_gemm and PyTorch's scaled_mm with the same block scales; writes its results file and plot.

M x N x K, operands quantized by act_quant and prepare_weight. scaled_mm is timed here too, alternating with ours. It
gets four rows where the case has one, since it requires a multiple of four. `rotating` cases are calls in one CUDA
graph, each with another weight. `quantised` cases time act_quant and the matmul, as a multiple of the matmul's time.
Every case is checked against float64 on dequantized operands before it is timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

import dsa_ext
from bench.common import Case, drawing, grouped_bars, make_case, measure_ms, measure_rotating_ms, run, time_versus
from dsa_ext.reference.fp8 import dequantize
from dsa_ext.testing.tolerances import similarity_error

OP = "fp8_gemm"
OPERATORS = ["fp8_gemm", "act_quant"]
MANY = ((7168, 16384), (4096, 7168), (2112, 7168), (7168, 2048), (24576, 1536))
FEW = (7168, 16384)


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    rows: int
    width: int
    columns: int
    kind: str = "product"


def specs() -> Iterator[Spec]:
    for width, columns in MANY:
        yield Spec("Many rows", f"4096x{width}x{columns}", 4096, width, columns)
    for width, columns in MANY[:3]:
        yield Spec("Many rows", f"4096x{width}x{columns}_quantised", 4096, width, columns, "quantised")
    for rows in (1, 8, 16, 32, 64, 128):
        yield Spec("Few rows", f"{rows}x7168x16384", rows, *FEW)
    for rows in (1, 16, 64):
        yield Spec("Few rows, rotating weights", f"{rows}x7168x16384_rotating", rows, *FEW, "rotating")


def library(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    types = torch.nn.functional.ScalingType
    scales = (a_s, types.BlockWise1x128, b_s.mT, types.BlockWise128x128)
    out: Tensor = torch.nn.functional.scaled_mm(a, b.mT, *scales, output_dtype=torch.bfloat16)
    return out


def check(args: tuple[Tensor, ...]) -> float:
    a, a_s, b, b_s = args
    out = torch.ops.dsa.fp8_gemm(*args)
    some = slice(None, None, max(1, len(a) // 64))
    rows = b_s.repeat_interleave(128, 0)[: b.shape[0]]
    error = similarity_error(out[some], dequantize(a[some], a_s[some]).double() @ dequantize(b, rows).double().mT)
    assert error <= 5e-6, error
    return error


def in_turn(ours: Callable[[], object], peers: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of both: means of three alternating measurements, since the clock drifts as the chip grows warm."""
    pairs = [(measure_ms(ours), measure_ms(peers)) for _ in range(3)]
    return fmean(pair[0] for pair in pairs), fmean(pair[1] for pair in pairs)


def measure(spec: Spec, times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda").bfloat16()

    x = random(spec.rows, spec.columns)
    b, b_s = dsa_ext.prepare_weight(random(spec.width, spec.columns))
    args = (*dsa_ext.act_quant(x), b, b_s)
    error = check(args)
    shape = {"M": spec.rows, "N": spec.width, "K": spec.columns}
    flop = 2 * spec.rows * spec.width * spec.columns
    err = {"similarity": error}
    if spec.kind == "quantised":
        ms = measure_ms(lambda: torch.ops.dsa.fp8_gemm(*torch.ops.dsa.act_quant(x), b, b_s))
        versus = time_versus(ms, spec.name.removesuffix("_quantised"), times)
        return make_case(spec.name, spec.group, shape, ms, tflops=flop / ms / 1e9, err=err, **versus)
    padded = args[:2] if spec.rows % 4 == 0 else dsa_ext.act_quant(random(4, spec.columns))
    if spec.kind == "rotating":
        weights = [b.clone() for _ in range(4)]
        ms = measure_rotating_ms(lambda w: torch.ops.dsa.fp8_gemm(*args[:2], w, b_s), weights)
        peer_ms = measure_rotating_ms(lambda w: library(*padded, w, b_s), weights)
    else:
        ms, peer_ms = in_turn(lambda: torch.ops.dsa.fp8_gemm(*args), lambda: library(*padded, b, b_s))
    if spec.rows <= 128:
        moved = b.nbytes + x.numel() + 2 * spec.rows * spec.width
        return make_case(
            spec.name, spec.group, shape, ms, peer=("scaled_mm", peer_ms), err=err, tbps=round(moved / ms / 1e9, 3)
        )
    peer = ("scaled_mm", round(flop / peer_ms / 1e9, 2))
    return make_case(spec.name, spec.group, shape, ms, tflops=flop / ms / 1e9, peer=peer, err=err)


def plot(cases: list[Case], path: Path) -> None:
    few = [case for case in cases if "tbps" in case]
    with drawing(path, 10) as axis:
        series = {"dsa_ext": [1e3 * c["ms"] for c in few], "scaled_mm": [1e3 * c["peer_value"] for c in few]}
        grouped_bars(axis, [case["name"].replace("x7168x16384", "").replace("_", "\n") for case in few], series)
        axis.set(title="fp8_gemm of few rows with a weight of 7168 x 16384", xlabel="rows", ylabel="µs")
        axis.set_ylim(top=1.3 * axis.get_ylim()[1])
        axis.legend(loc="upper right")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, operators=OPERATORS)
