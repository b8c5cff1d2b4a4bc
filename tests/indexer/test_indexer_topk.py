"""indexer_topk without a GPU: it is the composition of indexer_logits and topk_select; the operator."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from callers import assert_error, cpu, fake
from indexer_cases import (
    FP8,
    K,
    arguments,
    check_a_mix_of_devices,
    check_flop_formula,
    errors_of,
    opcheck,
    scoring_arguments,
)
from indexer_small import BOUNDS, DTYPES, HEADS, KEYS, MORE_BOUNDS, make_small, tensors
from torch import Tensor

import dsa_ext
from dsa_ext import reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 4, KEYS, KEYS + 9])
def test_indexer_topk_is_the_composition(dtype: torch.dtype, topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 3 * HEADS * KEYS)
    for bounds in (None, BOUNDS, MORE_BOUNDS):
        inputs = make_small(dtype, bounds)
        logits = reference.indexer_logits(*tensors(inputs), inputs.k_scale)
        indices, values = reference.indexer_topk(*tensors(inputs), topk, inputs.k_scale)
        expected = reference.topk_select(logits, inputs.ks, inputs.ke, topk)
        assert torch.equal(indices, expected[0])
        assert torch.equal(values, expected[1])
        assert values.dtype == logits.dtype


def test_ids_fit_sparse_mla() -> None:
    q, k, weights = torch.randn(6, 8, 64), torch.randn(30, 64), torch.randn(6, 8)
    starts, ends = torch.zeros(6, dtype=torch.int32), torch.arange(25, 31, dtype=torch.int32)
    ids, _ = dsa_ext.indexer_topk(q, k, weights, starts, ends, 10)
    out = dsa_ext.sparse_mla(torch.randn(6, 16, 576), torch.randn(30, 576), ids, q_start=24)
    assert out.shape == (6, 16, 512)
    assert out.isfinite().all()


@pytest.mark.parametrize("call", [cpu, fake])
@errors_of("indexer_topk")
def test_errors(call: Callable[..., Any], op: str, changes: dict[str, Any], text: str) -> None:
    assert_error(partial(call, op), op, arguments(op, **changes), text)


@pytest.mark.parametrize(("op", "first", "name"), [("indexer_topk", "q", "k")])
def test_a_mix_of_devices(op: str, first: str, name: str) -> None:
    check_a_mix_of_devices(op, first, name)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["indexer_topk"])
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    opcheck(op, dtype)


@pytest.mark.parametrize("op", ["indexer_topk"])
def test_selections_have_no_gradient(op: str) -> None:
    args = arguments(op)
    args["weights"].requires_grad_()
    assert not any(result.requires_grad for result in cpu(op, **args))


def test_compile_without_gradients() -> None:
    torch._dynamo.reset()
    args = scoring_arguments()
    k_scale = args.pop("k_scale")

    def select(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return dsa_ext.indexer_topk(*tensors, K, k_scale=k_scale)

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args.values()), select(*args.values()))


@pytest.mark.parametrize("op", ["indexer_topk"])
def test_flop_formula(op: str) -> None:
    check_flop_formula(op)
