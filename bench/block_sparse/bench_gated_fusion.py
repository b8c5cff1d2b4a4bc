"""Times dsa_ext.gated_fusion and its backward, and plain and compiled PyTorch; writes its results file and plot.

12 heads of 128 columns, bf16, in the layout of a module: [B, N, H, D] in memory, the gate a transposed view of
[B, N, H]. Backwards run through autograd, ours and the peers'. TB/s count every tensor that is read or written once.
Ours and the peers are checked against the reference in float64 before they are timed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

import dsa_ext
from bench.common import (
    PEER_SIMILARITY,
    Case,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    measure_peers,
    pytorch_peers,
    run,
)
from dsa_ext import reference
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "gated_fusion"
OPERATORS = ["gated_fusion_fwd", "gated_fusion_bwd"]
HEADS, COLUMNS = 12, 128


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    tokens: int
    backward: bool


def specs() -> Iterator[Spec]:
    for tokens in (64, 23296, 131072):
        yield Spec("Forward", f"n{tokens}", tokens, backward=False)
        yield Spec("Backward", f"n{tokens}_bwd", tokens, backward=True)


def plain(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    share = gate.sigmoid()[..., None]
    return share * fine + (1 - share) * coarse


def backward_of(forward: Callable[..., Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Callable[[], object]:
    """Only the backward, which can be repeated."""
    with functorch_config.patch(donated_buffer=False):  # otherwise compiled ones cannot be repeated
        out = forward(*leaves)
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def measure(spec: Spec, _times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (1, spec.tokens, HEADS, COLUMNS)
    dout, *branches = (torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2) for _ in "dfc")
    args = (*branches, torch.randn(shape[:3], generator=generator, device="cuda").bfloat16().mT)
    leaves = tuple(t.detach().requires_grad_() for t in args)
    some = slice(None, None, 97)
    exact = [t[:, :, some].double() for t in args]
    expected: tuple[Tensor, ...] = (reference.gated_fusion_fwd(*exact),)
    if spec.backward:
        expected = reference.gated_fusion_bwd(dout[:, :, some].double(), *exact)

    def call_of(forward: Callable[..., Tensor]) -> Callable[[], object]:
        return backward_of(forward, leaves, dout) if spec.backward else partial(forward, *args)

    def error_of(call: Callable[[], object]) -> float:
        got = call()
        got = got if isinstance(got, tuple) else (got,)
        return max(similarity_error(a[:, :, some], b) for a, b in zip(got, expected, strict=True))

    ours = call_of(dsa_ext.gated_fusion)
    peers = {name: call_of(forward) for name, forward in pytorch_peers("PyTorch", plain).items()}
    error = error_of(ours)
    assert error <= SIMILARITY, error
    assert max(map(error_of, peers.values())) <= PEER_SIMILARITY
    ms = measure_ms(ours)
    peer, peers_ms = measure_peers(peers)
    tensors = 5 if spec.backward else 3
    moved = tensors * branches[0].nbytes + (2 if spec.backward else 1) * args[2].nbytes
    return make_case(
        spec.name,
        spec.group,
        {"B": 1, "H": HEADS, "N": spec.tokens, "D": COLUMNS},
        ms,
        peer=peer,
        err={"similarity": error},
        tbps=round(moved / ms / 1e9, 3),
        peers_ms=peers_ms,
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 8) as axis:
        series = {"dsa_ext": [1e3 * c["ms"] for c in cases], "PyTorch": [1e3 * c["peer_value"] for c in cases]}
        grouped_bars(axis, [case["name"].replace("_", "\n", 1) for case in cases], series)
        axis.set(title="gated_fusion of so many tokens", ylabel="µs", yscale="log")
        axis.legend(loc="upper left")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, operators=OPERATORS)
