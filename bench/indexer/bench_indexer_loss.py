"""Times dsa::indexer_loss, and with autograd also plain and compiled PyTorch; writes its results and plot.

Every case is checked against the reference in float64 before it is timed, and the peers' gradients against ours. TB/s
count the scores, p and the gradient once each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dsa_ext
from bench.common import (
    Case,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    measure_peers,
    pytorch_peers,
    run,
    time_versus,
)
from dsa_ext import reference

OP = "indexer_loss"
ROWS = 4096


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    slots: int
    compare_to: str | None = None  # the case without autograd, to divide this one's time by


def specs() -> Iterator[Spec]:
    for slots in (2048, 8192, 32768):
        name = f"{ROWS}x{slots}"
        yield Spec("Value and gradient", name, slots)
        yield Spec("Mean and backward", f"{name}_autograd", slots, compare_to=name)


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
    if spec.compare_to is None:
        ms = measure_ms(lambda: torch.ops.dsa.indexer_loss(scores, p))
        others: dict[str, Any] = {}
    else:
        leaf = scores.detach().requires_grad_()

        def step_of(mean: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
            return lambda: torch.autograd.grad(mean(leaf, p), leaf)

        ours = step_of(dsa_ext.indexer_loss)
        peers = {name: step_of(mean) for name, mean in pytorch_peers("PyTorch", plain).items()}
        for step in (ours, *peers.values()):
            torch.testing.assert_close(step()[0] * ROWS, dscores, rtol=1e-4, atol=1e-7)
        ms = measure_ms(ours)
        peer, peers_ms = measure_peers(peers)
        others = {"peer": peer, "peers_ms": peers_ms}
    return make_case(
        spec.name,
        spec.group,
        {"R": ROWS, "K": spec.slots},
        ms,
        tbps=round(3 * 4 * ROWS * spec.slots / ms / 1e9, 3),
        **others,
        **time_versus(ms, spec.compare_to, times),
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 6) as axis:
        shown = [case for case in cases if case["peer"]]
        series = {"dsa_ext": [case["ms"] for case in shown], "PyTorch": [case["peer_value"] for case in shown]}
        grouped_bars(axis, [f"K = {case['args']['K']}" for case in shown], series)
        axis.set(title=f"indexer_loss, mean and backward, {ROWS} rows", ylabel="ms")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
