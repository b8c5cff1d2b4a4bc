"""Times dsa::indexer_loss beside plain PyTorch; writes its results file and plot.

Every case is checked against the reference in float64 before it is timed. TB/s count the scores, p and the gradient
once each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import (
    Case,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    run,
    time_versus,
)
from torch import Tensor

import dsa_ext
from dsa_ext import reference

OP = "indexer_loss"
ROWS = 4096


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    slots: int
    kind: str  # operator, autograd or pytorch
    compare_to: str | None = None  # a case to divide this one's time by


def specs() -> Iterator[Spec]:
    for slots in (2048, 8192, 32768):
        name = f"{ROWS}x{slots}"
        yield Spec("Value and gradient", name, slots, "operator")
        yield Spec("Mean and backward", f"{name}_autograd", slots, "autograd", compare_to=name)
        yield Spec("Plain PyTorch", f"{name}_pytorch", slots, "pytorch", compare_to=f"{name}_autograd")


def plain(scores: Tensor, p: Tensor) -> Tensor:
    target = p / p.sum(-1, keepdim=True).clamp(min=1e-10)
    return torch.nn.functional.kl_div(scores.log_softmax(-1), target, reduction="sum") / len(scores)


def measure(spec: Spec, times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    scores = torch.randn(ROWS, spec.slots, generator=generator, device="cuda")
    p = torch.rand(ROWS, spec.slots, generator=generator, device="cuda") ** 8
    loss, dscores = torch.ops.dsa.indexer_loss(scores, p)
    rows = slice(0, ROWS, 64)
    expected, gradient = reference.indexer_loss(scores[rows].double(), p[rows].double())
    torch.testing.assert_close(loss[rows].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dscores[rows].double(), gradient, rtol=1e-5, atol=1e-8)
    leaf = scores.requires_grad_()
    calls = {
        "operator": lambda: torch.ops.dsa.indexer_loss(scores.detach(), p),
        "autograd": lambda: torch.autograd.grad(dsa_ext.indexer_loss(leaf, p), leaf),
        "pytorch": lambda: torch.autograd.grad(plain(leaf, p), leaf),
    }
    ms = measure_ms(calls[spec.kind])
    return make_case(
        spec.name,
        spec.group,
        {"R": ROWS, "K": spec.slots},
        ms,
        tbps=round(3 * 4 * ROWS * spec.slots / ms / 1e9, 3),
        **time_versus(ms, spec.compare_to, times),
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 6) as axis:
        by_group = {
            group: [c["ms"] for c in cases if c["group"] == group] for group in ("Mean and backward", "Plain PyTorch")
        }
        labels = [f"K = {case['args']['K']}" for case in cases if case["group"] == "Plain PyTorch"]
        series = {"dsa_ext": by_group["Mean and backward"], "PyTorch": by_group["Plain PyTorch"]}
        grouped_bars(axis, labels, series)
        axis.set(title=f"indexer_loss, mean and backward, {ROWS} rows", ylabel="ms")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
