"""Times dsa::gated_fusion_fwd and its gradients beside plain PyTorch; writes its results file and plot.

12 heads of 128 columns, bf16, as a module has them: [B, N, H, D] in memory, the gate a transposed view of [B, N, H].
TB/s count what is read and written once each. Every case is checked against the reference in float64 before it is
timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Case, drawing, grouped_bars, make_case, measure_ms, run
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "gated_fusion"
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


def measure(spec: Spec, _times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (1, spec.tokens, HEADS, COLUMNS)
    dout, *branches = (torch.randn(shape, generator=generator, device="cuda").bfloat16().transpose(1, 2) for _ in "dfc")
    args = (*branches, torch.randn(shape[:3], generator=generator, device="cuda").bfloat16().mT)
    leaves = tuple(t.detach().requires_grad_() for t in args)
    some = slice(None, None, 97)
    exact = [t[:, :, some].double() for t in args]
    if spec.backward:
        expected = reference.gated_fusion_bwd(dout[:, :, some].double(), *exact)
        got = torch.ops.dsa.gated_fusion_bwd(dout, *args)
        out = plain(*leaves)
        ms = measure_ms(lambda: torch.ops.dsa.gated_fusion_bwd(dout, *args))
        peer_ms = measure_ms(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    else:
        expected, got = (reference.gated_fusion_fwd(*exact),), (torch.ops.dsa.gated_fusion_fwd(*args),)
        ms = measure_ms(lambda: torch.ops.dsa.gated_fusion_fwd(*args))
        peer_ms = measure_ms(lambda: plain(*args))
    error = max(similarity_error(a[:, :, some], b) for a, b in zip(got, expected, strict=True))
    assert error <= SIMILARITY, error
    tensors = 5 if spec.backward else 3
    moved = tensors * branches[0].nbytes + (2 if spec.backward else 1) * args[2].nbytes
    return make_case(
        spec.name,
        spec.group,
        {"B": 1, "H": HEADS, "N": spec.tokens, "D": COLUMNS},
        ms,
        peer=("PyTorch", round(peer_ms, 6)),
        err={"similarity": error},
        tbps=round(moved / ms / 1e9, 3),
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 8) as axis:
        series = {"dsa_ext": [1e3 * c["ms"] for c in cases], "PyTorch": [1e3 * c["peer_value"] for c in cases]}
        grouped_bars(axis, [case["name"].replace("_", "\n", 1) for case in cases], series)
        axis.set(title="gated_fusion of so many tokens", ylabel="µs", yscale="log")
        axis.legend(loc="upper left")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
