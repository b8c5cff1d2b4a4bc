"""indexer_topk on a GPU: the composition of indexer_logits and topk_select, bit for bit. Views, streams and graphs of
both operators are in test_indexer_logits_gpu.py."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from indexer_cases import arguments, errors_of
from indexer_gpu_inputs import (
    DEVICE,
    both_dtypes,
    check_a_mix_of_devices,
    check_rows_that_no_kernel_takes,
    composed,
    every_kernel,
    make_gpu,
    message,
    on_device,
    poisoned,
    queries,
    selected,
    with_bounds,
)

from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import check_selected

pytestmark = pytest.mark.gpu

#: Bytes that indexer_topk may allocate on top of its results.
WORKSPACE_LIMIT = 256 * 2**20
# S, S_kv, topk and the bounds.
SELECTIONS = [
    (1, 1, 1, "whole"),
    (5, 100, 2048, "causal"),
    (64, 1000, 7, "edges"),
    (65, 4099, 1, "packed"),
    (130, 9001, 2048, "causal"),
    (257, 5001, 4096, "random"),
    (3, 30001, 2048, "whole"),
]


@every_kernel
def test_selection(dtype: torch.dtype, heads: int, dim: int) -> None:
    for seq, s_kv, topk, kind in SELECTIONS:
        inputs = poisoned(with_bounds(make_gpu(seq, s_kv, heads, dim, dtype), kind))
        try:
            check_selected(selected(inputs, topk), composed(inputs, topk))
        except Exception as error:
            raise AssertionError(f"S={seq} S_kv={s_kv} topk={topk} {kind}: {error}") from error


@both_dtypes
@pytest.mark.parametrize("sizes", [(260, 2**17), (33, 2**17 + 5), (5, 2**20), (1, 2**20 - 1)], ids=str)
def test_selection_among_many_keys(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make_gpu(*sizes, dtype=dtype)
    for kind, topk in (("causal", 2048), ("random", 4096), ("packed", 1)):
        inputs = with_bounds(inputs, kind)
        check_selected(selected(inputs, topk), composed(inputs, topk))


@both_dtypes
@pytest.mark.parametrize("s_kv", [5, 3001, 40003, 2**17])
def test_few_queries_select_what_they_select_among_others(s_kv: int, dtype: torch.dtype) -> None:
    for heads, kind, topk in ((64, "causal", 2048), (32, "random", 2048), (8, "packed", 3), (16, "edges", 4096)):
        inputs = with_bounds(make_gpu(64, s_kv, heads, dtype=dtype), kind)
        indices, values = composed(inputs, topk)
        for seq in (1, 2, 3, 4, 5, 6, 7, 16, 32):
            run = slice(64 - seq, 64)
            check_selected(selected(queries(inputs, run), topk), (indices[run], values[run]))


@pytest.mark.gpu_memory(4)
@pytest.mark.parametrize("topk", [50, 2047])
def test_selection_in_runs_whose_results_begin_anywhere(topk: int) -> None:
    """So many keys that runs are shorter than 64 queries: a run's first result is not 16-byte aligned."""
    inputs = make_gpu(130, 1_100_000, heads=8, dim=64, dtype=torch.bfloat16)
    check_selected(selected(inputs, topk), composed(inputs, topk))


@pytest.mark.parametrize("order", ["equal", "zeros", "repeated", "ascending", "descending"])
def test_selection_among_ties_and_in_order(order: str) -> None:
    inputs = with_bounds(make_gpu(140, 20000), "whole")
    assert inputs.k_scale is not None
    one_key, one = inputs.k[:1].expand_as(inputs.k).contiguous(), torch.ones_like(inputs.k_scale)
    k, k_scale = {
        "equal": (one_key, one),
        "zeros": (torch.zeros_like(inputs.k), one),
        "repeated": (inputs.k[:100].repeat(200, 1), one),
        "ascending": (one_key, torch.linspace(1, 2, len(one), device=DEVICE)),
        "descending": (one_key, torch.linspace(2, 1, len(one), device=DEVICE)),
    }[order]
    inputs = replace(inputs, k=k, k_scale=k_scale, weights=inputs.weights.abs())
    for topk in (1, 2048, 4096):
        check_selected(selected(inputs, topk), composed(inputs, topk))


@pytest.mark.parametrize("sizes", [(4096, 2**17), (64, 2**20)], ids=str)
def test_memory_beside_the_results(sizes: tuple[int, int]) -> None:
    inputs = make_gpu(*sizes)
    assert workspace_bytes(lambda: selected(inputs, 2048)) <= WORKSPACE_LIMIT


@errors_of("indexer_topk")
def test_errors_are_those_of_the_cpu(op: str, changes: dict[str, Any], text: str) -> None:
    assert message(op, on_device(arguments(op, **changes))) == f"dsa::{op}: {text}"


@pytest.mark.parametrize("op", ["indexer_topk"])
def test_a_mix_of_devices(op: str) -> None:
    check_a_mix_of_devices(op)


@pytest.mark.parametrize("op", ["indexer_topk"])
def test_rows_that_no_kernel_takes(op: str) -> None:
    check_rows_that_no_kernel_takes(op, "q", "k", "weights")
