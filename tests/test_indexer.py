"""The references of the indexer against loops in float64, and their promises at the edges. All on the CPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, IndexerInputs, make_indexer_inputs, nasty_rows
from dsa_ext.testing.tolerances import logits_errors

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
# The reference takes any number of heads and columns; small ones keep the loops quick.
SEQ, S_KV, HEADS, DIM = 7, 12, 3, 8

# Of each query the first key and the one after the last: all, some, one, none, inverted, more than there are.
BOUNDS = [(0, S_KV), (0, 5), (3, 9), (4, 5), (4, 4), (9, 3), (INT32_MIN, INT32_MAX)]
MORE_BOUNDS = [
    (-5, 2),
    (8, S_KV + 1),
    (INT32_MAX, INT32_MIN),
    (S_KV, S_KV + 5),
    (-9, -3),
    (-1, 0),
    (S_KV - 1, INT32_MAX),
]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def make_small(dtype: torch.dtype, bounds: list[tuple[int, int]] | None = None) -> IndexerInputs:
    """Small inputs; with `bounds`, these instead of causal ones."""
    inputs = make_indexer_inputs(SEQ, S_KV, HEADS, DIM, dtype=dtype)
    if bounds is not None:
        inputs.ks, inputs.ke = (int32(*ends) for ends in zip(*bounds, strict=True))
    return inputs


def tensors(inputs: IndexerInputs) -> tuple[Tensor, ...]:
    return inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke


def inside(ks: Tensor, ke: Tensor, s_kv: int) -> Tensor:
    """The rule of the bounds, with Python's integers."""
    rows = [[start <= t < end for t in range(s_kv)] for start, end in zip(ks.tolist(), ke.tolist(), strict=True)]
    return torch.tensor(rows).view(len(rows), s_kv)


def brute_force(inputs: IndexerInputs) -> Tensor:
    """One entry and one head at a time, with Python's floats."""
    q, k, weights = inputs.q.double(), inputs.k.double(), inputs.weights.double()
    logits = torch.full((len(q), len(k)), -math.inf, dtype=torch.float64)
    for s, t in inside(inputs.ks, inputs.ke, len(k)).nonzero().tolist():
        scale = 1.0 if inputs.k_scale is None else float(inputs.k_scale[t])
        products = [max(float(head @ k[t]), 0.0) * float(w) for head, w in zip(q[s], weights[s], strict=True)]
        logits[s, t] = scale * sum(products)
    return logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bounds", [None, BOUNDS, MORE_BOUNDS], ids=["causal", "bounds", "more bounds"])
def test_logits_match_brute_force(dtype: torch.dtype, bounds: list[tuple[int, int]] | None) -> None:
    inputs = make_small(dtype, bounds)
    logits = reference.indexer_logits(*tensors(inputs), inputs.k_scale)
    exact = dtype == torch.float64
    assert logits.dtype == (torch.float64 if exact else torch.float32)
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(logits.double(), brute_force(inputs), **tolerance)
    logits_errors(logits, *tensors(inputs), inputs.k_scale).check()


def test_causal_inputs() -> None:
    """The queries are the last of the positions, and both scales are undone in the logits."""
    inputs, plain = (make_indexer_inputs(SEQ, S_KV, 8, 64, dtype=dtype) for dtype in (DTYPES[0], torch.float32))
    assert inputs.ks.tolist() == [0] * SEQ
    assert inputs.ke.tolist() == list(range(S_KV - SEQ + 1, S_KV + 1))
    logits = reference.indexer_logits(*tensors(inputs), inputs.k_scale)
    torch.testing.assert_close(logits, reference.indexer_logits(*tensors(plain)), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("spoil", ["scale", "bounds"])
def test_logits_errors_are_noticed(spoil: str) -> None:
    inputs = make_small(torch.bfloat16)
    logits = reference.indexer_logits(*tensors(inputs))
    if spoil == "scale":
        logits *= 1.004
    else:
        logits[0, -1] = 0
    with pytest.raises(AssertionError, match="beyond the tolerances of indexer_logits"):
        logits_errors(logits, *tensors(inputs)).check()


def test_what_is_outside_of_the_bounds_is_not_read() -> None:
    inputs = make_small(torch.float64, BOUNDS)
    clean = reference.indexer_logits(*tensors(inputs))
    visible = inside(inputs.ks, inputs.ke, S_KV)
    for t in range(S_KV):
        inputs.k[t], saved = torch.nan, inputs.k[t].clone()
        logits = reference.indexer_logits(*tensors(inputs))
        assert logits[visible[:, t], t].isnan().all()
        logits[visible[:, t], t] = clean[visible[:, t], t]
        torch.testing.assert_close(logits, clean)
        inputs.k[t] = saved


def autograd_of_the_formula(dlogits: Tensor, inputs: IndexerInputs) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.weights)]
    q, k, weights = leaves
    logits = (torch.einsum("shd,td->sht", q, k).relu() * weights[..., None]).sum(1)
    visible = inside(inputs.ks, inputs.ke, len(k))
    return torch.autograd.grad(logits[visible], leaves, dlogits[visible])


