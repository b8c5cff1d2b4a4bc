"""Times dsa::indexer_scores, its gradient, and the indexer's training on all keys; writes its results file and plot.

Every case is checked against the reference in float64 before it is timed. "Training" is a sequence of 4096 tokens: each
query lists up to 2048 random keys of those before it. Elsewhere ids are random, distinct and ascending, as topk_select
returns them, unless a name says otherwise. Random lists have fewer keys in common than those of neighboring tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import dsa_ext
from bench.common import (
    COLOURS,
    Case,
    causal_indices,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    peer_figure,
    run,
    time_versus,
)
from dsa_ext import reference
from dsa_ext.testing.inputs import make_indexer_inputs, make_inputs
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import FP32_SIMILARITY, SIMILARITY, similarity_error

OP = "indexer_scores"
SEQ, TOPK, DIM, DENSE_SEQ = 4096, 2048, 128, 8192
#: The loss over all keys is composed of the last four.
OPERATORS = [
    "indexer_scores",
    "indexer_scores_bwd",
    "indexer_logits_bwd",
    "indexer_logits",
    "attn_dist",
    "indexer_loss",
]
PEERS = {"Scores": "cudnn_frontend_scores", "Gradient": "cudnn_frontend_gradient"}


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    heads: int
    s_kv: int
    ids: str = "ascending"  # training, ascending or random; all: no lists
    deterministic: bool = False
    has_peer: bool = False
    compare_to: str | None = None  # a case to divide this one's time by


def specs() -> Iterator[Spec]:
    for heads in (64, 32, 8):
        yield Spec("Scores", f"scores_h{heads}_training", heads, SEQ, "training", has_peer=heads == 64)
    for heads in (64, 32):
        yield Spec("Gradient", f"h{heads}_training", heads, SEQ, "training", has_peer=True)
    for heads in (64, 32):
        for s_kv in (8192, 32768, 131072):
            yield Spec("Gradient", f"h{heads}_skv{s_kv}", heads, s_kv, has_peer=s_kv == 8192)
        yield Spec("Gradient", f"h{heads}_skv8192_random", heads, 8192, "random", has_peer=True)
    for heads in (16, 8):
        yield Spec("Few heads", f"h{heads}_training", heads, SEQ, "training")
    for name, heads, s_kv, ids in (
        ("h64_training", 64, SEQ, "training"),
        ("h64_skv8192", 64, 8192, "ascending"),
        ("h64_skv131072", 64, 131072, "ascending"),
    ):
        yield Spec("Deterministic", f"{name}_deterministic", heads, s_kv, ids, True, compare_to=name)
    for heads in (64, 32):
        yield Spec("All keys, gradient", f"h{heads}_all_keys", heads, DENSE_SEQ, "all")
    yield Spec("All keys, loss and gradient", "h64_warmup_step", 64, DENSE_SEQ, "all")


def lists(spec: Spec) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    if spec.ids == "training":
        return causal_indices(SEQ, TOPK, generator)[0, :, 0]
    rows = [
        torch.rand(512, spec.s_kv, generator=generator, device="cuda").topk(TOPK).indices for _ in range(SEQ // 512)
    ]
    ids = torch.cat(rows).int()
    return ids if spec.ids == "random" else ids.sort(-1).values


@torch.inference_mode()
def measure(spec: Spec, times: dict[str, float]) -> Case:
    if spec.ids == "all":
        return measure_all_keys(spec)
    inputs = make_indexer_inputs(SEQ, spec.s_kv, spec.heads, DIM, dtype=torch.bfloat16, device="cuda")
    leaves = (inputs.q, inputs.k, inputs.weights)
    ids = lists(spec)
    generator = torch.Generator("cuda").manual_seed(2)
    dscores = torch.randn(SEQ, TOPK, generator=generator, device="cuda")
    args = (inputs.q.double(), inputs.k.double(), inputs.weights.double(), ids)
    if spec.group == "Scores":
        scores, expected = torch.ops.dsa.indexer_scores(*leaves, ids), reference.indexer_scores(*args)
        named = expected > -torch.inf
        error, limit = similarity_error(scores[named], expected[named]), FP32_SIMILARITY
        ms = measure_ms(lambda: torch.ops.dsa.indexer_scores(*leaves, ids))
    else:
        got = torch.ops.dsa.indexer_scores_bwd(dscores, *leaves, ids, spec.deterministic)
        gradients = reference.indexer_scores_bwd(dscores.double(), *args)
        error, limit = max(map(similarity_error, got, gradients)), SIMILARITY
        ms = measure_ms(lambda: torch.ops.dsa.indexer_scores_bwd(dscores, *leaves, ids, spec.deterministic))
    assert error <= limit, (spec.name, error)
    return make_case(
        spec.name,
        spec.group,
        {"S": SEQ, "S_kv": spec.s_kv, "Hi": spec.heads, "Di": DIM, "K": TOPK, "ids": spec.ids},
        ms,
        peer=peer_figure(OP, PEERS[spec.group], f"h{spec.heads}") if spec.has_peer else None,
        err={"similarity": error},
        **time_versus(ms, spec.compare_to, times),
    )


def measure_all_keys(spec: Spec) -> Case:
    """One causal sequence: the gradient of indexer_logits, or a step of the dense warm-up with 128 heads."""
    index = make_indexer_inputs(DENSE_SEQ, DENSE_SEQ, spec.heads, DIM, dtype=torch.bfloat16, device="cuda")
    leaves = (index.q, index.k, index.weights)
    args: dict[str, object] = {"S": DENSE_SEQ, "S_kv": DENSE_SEQ, "Hi": spec.heads, "Di": DIM}
    if spec.group == "All keys, loss and gradient":
        main = make_inputs(seq=DENSE_SEQ, s_kv=DENSE_SEQ, heads=128, topk=64, d_qk=576, device="cuda", seed=1)
        ids = torch.arange(DENSE_SEQ, device="cuda", dtype=torch.int32).expand(1, DENSE_SEQ, 1, DENSE_SEQ)
        _, lse = dsa_ext.sparse_mla(main.q, main.kv, ids, return_lse=True)
        teacher = (main.q[0], main.kv[0, :, 0], lse[0])

        def step() -> tuple[Tensor, ...]:
            results: tuple[Tensor, ...] = torch.ops.dsa.indexer_dense_loss(*leaves, *teacher, gradients=True)
            return results

        few = slice(0, 512)
        loss = dsa_ext.indexer_dense_loss(*(t[few] for t in (*leaves, *teacher)))
        expected = torch.ops.dsa.indexer_dense_loss(*(t[few].double().cpu() for t in (*leaves, *teacher)))[0] / 512
        torch.testing.assert_close(loss.double().cpu(), expected, rtol=1e-3, atol=1e-3)
        extra = workspace_bytes(step)
        return make_case(spec.name, spec.group, args | {"H": 128}, measure_ms(step), extra_mb=round(extra / 1e6, 1))
    dlogits = torch.randn(DENSE_SEQ, DENSE_SEQ, device="cuda")
    got = torch.ops.dsa.indexer_logits_bwd(dlogits, *leaves, index.ks, index.ke)
    wide = (t.double() for t in (dlogits, *leaves))
    error = max(map(similarity_error, got, reference.indexer_logits_bwd(*wide, index.ks, index.ke)))
    assert error <= SIMILARITY, (spec.name, error)
    ms = measure_ms(lambda: torch.ops.dsa.indexer_logits_bwd(dlogits, *leaves, index.ks, index.ke))
    pairs = DENSE_SEQ * (DENSE_SEQ + 1) // 2
    return make_case(
        spec.name, spec.group, args, ms, tflops=6 * pairs * spec.heads * DIM / ms / 1e9, err={"similarity": error}
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 11, 2) as axes:
        for axis, heads in zip(axes, (64, 32), strict=True):
            shown = [case for case in cases if case["group"] == "Gradient" and case["args"]["Hi"] == heads]
            labels = [case["name"].removeprefix(f"h{heads}_").replace("_", "\n") for case in shown]
            grouped_bars(axis, labels, {"dsa_ext": [case["ms"] for case in shown]}, number="{:.2f}")
            peer, ms = peer_figure(OP, PEERS["Gradient"], f"h{heads}")
            axis.axhline(ms, color=COLOURS[1], label=peer)
            axis.legend(loc="lower right", fontsize=8)
            axis.set(title=f"Gradient of indexer_scores, {heads} heads, 4096 queries", ylabel="ms")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, operators=OPERATORS)
