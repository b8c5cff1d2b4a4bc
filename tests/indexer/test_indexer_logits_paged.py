"""indexer_logits_paged without a GPU: its reference against indexer_logits on the gathered keys, and the operator."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from callers import assert_error, cpu, fake, native
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
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN
from dsa_ext.testing.paged_inputs import PagedInputs, gathered, poisoned


def logits_of(inputs: PagedInputs, max_len: int | None = None) -> Tensor:
    return reference.indexer_logits_paged(**vars(inputs), max_len=max_len)


def unpaged(inputs: PagedInputs, lengths: list[list[int]], columns: int) -> Tensor:
    """The logits of the gathered keys, query by query, with `lengths` of Python's integers."""
    queries = inputs.q.shape[1]
    rows = []
    for row in range(inputs.q.shape[0] * queries):
        b, n = divmod(row, queries)
        k, k_scale = gathered(inputs, b)
        end = min(max(lengths[b][n], 0), columns, len(k))
        one = inputs.q[b, n : n + 1], k, inputs.weights[row : row + 1], int32(0), int32(end), k_scale
        full = torch.full((columns,), -torch.inf, dtype=inputs.weights.dtype)
        full[:end] = reference.indexer_logits(*one)[0, :end]
        rows.append(full)
    return torch.stack(rows) if rows else torch.empty(0, columns)


LENGTHS = [[15, 0, 1], [8, 9, -3], [INT32_MIN, INT32_MAX, 7]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [4, 8])
@pytest.mark.parametrize("max_len", [None, 0, 5, 16, 40])
def test_logits_are_those_of_the_gathered_keys(dtype: torch.dtype, page: int, max_len: int | None) -> None:
    for lengths in LENGTHS:
        inputs = replace(make_small(dtype, page), context_lens=int32(*lengths))
        columns = 16 if max_len is None else max_len
        queries = inputs.q.shape[1]
        each = [[max(length, 0) - queries + 1 + n for n in range(queries)] for length in lengths]
        expected = unpaged(inputs, each, columns)
        got = logits_of(poisoned(inputs), max_len)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(got == -torch.inf, expected == -torch.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_length_per_query(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[3, 16], [0, INT32_MAX], [-5, 9]], dtype=torch.int32)
    inputs = replace(make_small(dtype), context_lens=lengths)
    torch.testing.assert_close(logits_of(inputs), unpaged(inputs, lengths.tolist(), 16), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [-1, INT32_MIN, 14, INT32_MAX])
def test_blocks_that_do_not_exist(bad: int) -> None:
    inputs = make_small(FP8, page=4)
    assert len(inputs.k_cache) == 14
    expected = logits_of(inputs)
    table = inputs.block_table.clone()
    table[0, 1], table[2] = bad, bad
    got = logits_of(replace(inputs, block_table=table))
    queries = inputs.q.shape[1]
    expected[:queries, 4:8] = -torch.inf
    expected[2 * queries :] = -torch.inf
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_a_block_may_serve_several_sequences() -> None:
    inputs = make_small(FP8, page=4)
    shared = replace(inputs, block_table=inputs.block_table[:1].expand(3, -1))
    lengths = [[15, 16]] * 3
    torch.testing.assert_close(logits_of(shared), unpaged(shared, lengths, 16), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"keys": 0, "spare": 1}, {"keys": 0, "spare": 0}], ids=str)
def test_empty_tensors(sizes: dict[str, int]) -> None:
    inputs = make_small(FP8, **sizes)
    args = vars(inputs) | {"context_lens": inputs.context_lens + 5}
    rows = inputs.q.shape[0] * inputs.q.shape[1]
    held = inputs.block_table.shape[1] * inputs.k_cache.shape[1]
    for columns in (None, 0, 7):
        logits = dsa_ext.indexer_logits_paged(**args, max_len=columns)
        assert logits.shape == (rows, held if columns is None else columns)
        if held == 0:
            assert (logits == -torch.inf).all()


def test_a_cache_with_a_dimension_of_one_head() -> None:
    args = vars(make_small(FP8))
    four = args | {"k_cache": args["k_cache"][:, :, None]}
    assert torch.equal(dsa_ext.indexer_logits_paged(**four), dsa_ext.indexer_logits_paged(**args))
    for a, b in zip(
        dsa_ext.indexer_topk_paged(**four, topk=3), dsa_ext.indexer_topk_paged(**args, topk=3), strict=True
    ):
        assert torch.equal(a, b)


def test_rows_start_aligned() -> None:
    logits = dsa_ext.indexer_logits_paged(**vars(make_small(FP8)), max_len=13)
    assert logits.stride() == (16, 1)


@pytest.mark.parametrize("call", [native, cpu, fake])
@errors_of("indexer_logits_paged")
def test_errors(call: Callable[..., Any], op: str, changes: dict[str, Any], text: str) -> None:
    assert_error(partial(call, op), op, paged_arguments(op, **changes), text)


def test_a_mix_of_devices() -> None:
    check_a_mix_of_devices("indexer_logits_paged")


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", [{}, {"max_len": 20, "clean": False}], ids=str)
def test_opcheck(dtype: torch.dtype, options: dict[str, Any]) -> None:
    opcheck("indexer_logits_paged", dtype, **options)


def test_flop_formula() -> None:
    check_flop_formula("indexer_logits_paged")
    check_flop_formula("indexer_logits_paged", max_len=7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_without_keys(dtype: torch.dtype) -> None:
    inputs = make_small(dtype)
    inputs = replace(inputs, k_cache=inputs.k_cache[:, :0])
    assert (dsa_ext.indexer_logits_paged(**vars(inputs), max_len=20) == -torch.inf).all()
    indices, _ = dsa_ext.indexer_topk_paged(**vars(inputs), topk=5, return_slots=True)
    assert (indices == -1).all()


def test_a_cache_may_start_anywhere() -> None:
    """Of one block, whose scales are contiguous in any case."""
    inputs = make_small(FP8, keys=40)
    cache = inputs.k_cache[:1]
    inputs = replace(inputs, k_cache=cache, block_table=torch.zeros_like(inputs.block_table))
    memory = torch.zeros(cache.numel() + 1, dtype=torch.uint8)
    memory[1:] = cache.flatten()
    assert torch.equal(logits_of(replace(inputs, k_cache=memory[1:].view(cache.shape))), logits_of(inputs))