@pytest.mark.parametrize("bounds", [None, BOUNDS, MORE_BOUNDS], ids=["causal", "bounds", "more bounds"])
def test_gradients_match_autograd(bounds: list[tuple[int, int]] | None) -> None:
    inputs = make_small(torch.float64, bounds)
    dlogits = torch.randn(SEQ, S_KV, dtype=torch.float64)
    expected = autograd_of_the_formula(dlogits, inputs)
    dlogits[~inside(inputs.ks, inputs.ke, S_KV)] = torch.nan
    torch.testing.assert_close(
        reference.indexer_logits_bwd(dlogits, *tensors(inputs)), expected, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    """dk is a sum over all queries and heads."""
    inputs = make_indexer_inputs(64, 80, HEADS, DIM, dtype=dtype)
    dlogits = torch.randn(64, 80)
    grads = reference.indexer_logits_bwd(dlogits, *tensors(inputs))
    q, k, weights = inputs.q.double(), inputs.k.double(), inputs.weights.double()
    expected = reference.indexer_logits_bwd(dlogits.double(), q, k, weights, inputs.ks, inputs.ke)
    assert [grad.dtype for grad in grads] == [dtype, dtype, torch.float32]
    for grad, exact in zip(grads, expected, strict=True):
        epsilon = torch.finfo(grad.dtype).eps
        torch.testing.assert_close(grad.double(), exact, rtol=0.51 * epsilon if epsilon > 1e-6 else 1e-5, atol=1e-5)


def test_gradients_of_poisoned_inputs() -> None:
    """Keys outside of all bounds, and queries whose bounds are empty, may hold anything."""
    inputs = make_small(torch.float64, [(2, 9), (9, 2), (3, 4), (5, 5), (2, 8), (0, -1), (4, 9)])
    visible = inside(inputs.ks, inputs.ke, S_KV)
    dlogits = torch.randn(SEQ, S_KV, dtype=torch.float64)
    expected = reference.indexer_logits_bwd(dlogits, *tensors(inputs))
    empty, unseen = ~visible.any(1), ~visible.any(0)
    inputs.q[empty], inputs.weights[empty], inputs.k[unseen] = torch.nan, torch.inf, torch.inf
    grads = reference.indexer_logits_bwd(dlogits.masked_fill(~visible, torch.nan), *tensors(inputs))
    torch.testing.assert_close(grads, expected)
    assert not torch.cat([grads[0][empty].flatten(), grads[1][unseen].flatten(), grads[2][empty].flatten()]).any()


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_small(torch.float64, BOUNDS)
    dlogits = torch.randn(SEQ, S_KV, dtype=torch.float64)

    def results() -> list[Any]:
        logits = reference.indexer_logits(*tensors(inputs))
        return [
            logits,
            reference.indexer_logits_bwd(dlogits, *tensors(inputs)),
            reference.topk_select(logits, inputs.ks, inputs.ke, 4),
            reference.indexer_topk(*tensors(inputs), 4),
        ]

    whole = results()
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 2 * HEADS * S_KV)
    assert [(run.start, run.stop) for run in reference.indexer.runs(5, HEADS * S_KV)] == [(0, 2), (2, 4), (4, 6)]
    torch.testing.assert_close(results(), whole)
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(results(), whole)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 4, S_KV, S_KV + 9])
def test_indexer_topk_is_the_composition(dtype: torch.dtype, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 3 * HEADS * S_KV)
    for bounds in (None, BOUNDS, MORE_BOUNDS):
        inputs = make_small(dtype, bounds)
        logits = reference.indexer_logits(*tensors(inputs), inputs.k_scale)
        indices, values = reference.indexer_topk(*tensors(inputs), topk, inputs.k_scale)
        expected = reference.topk_select(logits, inputs.ks, inputs.ke, topk)
        assert torch.equal(indices, expected[0])
        assert torch.equal(values, expected[1])
        assert values.dtype == logits.dtype


@pytest.mark.parametrize("seq", [0, 3])
@pytest.mark.parametrize("s_kv", [0, 5])
def test_empty_tensors(seq: int, s_kv: int) -> None:
    inputs = make_indexer_inputs(seq, s_kv, HEADS, DIM, dtype=torch.float64)
    logits = reference.indexer_logits(*tensors(inputs))
    assert logits.shape == (seq, s_kv)
    for indices, values in (
        reference.topk_select(logits, inputs.ks, inputs.ke, 7),
        reference.indexer_topk(*tensors(inputs), 7),
    ):
        assert indices.shape == values.shape == (seq, 7)
        assert (indices[:, s_kv:] == -1).all()
        assert (values[:, s_kv:] == -torch.inf).all()
    grads = reference.indexer_logits_bwd(torch.ones_like(logits), *tensors(inputs))
    assert [grad.shape for grad in grads] == [inputs.q.shape, inputs.k.shape, inputs.weights.shape]
    if seq * s_kv == 0:
        assert not any(grad.any() for grad in grads)
