"""Times dsa::sparse_mla_fwd and plain PyTorch; writes its results file, with the peers' figures, and plot.

Every case is checked against the reference in float64 before it is timed. Ids are random and distinct, and all slots
are used (causal=False), except in the prefill cases, where a query lists ascending ids of the keys before it. Ids that
recur are ascending.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import dsa_ext
from bench.common import (
    PEERS,
    Case,
    arranged,
    causal_indices,
    drawing,
    grouped_bars,
    make_case,
    measure_all,
    measure_ms,
    parse_arguments,
    peer_figure,
    report,
    time_versus,
)
from dsa_ext import reference
from dsa_ext.testing.inputs import Inputs, make_inputs
from dsa_ext.testing.timing import host_us
from dsa_ext.testing.tolerances import forward_errors, similarity_error

OP = "sparse_mla_fwd"
D_V = 512
CHECKED_QUERIES = 32
SDPA_CHUNK = 256  # queries whose keys the PyTorch baseline gathers at a time: 0.6 GB


@dataclass(frozen=True)
class Spec:
    """One measurement, of the operator or of a baseline."""

    group: str
    name: str
    heads: int
    s_kv: int = 8192
    seq: int = 4096
    d_qk: int = 576
    topk: int = 2048
    prefill: bool = False
    ids: str = "random"
    peer: tuple[str, str] | None = None  # key and case of its figure in peers_h200.json
    compare_to: str | None = None  # a case to divide this one's time by
    baseline: Callable[[Inputs], Tensor] | None = None


def ours(inputs: Inputs, causal: bool) -> tuple[Tensor, Tensor]:
    return dsa_ext.sparse_mla(inputs.q, inputs.kv, inputs.indices, causal=causal, return_lse=True)


def pytorch_reference(inputs: Inputs) -> Tensor:
    return reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, causal=False)[0]


def gather_and_sdpa(inputs: Inputs) -> Tensor:
    """Sparse attention in plain PyTorch: gathers the keys of some queries, then calls SDPA with the heads as its rows.

    It needs no mask, since every slot is used in its case.
    """
    q, kv, indices = inputs.q[0], inputs.kv[0, :, 0], inputs.indices[0, :, 0]
    out = q.new_empty(*q.shape[:2], D_V)
    for begin in range(0, len(q), SDPA_CHUNK):
        run = slice(begin, begin + SDPA_CHUNK)
        keys = kv[indices[run]][:, None]
        out[run] = torch.nn.functional.scaled_dot_product_attention(q[run, None], keys, keys[..., :D_V])[:, 0]
    return out[None]


def specs() -> Iterator[Spec]:
    for heads in (128, 64):
        for s_kv in (8192, 32768, 131072):
            peer = (f"flashmla_h{heads}", str(s_kv))
            yield Spec("Throughput", f"h{heads}_skv{s_kv}", heads, s_kv, peer=peer)
        peer = ("flashmla_s512_skv32768_rested", f"h{heads}")
        yield Spec("Throughput", f"h{heads}_skv32768_s512", heads, 32768, seq=512, peer=peer)
    for heads in (128, 64):
        yield Spec("Other shapes", f"h{heads}_skv8192_d512", heads, d_qk=512)
        yield Spec("Other shapes", f"h{heads}_prefill_s8192", heads, seq=8192, prefill=True)
    for heads in (32, 16, 8):
        yield Spec("Few heads", f"h{heads}_skv8192", heads, compare_to="h64_skv8192")
    for heads in (128, 64, 32, 16, 8):
        name = f"h{heads}_skv32768_drift"
        yield Spec("Ids that recur, as those of a trained indexer", name, heads, 32768, ids="drift")
    for heads in (128, 64):
        for seq in (1, 2, 4, 16, 64):
            yield Spec("Few queries", f"h{heads}_skv32768_s{seq}", heads, 32768, seq=seq)
    for baseline in (gather_and_sdpa, pytorch_reference):
        name = f"{baseline.__name__}_h128_skv8192"
        yield Spec("Plain PyTorch", name, 128, compare_to="h128_skv8192", baseline=baseline)


def inputs_of(spec: Spec) -> Inputs:
    inputs = make_inputs(
        seq=spec.seq, s_kv=spec.s_kv, heads=spec.heads, topk=spec.topk, d_qk=spec.d_qk, device="cuda", seed=1
    )
    if spec.prefill:
        inputs.indices = causal_indices(spec.seq, spec.topk, torch.Generator("cuda").manual_seed(1))
    else:
        inputs.indices = arranged(inputs.indices, spec.s_kv, spec.ids)
    return inputs


def checked_errors(inputs: Inputs, causal: bool) -> dict[str, float]:
    """Errors of some queries spread over the whole call. Raises AssertionError if they exceed the tolerances."""
    out, lse = ours(inputs, causal)
    seq = inputs.q.shape[1]
    rows = torch.linspace(0, seq - 1, min(CHECKED_QUERIES, seq), device="cuda").long()
    indices = inputs.indices[:, rows]  # prefill rows list no key after their query: causal or not is the same
    errors = forward_errors(out[:, rows], lse[:, rows], inputs.q[:, rows], inputs.kv, indices, causal=False)
    return {"similarity": errors.similarity, **errors.check()}


def placements(inputs: Inputs) -> Iterator[Inputs]:
    """The inputs at three places in memory: inputs that nearly fill the L2 are cached better at some than at others."""
    yield inputs
    for megabytes in (37, 101):
        padding = torch.empty(megabytes * 2**20, dtype=torch.uint8, device="cuda")
        yield replace(inputs, q=inputs.q.clone(), kv=inputs.kv.clone())
        del padding


def measure(spec: Spec, times: dict[str, float]) -> Case:
    inputs = inputs_of(spec)
    if spec.baseline:
        errors = {"similarity": similarity_error(spec.baseline(inputs), ours(inputs, causal=False)[0])}
        ms = measure_ms(lambda: spec.baseline(inputs))
    else:
        errors = checked_errors(inputs, spec.prefill)
        ms = median(measure_ms(partial(ours, placed, spec.prefill)) for placed in placements(inputs))
    visible = int((inputs.indices >= 0).sum())
    tflops = 2 * spec.heads * visible * (spec.d_qk + D_V) / ms / 1e9
    args = {"B": 1, "S": spec.seq, "S_kv": spec.s_kv, "H": spec.heads, "G": 1, "K": spec.topk, "d_qk": spec.d_qk}
    return make_case(
        spec.name,
        spec.group,
        args | {"d_v": D_V, "causal": spec.prefill, "ids": "ascending" if spec.prefill else spec.ids},
        ms,
        tflops=tflops,
        peer=peer_figure(OP, *spec.peer) if spec.peer else None,
        err=errors,
        **time_versus(ms, spec.compare_to, times),
    )


def measure_host() -> list[Case]:
    """Host time: microseconds until the public function returns, with so little work that the GPU keeps up. Hosts
    differ: torch.add, an operator of PyTorch's own, is measured beside."""
    inputs = make_inputs(seq=1, s_kv=64, heads=16, topk=64, device="cuda")
    args = {"B": 1, "S": 1, "S_kv": 64, "H": 16, "G": 1, "K": 64, "d_qk": 576, "d_v": D_V, "causal": True}
    times = host_us(
        lambda: torch.add(inputs.indices, 1), lambda: dsa_ext.sparse_mla(inputs.q, inputs.kv, inputs.indices)
    )
    add, ms = (time / 1e3 for time in times)
    beside = "host_time_of_torch_add"
    return [
        make_case(beside, "Host", {"K": 64}, add),
        make_case("host_time_of_a_call_without_grad", "Host", args, ms, **time_versus(ms, beside, {beside: add})),
    ]


