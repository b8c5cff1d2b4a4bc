"""Times dsa::attn_dist; writes its results file, with the peers' figures, and plot.

Every case is checked against the reference in float64 before it is timed. Ids are random and distinct, all slots
are used (causal=False), and lse is that of sparse_mla_fwd.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dsa_ext
from bench.common import (
    Case,
    arranged,
    drawing,
    grouped_bars,
    make_case,
    measure_ms,
    peer_figure,
    run,
    time_versus,
)
from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.tolerances import check_dist

OP = "attn_dist"
SEQ, TOPK, D_QK = 4096, 2048, 576
CHECKED_QUERIES = 32


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    heads: int
    s_kv: int
    ids: str = "random"
    normalize: bool = False
    has_peer: bool = False
    compare_to: str | None = None  # a case to divide this one's time by


def specs() -> Iterator[Spec]:
    for heads in (128, 64):
        for s_kv in (8192, 32768, 131072):
            yield Spec("Random ids", f"h{heads}_skv{s_kv}", heads, s_kv, has_peer=True)
    for heads in (128, 64):
        for s_kv in (8192, 131072):
            name = f"h{heads}_skv{s_kv}"
            yield Spec("Ascending ids", f"{name}_ascending", heads, s_kv, ids="ascending", compare_to=name)
    for heads in (128, 64):
        name = f"h{heads}_skv8192"
        yield Spec("Normalized", f"{name}_normalize", heads, 8192, normalize=True, compare_to=name)
    for heads in (32, 16, 8):
        yield Spec("Few heads", f"h{heads}_skv8192", heads, 8192, compare_to="h64_skv8192")
    for heads in (128, 64, 16, 8):
        name = f"h{heads}_skv32768_drift"
        yield Spec("Ids that recur, as those of a trained indexer", name, heads, 32768, ids="drift")


@torch.inference_mode()
def measure(spec: Spec, times: dict[str, float]) -> Case:
    inputs = make_inputs(seq=SEQ, s_kv=spec.s_kv, heads=spec.heads, topk=TOPK, d_qk=D_QK, device="cuda", seed=1)
    q, kv = inputs.q, inputs.kv
    indices = arranged(inputs.indices, spec.s_kv, spec.ids)
    options: dict[str, Any] = {"causal": False}
    _, lse = dsa_ext.sparse_mla(q, kv, indices, return_lse=True, **options)
    options["normalize"] = spec.normalize
    dist = dsa_ext.attn_dist(q, kv, indices, lse, **options)
    rows = torch.linspace(0, SEQ - 1, CHECKED_QUERIES, device="cuda").long()
    error = check_dist(dist[:, rows], q[:, rows], kv, indices[:, rows], lse[:, rows], **options)
    ms = measure_ms(lambda: dsa_ext.attn_dist(q, kv, indices, lse, **options))
    flop = 2 * SEQ * TOPK * spec.heads * D_QK
    peer = peer_figure(OP, f"cudnn_frontend_h{spec.heads}_random", str(spec.s_kv), flop) if spec.has_peer else None
    return make_case(
        spec.name,
        spec.group,
        {
            "B": 1,
            "S": SEQ,
            "S_kv": spec.s_kv,
            "H": spec.heads,
            "G": 1,
            "K": TOPK,
            "d_qk": D_QK,
            "ids": spec.ids,
            "normalize": spec.normalize,
        },
        ms,
        tflops=flop / ms / 1e9,
        peer=peer,
        err={"similarity": error},
        **time_versus(ms, spec.compare_to, times),
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 10, 2) as axes:
        for axis, heads in zip(axes, (128, 64), strict=True):
            shown = [case for case in cases if case["group"] == "Random ids" and case["args"]["H"] == heads]
            series = {
                "dsa_ext": [case["tflops"] for case in shown],
                "cuDNN frontend": [case["peer_value"] for case in shown],
            }
            grouped_bars(axis, [f"S_kv = {case['args']['S_kv'] // 1024}K" for case in shown], series)
            axis.set(title=f"{heads} heads, 4096 queries, 2048 keys each", ylabel="TFLOP/s")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
