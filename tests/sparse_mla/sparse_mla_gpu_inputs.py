"""Inputs of sparse MLA on a GPU, and grids of cases."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, Inputs, make_inputs, poison_unselected, spoil_indices

DEVICE = "cuda"
Case = dict[str, Any]


def make_gpu(**sizes: Any) -> Inputs:
    return make_inputs(device=DEVICE, **sizes)


def make_grid(axes: dict[str, list[Any]], samples: int) -> list[Case]:
    """A base case, the base case with each value of each axis, and a seeded sample of the whole product."""
    base = {name: values[0] for name, values in axes.items()}
    base |= {"groups_and_heads": (1, 128), "topk": 128, "seq": 33, "s_kv": 1000}
    cases = [base | {name: value} for name, values in axes.items() for value in values]
    generator = random.Random(0)
    cases += [{name: generator.choice(values) for name, values in axes.items()} for _ in range(samples)]
    return list({repr(case): case for case in cases}.values())


def run_cases(cases: Iterable[Case], run: Callable[[Case], None]) -> None:
    """An error names its case."""
    for case in cases:
        try:
            run(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def make_bounds(s_kv: int, batch: int, seq: int) -> dict[str, Tensor]:
    """starts and ends: all keys, a part, one key, none, and bounds beyond all keys, transposed in memory."""
    starts = torch.tensor([-5, s_kv // 3, s_kv // 2, 9, INT32_MIN, INT32_MAX, s_kv - 1], device=DEVICE)
    ends = torch.tensor([s_kv + 5, s_kv // 2, s_kv // 2 + 1, 9, INT32_MAX, INT32_MIN, s_kv], device=DEVICE)
    repeated = (t.int().repeat(batch * seq // 7 + 1)[: batch * seq].view(seq, batch).T for t in (starts, ends))
    return dict(zip(("starts", "ends"), repeated, strict=True))


def make_case(case: Case, seed: int = 0) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and options of a case of a grid, without a sink. Keys that no query sees are NaN and infinity."""
    groups, heads = case["groups_and_heads"]
    batch, seq, s_kv, topk = case["batch"], case["seq"], case["s_kv"], case["topk"]
    inputs = make_gpu(
        batch=batch, seq=seq, s_kv=s_kv, heads=heads, groups=groups, topk=topk, d_qk=case["d_qk"], seed=seed
    )
    causal, q_start, positions_per_key = case["position"]
    options: dict[str, Any] = {"causal": causal, "q_start": q_start, "positions_per_key": positions_per_key}
    options["sm_scale"] = case["sm_scale"]
    if case["lengths"]:
        spread = torch.tensor([topk, 0, -3, topk + 7, 1, topk // 2, INT32_MAX, INT32_MIN], device=DEVICE)
        options["topk_length"] = spread.repeat(seq * batch // 8 + 1)[: batch * seq].view(batch, seq).int()
    if case["bounds"]:
        options |= {"q_start": 0, "positions_per_key": 1, **make_bounds(s_kv, batch, seq)}
    indices = spoil_indices(inputs.indices, s_kv) if case["spoiled"] else inputs.indices
    slots = ("causal", "q_start", "positions_per_key", "topk_length", "starts", "ends")
    visible = reference.sparse_mla.visible_slots(indices, s_kv, *(options.get(name) for name in slots))
    return replace(inputs, kv=poison_unselected(inputs.kv, indices, visible), indices=indices), options
