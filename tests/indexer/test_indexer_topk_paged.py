"""indexer_topk_paged without a GPU: it is the composition of indexer_logits_paged and topk_select; the operator."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from callers import assert_error, cpu, fake
from indexer_small import int32
from paged_cases import (
    DTYPES,
    FP8,
    check_a_mix_of_devices,
    check_flop_formula,
    errors_of,
    make_small,
    opcheck,
    paged_arguments,
)

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.paged_inputs import gathered, poisoned


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 5, 16, 30])
@pytest.mark.parametrize("per_query", [False, True])
@pytest.mark.parametrize("return_slots", [False, True])
def test_it_is_the_composition(dtype: torch.dtype, topk: int, per_query: bool, return_slots: bool) -> None:
    inputs = make_small(dtype)
    lengths = torch.tensor([[14, 15], [0, 1], [-1, 0]], dtype=torch.int32)
    inputs = poisoned(replace(inputs, context_lens=lengths if per_query else lengths[:, 1].contiguous()))
    table = {"page_table": inputs.block_table, "page_size": 4} if return_slots else {}
    logits = dsa_ext.indexer_logits_paged(**vars(inputs))
    ends = lengths.clamp(min=0).flatten()
    expected = dsa_ext.topk_select(logits, torch.zeros_like(ends), ends, topk, **table)
    for got in (dsa_ext.indexer_topk_paged, reference.indexer_topk_paged):
        results = got(**vars(inputs), topk=topk, return_slots=return_slots)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_the_selection_is_that_of_training() -> None:
    """Integers, whose products any order of additions sums exactly."""
    inputs = make_small(torch.float64)
    inputs = replace(
        inputs, q=inputs.q.mul(4).round(), k_cache=inputs.k_cache.mul(4).round(), weights=inputs.weights.sign()
    )
    ids, values = dsa_ext.indexer_topk_paged(**vars(inputs), topk=6)
    slots, _ = dsa_ext.indexer_topk_paged(**vars(inputs), topk=6, return_slots=True)
    for b in range(3):
        k, _ = gathered(inputs, b)
        rows = slice(2 * b, 2 * b + 2)
        expected = dsa_ext.indexer_topk(inputs.q[b], k, inputs.weights[rows], int32(0, 0), int32(15, 16), 6)
        assert torch.equal(ids[rows], expected[0])
        assert torch.equal(values[rows], expected[1])
        assert torch.equal(inputs.k_cache.flatten(0, 1)[slots[rows].long()], k[ids[rows].long()])


@pytest.mark.parametrize("call", [cpu, fake])
@errors_of("indexer_topk_paged")
def test_errors(call: Callable[..., Any], op: str, changes: dict[str, Any], text: str) -> None:
    assert_error(partial(call, op), op, paged_arguments(op, **changes), text)


def test_a_mix_of_devices() -> None:
    check_a_mix_of_devices("indexer_topk_paged")


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("return_slots", [False, True])
def test_opcheck(dtype: torch.dtype, return_slots: bool) -> None:
    opcheck("indexer_topk_paged", dtype, return_slots=return_slots)


def test_selections_have_no_gradient() -> None:
    args = paged_arguments("indexer_topk_paged")
    args["weights"].requires_grad_()
    assert not any(result.requires_grad for result in cpu("indexer_topk_paged", **args))


def test_flop_formula() -> None:
    check_flop_formula("indexer_topk_paged")
