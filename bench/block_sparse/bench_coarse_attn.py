"""Times dsa::coarse_attn_fwd and plain and compiled PyTorch; writes its results file and plot.

12 heads of 128 columns, bf16. The peer is scaled_dot_product_attention for the output, and a matmul, softmax and mean
for the scores, in bf16. TFLOP/s count 4 * 128 for each query and key, though the kernel computes 6 * 128. One head of
every case is checked against the reference in float64 before it is timed, and the peers' results against ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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

OP = "coarse_attn_fwd"
HEADS, COLUMNS, BLOCK = 12, 128, 64


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    queries: int
    keys: int


def specs() -> Iterator[Spec]:
    for tokens in (8192, 23296, 32768, 65536, 131072):
        yield Spec("All queries", f"n{tokens}", tokens, tokens // BLOCK)
    for keys in (364, 512, 1024, 2048):
        yield Spec("One block of queries", f"block_{keys}", BLOCK, keys)


def with_pytorch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = scaled_dot_product_attention(q, k, v)
    probs = (q @ k.mT * COLUMNS**-0.5).softmax(-1)
    return out, probs.unflatten(2, (-1, BLOCK)).mean(3, dtype=torch.float32)


@torch.inference_mode()
def measure(spec: Spec, _times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(1, HEADS, n, COLUMNS, generator=generator, device="cuda", dtype=torch.bfloat16)
        for n in (spec.queries, spec.keys, spec.keys)
    )
    out, _, scores = torch.ops.dsa.coarse_attn_fwd(q, k, v)
    expected, _, expected_scores = reference.coarse_attn_fwd(*(t[:, :1].double() for t in (q, k, v)))
    error = similarity_error(out[:, :1], expected)
    assert error <= SIMILARITY, error
    torch.testing.assert_close(scores[:, :1].double(), expected_scores, rtol=1e-4, atol=1e-8)

    peers = {name: partial(call, q, k, v) for name, call in pytorch_peers("PyTorch", with_pytorch).items()}
    for peer in peers.values():
        errors = [similarity_error(a, b) for a, b in zip(peer(), (out, scores), strict=True)]
        assert max(errors) <= PEER_SIMILARITY, errors
    ms = measure_ms(lambda: torch.ops.dsa.coarse_attn_fwd(q, k, v))
    (peer_name, peer_ms), peers_ms = measure_peers(peers)
    flop = 4 * HEADS * spec.queries * spec.keys * COLUMNS
    return make_case(
        spec.name,
        spec.group,
        {"B": 1, "H": HEADS, "Nq": spec.queries, "Nkv": spec.keys, "D": COLUMNS},
        ms,
        tflops=flop / ms / 1e9,
        peer=(peer_name, round(flop / peer_ms / 1e9, 2)),
        err={"similarity": error},
        peers_ms=peers_ms,
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 11) as axis:
        series = {"dsa_ext": [c["tflops"] for c in cases], "PyTorch": [c["peer_value"] for c in cases]}
        grouped_bars(axis, [case["name"].replace("_", "\n", 1) for case in cases], series)
        axis.set(title="coarse_attn_fwd: tokens, and pooled keys of one block of queries", ylabel="TFLOP/s")
        axis.legend(loc="upper right")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
