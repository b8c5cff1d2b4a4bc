"""Times dsa::sparse_mla_bwd (rows, sums of dkv and their rounding); writes its results and plot.

The peers' figures are those of peers_h200.json.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.common import (
    Case,
    arranged,
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
from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "sparse_mla_bwd"
D_V = 512
FWD, BWD = torch.ops.dsa.sparse_mla_fwd, torch.ops.dsa.sparse_mla_bwd


@dataclass(frozen=True)
class Spec:
    group: str
    name: str
    heads: int
    s_kv: int = 8192
    seq: int = 4096
    d_qk: int = 576
    topk: int = 2048
    ids: str = "ascending"
    prefill: bool = False
    deterministic: bool = False
    has_peer: bool = False
    compare_to: str | None = None  # a case to divide this one's time by
    is_reference: bool = False


def specs() -> Iterator[Spec]:
    sizes = [(heads, s_kv) for heads in (128, 64) for s_kv in (4096, 8192, 32768, 131072)]
    for heads, s_kv in sizes:
        yield Spec("Ids ascending, as a selector returns them", f"h{heads}_skv{s_kv}", heads, s_kv, has_peer=True)
    for heads, s_kv in sizes:
        yield Spec("Ids in random order", f"h{heads}_skv{s_kv}_random", heads, s_kv, ids="random", has_peer=True)
    for heads, s_kv in sizes[1:4] + sizes[5:]:
        name = f"h{heads}_skv{s_kv}"
        yield Spec("Deterministic", f"{name}_deterministic", heads, s_kv, deterministic=True, compare_to=name)
    for heads in (128, 64):
        yield Spec("Other shapes", f"h{heads}_skv8192_d512", heads, d_qk=512)
        yield Spec("Other shapes", f"h{heads}_prefill_s8192", heads, seq=8192, prefill=True)
        yield Spec("Other shapes", f"h{heads}_skv32768_s512", heads, 32768, seq=512)
    for heads in (128, 64, 32, 16, 8):
        name = f"h{heads}_skv32768_drift"
        yield Spec("Ids that recur, as those of a trained indexer", name, heads, 32768, ids="drift")
    for heads in (32, 16, 8):
        for ids in ("ascending", "random"):
            name = f"h{heads}_skv32768" + "_random" * (ids == "random")
            yield Spec("Few heads", name, heads, 32768, ids=ids, compare_to="h64_skv32768" + name.partition("32768")[2])
    yield Spec("Other shapes", "h16_skv8192", 16, has_peer=True, compare_to="h64_skv8192")
    yield Spec("Plain PyTorch", "pytorch_reference_h64_skv8192", 64, compare_to="h64_skv8192", is_reference=True)


def errors_of(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> dict[str, float]:
    errors = {name: similarity_error(a, b) for name, a, b in zip(("dq", "dkv"), got, expected, strict=False)}
    if not max(errors.values()) <= SIMILARITY:
        raise AssertionError(f"{OP} is wrong: {errors}")
    return {"similarity": max(errors.values()), **errors}


def measure(spec: Spec, times: dict[str, float]) -> Case:
    inputs = make_inputs(1, spec.seq, spec.s_kv, spec.heads, 1, spec.topk, spec.d_qk, device="cuda", seed=1)
    indices = inputs.indices
    if spec.prefill:
        indices = causal_indices(spec.seq, spec.topk, torch.Generator("cuda").manual_seed(1))
    else:
        indices = arranged(indices, spec.s_kv, spec.ids)
    causal = {"causal": spec.prefill}
    out, lse = FWD(inputs.q, inputs.kv, indices, **causal)
    dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").to(out.dtype)
    tensors = (dout, inputs.q, inputs.kv, out, lse, indices)

    def ours() -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = BWD(*tensors, **causal, deterministic=spec.deterministic)
        return result

    def in_pytorch() -> tuple[Tensor, ...]:
        return reference.sparse_mla_bwd(*tensors, **causal)

    errors = errors_of(ours(), in_pytorch())
    ms = measure_ms(in_pytorch if spec.is_reference else ours)
    visible = int((indices >= 0).sum())
    flop = 2 * spec.heads * visible * (3 * spec.d_qk + 2 * D_V)
    peer = None
    if spec.has_peer:
        peer = peer_figure(OP, f"cudnn_frontend_h{spec.heads}_{spec.ids}", str(spec.s_kv), flop)
    args = {"B": 1, "S": spec.seq, "S_kv": spec.s_kv, "H": spec.heads, "G": 1, "K": spec.topk, "d_qk": spec.d_qk}
    return make_case(
        spec.name,
        spec.group,
        args | {"d_v": D_V, "causal": spec.prefill, "ids": spec.ids, "deterministic": spec.deterministic},
        ms,
        tflops=flop / ms / 1e9,
        peer=peer,
        err=errors,
        **time_versus(ms, spec.compare_to, times),
    )


def plot(cases: list[Case], path: Path) -> None:
    by_name = {case["name"]: case for case in cases}
    sizes = (4096, 8192, 32768, 131072)
    with drawing(path, 13, 2) as axes:
        for axis, heads in zip(axes, (128, 64), strict=True):
            shown = [by_name[f"h{heads}_skv{s_kv}"] for s_kv in sizes]
            deterministic = [by_name.get(f"h{heads}_skv{s_kv}_deterministic") for s_kv in sizes]
            series = {
                "dsa_ext": [case["tflops"] for case in shown],
                "cuDNN frontend": [case["peer_value"] for case in shown],
                "dsa_ext, deterministic": [case["tflops"] if case else 0 for case in deterministic],
            }
            grouped_bars(axis, [f"S_kv = {s_kv // 1024}K" for s_kv in sizes], series)
            axis.set_title(f"sparse_mla_bwd, H={heads}, S=4096, topk=2048, ids ascending")
            axis.set_ylabel("TFLOP/s")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
