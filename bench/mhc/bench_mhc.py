"""Times the hyper-connection operators and their gradients; writes their results, with the peers' figures, and plot.

4096 tokens of 4 streams, bf16. TB/s count every tensor that must be read or written once. Results are checked against
the reference in float64 before they are timed, except for the gradient of h_res: once the weights have converged, it is
a difference of large numbers. Tests bound its error.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.common import Case, drawing, grouped_bars, make_case, measure_ms, peer_figure, run
from dsa_ext import reference
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "mhc"
OPERATORS = ["mhc_pre_fwd", "mhc_pre_bwd", "mhc_post_fwd", "mhc_post_bwd"]
TOKENS, STREAMS = 4096, 4
CALLS = ("pre_fwd", "pre_bwd", "post_fwd", "post_bwd")
#: What each operator moves per token: multiples of the size of x, and of the size of one stream.
MOVED = {"pre_fwd": (1, 1), "pre_bwd": (2, 1), "post_fwd": (2, 1), "post_bwd": (3, 2)}


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    call: str
    columns: int


def specs() -> Iterator[Spec]:
    for columns in (1280, 2560, 4096, 7168):
        for call in CALLS:
            yield Spec(f"{columns} columns", f"{call}_d{columns}", call, columns)


def calls(columns: int) -> dict[str, tuple[Callable[..., object], Callable[..., object], tuple[Tensor, ...]]]:
    """The operator, its reference and its arguments."""
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda")

    mixed, flat = STREAMS * STREAMS + 2 * STREAMS, STREAMS * columns
    x, dout = (random(1, TOKENS, STREAMS, columns).bfloat16() for _ in range(2))
    y = random(1, TOKENS, columns).bfloat16()
    phi, alpha, bias, gamma = random(mixed, flat) / flat**0.5, random(3), random(mixed), 1 + random(flat) / 4
    h_in, h_post, h_res, *saved = torch.ops.dsa.mhc_pre_fwd(x, phi, alpha, bias, gamma)
    upstream = (y, torch.randn_like(h_post), torch.randn_like(h_res))
    ops = torch.ops.dsa
    return {
        "pre_fwd": (ops.mhc_pre_fwd, reference.mhc_pre_fwd, (x, phi, alpha, bias, gamma)),
        "pre_bwd": (ops.mhc_pre_bwd, reference.mhc_pre_bwd, (*upstream, x, phi, alpha, gamma, h_post, *saved)),
        "post_fwd": (ops.mhc_post_fwd, reference.mhc_post_fwd, (x, h_in, h_post, h_res)),
        "post_bwd": (ops.mhc_post_bwd, reference.mhc_post_bwd, (dout, x, h_in, h_post, h_res)),
    }


def measure(spec: Spec, _times: dict[str, float]) -> Case:
    call, exact, args = calls(spec.columns)[spec.call]
    got, expected = call(*args), exact(*(t.double() for t in args))
    got, expected = (t if isinstance(t, tuple) else (t,) for t in (got, expected))
    checked = 3 if spec.call == "post_bwd" else len(got)
    error = max(similarity_error(a, b) for a, b in zip(got[:checked], expected[:checked], strict=True))
    assert error <= SIMILARITY, error
    del got, expected
    ms = measure_ms(lambda: call(*args))
    wide, narrow = MOVED[spec.call]
    moved = 2 * TOKENS * spec.columns * (STREAMS * wide + narrow)
    return make_case(
        spec.name,
        spec.group,
        {"B": 1, "S": TOKENS, "n": STREAMS, "D": spec.columns},
        ms,
        peer=peer_figure(OP, spec.call, str(spec.columns)),
        err={"similarity": error},
        tbps=round(moved / ms / 1e9, 3),
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 15) as axis:
        series = {"dsa_ext": [1e3 * c["ms"] for c in cases], "TileKernels": [1e3 * c["peer_value"] for c in cases]}
        grouped_bars(axis, [case["name"].replace("_d", "\n") for case in cases], series)
        axis.set(title="hyper-connections, 4096 tokens of 4 streams", ylabel="µs")
        axis.legend(loc="upper left")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, operators=OPERATORS)