def plot(cases: list[Case], path: Path) -> None:
    by_name = {case["name"]: case for case in cases}
    with drawing(path, 15, 3) as axes:
        for axis, heads in zip(axes, (128, 64), strict=False):
            shown = [by_name[f"h{heads}_skv{s_kv}"] for s_kv in (8192, 32768, 131072)]
            series = {"dsa_ext": [case["tflops"] for case in shown], "FlashMLA": [case["peer_value"] for case in shown]}
            grouped_bars(axis, [f"S_kv = {case['args']['S_kv'] // 1024}K" for case in shown], series)
            axis.axhline(PEERS["ceilings"]["bf16_matmul_8192_tflops"], color="black", linestyle=":", linewidth=1)
            axis.text(-0.4, PEERS["ceilings"]["bf16_matmul_8192_tflops"] + 8, "dense bf16 matmul", fontsize=8)
            axis.set(title=f"{heads} heads, 4096 queries, 2048 keys each", ylabel="TFLOP/s", ylim=(0, 900))
        for heads in (128, 64):
            few = [case for case in cases if case["group"] == "Few queries" and case["args"]["H"] == heads]
            axes[2].plot(
                [c["args"]["S"] for c in few], [c["ms"] * 1e3 for c in few], marker="o", label=f"{heads} heads"
            )
        axes[2].set(title="few queries, S_kv = 32K", xlabel="queries", ylabel="µs", xscale="log", ylim=(0, None))
        axes[2].set_xticks([1, 2, 4, 16, 64], ["1", "2", "4", "16", "64"])
        axes[2].legend()


def main() -> None:
    args = parse_arguments(__doc__)
    with torch.inference_mode():
        cases = measure_all(OP, specs(), measure, args.only)
    report(OP, [*cases, *measure_host()], None if args.only else args.out, plot)


if __name__ == "__main__":
    main()
