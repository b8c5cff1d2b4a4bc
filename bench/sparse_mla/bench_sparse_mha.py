"""Times dsa::sparse_mha_fwd and sparse_mha_bwd, masks included; writes their results and plot.

The peer is torch's scaled_dot_product_attention with all keys up to each query's own and no mask, measured beside.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.common import Case, causal_indices, drawing, grouped_bars, make_case, measure_ms, run, time_versus
from dsa_ext import reference
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "sparse_mha"
OPERATORS = ["sparse_mha_fwd", "sparse_mha_bwd"]
FWD, BWD = torch.ops.dsa.sparse_mha_fwd, torch.ops.dsa.sparse_mha_bwd
#: Products of 192 and of 128 columns for each pair of a query and a key.
COLUMNS = {"forward": 192 + 128, "backward": 3 * 192 + 2 * 128}
LENGTHS = (2048, 4096, 6144, 8192)


@dataclass(frozen=True)
class Spec:
    group: str
    name: str
    heads: int
    seq: int
    topk: int = 2048
    backward: bool = False
    compare_to: str | None = None
    is_absorbed: bool = False


def specs() -> Iterator[Spec]:
    for backward in (False, True):
        way = "backward" if backward else "forward"
        for heads, lengths in ((128, LENGTHS), (64, (6144,)), (16, (6144,))):
            for seq in lengths:
                yield Spec(way.capitalize(), f"{way}_h{heads}_s{seq}", heads, seq, backward=backward)
        for seq in LENGTHS[1:]:
            name = f"{way}_h128_s{seq}"
            group = "The same lists in the absorbed form (sparse_mla)"
            yield Spec(group, f"{name}_absorbed", 128, seq, backward=backward, compare_to=name, is_absorbed=True)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def make_inputs(spec: Spec) -> tuple[dict[str, Any], Tensor]:
    k, v = normal(1, spec.seq, spec.heads, 256, seed=1).split(128, dim=-1)
    q, k_rope = normal(1, spec.seq, spec.heads, 192, seed=0), normal(1, spec.seq, 64, seed=2)
    indices = causal_indices(spec.seq, spec.topk, torch.Generator("cuda").manual_seed(1))[:, :, 0]
    dout = normal(1, spec.seq, spec.heads, 128, seed=3)
    return {"q": q, "k": k, "k_rope": k_rope, "v": v, "indices": indices}, dout


def absorbed_ms(spec: Spec) -> float:
    q, kv = normal(1, spec.seq, spec.heads, 576, seed=0), normal(1, spec.seq, 1, 576, seed=1)
    ids = causal_indices(spec.seq, spec.topk, torch.Generator("cuda").manual_seed(1))
    out, lse = torch.ops.dsa.sparse_mla_fwd(q, kv, ids)
    if not spec.backward:
        return measure_ms(lambda: torch.ops.dsa.sparse_mla_fwd(q, kv, ids))
    dout = torch.randn_like(out)
    return measure_ms(lambda: torch.ops.dsa.sparse_mla_bwd(dout, q, kv, out, lse, ids))


def peer_ms(inputs: dict[str, Any], dout: Tensor, backward: bool) -> float:
    heads = inputs["q"].shape[2]
    k = torch.cat([inputs["k"], inputs["k_rope"][:, :, None].expand(-1, -1, heads, -1)], -1)
    leaves = [t.transpose(1, 2).detach().requires_grad_(backward) for t in (inputs["q"], k, inputs["v"])]

    def forward() -> Tensor:
        return scaled_dot_product_attention(*leaves, is_causal=True)

    if not backward:
        return measure_ms(forward)
    out, upstream = forward(), dout.transpose(1, 2)
    return measure_ms(lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True))


def measure(spec: Spec, times: dict[str, float]) -> Case:
    args = {"B": 1, "S": spec.seq, "S_kv": spec.seq, "H": spec.heads, "K": spec.topk}
    if spec.is_absorbed:
        ms = absorbed_ms(spec)
        return make_case(spec.name, spec.group, args, ms, **time_versus(ms, spec.compare_to, times))
    inputs, dout = make_inputs(spec)
    results = out, lse = FWD(**inputs)
    expected = reference.sparse_mha_fwd(**inputs)
    if spec.backward:
        saved = {**inputs, "dout": dout, "out": out, "lse": lse}
        results, expected = BWD(**saved), reference.sparse_mha_bwd(**saved)
    error = max(similarity_error(a, b) for a, b in zip(results, expected, strict=True))
    if not error <= SIMILARITY:
        raise AssertionError(f"{OP} is wrong: {error}")
    del expected
    ms = measure_ms((lambda: BWD(**saved)) if spec.backward else (lambda: FWD(**inputs)))
    flop = 2 * spec.heads * (spec.seq * (spec.seq + 1) // 2) * COLUMNS["backward" if spec.backward else "forward"]
    peer = "cuDNN, no mask", flop / peer_ms(inputs, dout, spec.backward) / 1e9
    error_of = {"similarity": error}
    return make_case(spec.name, spec.group, args, ms, tflops=flop / ms / 1e9, peer=peer, err=error_of)


def plot(cases: list[Case], path: Path) -> None:
    by_name = {case["name"]: case for case in cases}
    with drawing(path, 13, 2) as axes:
        for axis, way in zip(axes, COLUMNS, strict=True):
            shown = [by_name[f"{way}_h128_s{seq}"] for seq in LENGTHS]
            absorbed = [by_name.get(f"{way}_h128_s{seq}_absorbed", {}).get("ms", 0) for seq in LENGTHS]
            series = {"sparse_mha": [case["ms"] for case in shown], "sparse_mla": absorbed}
            grouped_bars(axis, [f"S = {seq}" for seq in LENGTHS], series)
            axis.set_title(f"{way}, H=128, topk=2048")
            axis.set_ylabel("ms")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, operators=OPERATORS)
