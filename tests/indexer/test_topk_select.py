"""topk_select without a GPU: its reference against sorting in Python, and the operator."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from callers import assert_error, cpu, fake, native
from hypothesis import given, settings
from hypothesis import strategies as st
from indexer_cases import FP8, S_KV, S, arguments, check_a_mix_of_devices, errors_of, opcheck
from indexer_small import int32
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, nasty_rows


def oracle(row: list[float], start: int, end: int, topk: int) -> list[int]:
    """The ids that topk_select must return, without padding."""
    window = range(max(start, 0), min(end, len(row)))
    selectable = [t for t in window if not math.isnan(row[t]) and row[t] != -math.inf]
    return sorted(sorted(selectable, key=lambda t: (-row[t], t))[:topk])


def assert_selected(logits: Tensor, starts: Tensor, ends: Tensor, topk: int) -> None:
    indices, values = reference.topk_select(logits, starts, ends, topk)
    assert (indices.dtype, values.dtype) == (torch.int32, logits.dtype)
    for r, row in enumerate(logits.double().tolist()):
        expected = oracle(row, int(starts[r]), int(ends[r]), topk)
        padding = topk - len(expected)
        assert indices[r].tolist() == expected + [-1] * padding
        picked = torch.cat([logits[r, expected], logits.new_full((padding,), -torch.inf)])
        assert torch.equal(values[r], picked)
        assert torch.equal(values[r].signbit(), picked.signbit()), "the value of -0.0 is -0.0"


NAMES = list(nasty_rows(1))
EDGES = st.sampled_from([INT32_MIN, INT32_MIN + 1, -1, 0, 1, INT32_MAX - 1, INT32_MAX])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), columns=st.integers(0, 80), topk=st.integers(1, 90), seed=st.integers(0, 99))
def test_selection_matches_the_oracle(data: st.DataObject, columns: int, topk: int, seed: int) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    names = data.draw(st.lists(st.sampled_from(NAMES), max_size=4))
    bounds = st.lists(EDGES | st.integers(-5, columns + 5), min_size=len(names), max_size=len(names))
    rows = nasty_rows(columns, seed)
    logits = torch.stack([rows[name] for name in names]).to(dtype) if names else torch.zeros(0, columns, dtype=dtype)
    assert_selected(logits, int32(*data.draw(bounds)), int32(*data.draw(bounds)), topk)


@pytest.mark.parametrize("topk", [1, 256, 2000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_nasty_rows(topk: int, dtype: torch.dtype) -> None:
    logits = torch.stack(list(nasty_rows(3000).values())).to(dtype)
    rows = len(logits)
    assert_selected(logits, torch.zeros(rows).int(), torch.full((rows,), 3000).int(), topk)
    assert_selected(logits, torch.arange(rows).int(), 2990 + torch.arange(rows).int(), topk)


def test_nasty_rows_are_what_they_claim() -> None:
    rows = nasty_rows(1000)
    assert all((row.shape, row.dtype) == ((1000,), torch.float32) for row in rows.values())
    assert rows["all equal"].unique().numel() == 1
    assert rows["one fp16 bucket"].half().unique().numel() == 1
    assert rows["one fp16 bucket"].unique().numel() > 500
    assert rows["last bit"].view(torch.int32).unique().diff().tolist() == [1, 1]
    assert (rows["plateau of zeros"] == 0).sum() > 900
    assert (rows["denormals"].abs() < torch.finfo(torch.float32).tiny).all()
    assert rows["denormals"].unique().numel() > 900
    assert rows["zeros of both signs"].signbit().unique().numel() == 2
    assert 0 < rows["NaN"].isnan().sum() < 200
    assert rows["infinities"].isposinf().any()
    assert rows["infinities"].isneginf().any()
    again, other = nasty_rows(1000), nasty_rows(1000, seed=1)
    assert all(row.view(torch.int32).equal(again[name].view(torch.int32)) for name, row in rows.items())
    assert not torch.equal(rows["normal"], other["normal"])


def test_the_value_of_a_slot_is_the_entry_itself() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0, torch.inf]])
    indices, values = reference.topk_select(logits, int32(0), int32(5), 3)
    assert indices.tolist() == [[0, 1, 4]]
    assert values.signbit().tolist() == [[True, False, False]]


def slot_of(token: int, table: list[list[int]], sequence: int, page_size: int) -> int:
    if token < 0 or not 0 <= sequence < len(table) or token // page_size >= len(table[sequence]):
        return -1
    entry = table[sequence][token // page_size]
    slot = entry * page_size + token % page_size
    return slot if entry >= 0 and slot < 2**31 else -1


TABLE = [[7, 0, 3, 9, 2, -1], [4, 4, INT32_MAX, 1, INT32_MIN, 5]]


@settings(max_examples=60, deadline=None)
@given(page_size=st.integers(1, 7) | st.just(INT32_MAX), topk=st.integers(1, 50), seed=st.integers(0, 99))
@pytest.mark.parametrize("to_sequence", [None, [1, -1, 0, 2, 1, INT32_MIN], [INT32_MAX, 0, 0, 1, 1, 0]])
def test_slots_of_a_cache(to_sequence: list[int] | None, page_size: int, topk: int, seed: int) -> None:
    logits = torch.stack(list(nasty_rows(40, seed).values())[:6])
    bounds = int32(*[0] * 6), int32(*[40] * 6)
    rows = None if to_sequence is None else int32(*to_sequence)
    ids, values = dsa_ext.topk_select(logits, *bounds, topk)
    paged = {"page_table": torch.tensor(TABLE, dtype=torch.int32), "page_size": page_size, "row_to_sequence": rows}
    slots, same_values = dsa_ext.topk_select(logits, *bounds, topk, **paged)
    sequences = [0, 0, 0, 1, 1, 1] if to_sequence is None else to_sequence
    expected = [[slot_of(t, TABLE, s, page_size) for t in row] for row, s in zip(ids.tolist(), sequences, strict=True)]
    assert slots.tolist() == expected
    assert torch.equal(values, same_values)


def test_slots_without_rows_sequences_or_pages() -> None:
    none = torch.empty(0, 5), int32(), int32(), 3
    for table in (torch.empty(0, 2), torch.empty(3, 0)):
        assert dsa_ext.topk_select(*none, page_table=table.int())[0].shape == (0, 3)
    some = torch.ones(2, 5), int32(0, 0), int32(5, 5), 3
    slots, values = dsa_ext.topk_select(*some, page_table=torch.empty(2, 0).int())
    assert slots.tolist() == [[-1] * 3] * 2
    assert values.tolist() == [[1.0] * 3] * 2


def test_pages_without_a_table() -> None:
    args = torch.ones(2, 5), int32(0, 0), int32(5, 5), 3
    with pytest.raises(RuntimeError, match="dsa::topk_select: page_size must be None without page_table, got 64"):
        dsa_ext.topk_select(*args, page_size=64)
    table = torch.arange(2, dtype=torch.int32)[:, None]
    slots, _ = dsa_ext.topk_select(*args, page_table=table)
    assert torch.equal(slots, dsa_ext.topk_select(*args, page_table=table, page_size=64)[0])
    assert slots.tolist() == [[0, 1, 2], [64, 65, 66]]


@pytest.mark.parametrize("call", [native, cpu, fake])
@errors_of("topk_select")
def test_errors(call: Callable[..., Any], op: str, changes: dict[str, Any], text: str) -> None:
    assert_error(partial(call, op), op, arguments(op, **changes), text)


@pytest.mark.parametrize(("op", "first", "name"), [("topk_select", "logits", "starts")])
def test_a_mix_of_devices(op: str, first: str, name: str) -> None:
    check_a_mix_of_devices(op, first, name)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["topk_select"])
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    opcheck(op, dtype)


def test_any_strides_on_the_cpu() -> None:
    logits = torch.randn(S, S_KV)
    args = arguments("topk_select")
    args.pop("logits")
    expected = cpu("topk_select", logits=logits, **args)
    results = cpu("topk_select", logits=logits.T.contiguous().T, **args)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("op", ["topk_select"])
def test_selections_have_no_gradient(op: str) -> None:
    args = arguments(op)
    args["logits"].requires_grad_()
    assert not any(result.requires_grad for result in cpu(op, **args))
