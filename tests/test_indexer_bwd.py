"""The operators of the indexer's gradients without a GPU: errors, opcheck, FLOPs, the switch of torch."""

from typing import Any

import pytest
import torch
from callers import Caller, assert_error, callers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dsa_ext import reference
from dsa_ext.testing.inputs import make_indexer_inputs

S, S_KV, HI, DI, K = 5, 30, 8, 64, 9
OPS = ("indexer_scores_bwd", "indexer_logits_bwd")
all_operators = pytest.mark.parametrize("op", OPS)


def arguments(op: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """By name, in the order of the schema."""
    generator = torch.Generator().manual_seed(0)
    inputs = make_indexer_inputs(S, S_KV, HI, DI, dtype=dtype)
    leaves = {"q": inputs.q, "k": inputs.k, "weights": inputs.weights}
    if op == "indexer_scores_bwd":
        indices = torch.randint(-3, S_KV + 3, (S, K), generator=generator, dtype=torch.int32)
        return {"dscores": torch.randn(S, K, generator=generator), **leaves, "indices": indices}
    bounds = {"starts": inputs.ks, "ends": inputs.ke}
    return {"dlogits": torch.randn(S, S_KV, generator=generator), **leaves, **bounds}


def gradient_name(op: str) -> str:
    return next(iter(arguments(op)))


ALL_CALLERS = [pytest.param(op, i, id=f"{op}-{kind}") for op in OPS for i, kind in enumerate(("native", "cpu", "fake"))]


def caller_of(op: str, number: int) -> Caller:
    return callers(op)[number]


@pytest.mark.parametrize(("op", "number"), ALL_CALLERS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(S, HI, DI + 1, dtype=torch.bfloat16), "k must be bfloat16 [S_kv, Di=65], got"),
        ("q", torch.zeros(S, 12, DI, dtype=torch.bfloat16), "weights must be float32 [S=5, Hi=12], got"),
        ("k", torch.zeros(S_KV, DI, dtype=torch.float16), "k must be bfloat16 [S_kv, Di], got float16"),
        ("weights", torch.zeros(S, HI, dtype=torch.bfloat16), "weights must be float32 [S, Hi], got bfloat16"),
    ],
)
def test_bad_inputs(op: str, number: int, name: str, value: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        caller_of(op, number)(**{**arguments(op), name: value})
    assert str(caught.value).startswith(f"dsa::{op}: {message}")


@pytest.mark.parametrize(("op", "number"), ALL_CALLERS)
def test_bad_gradients(op: str, number: int) -> None:
    name, args = gradient_name(op), arguments(op)
    letter, columns = ("K", K) if op == "indexer_scores_bwd" else ("S_kv", S_KV)
    for shape in ((S - 1, columns), (S, columns + 1)):
        message = f"{name} must be float32 [S=5, {letter}={columns}], got float32 [{shape[0]}, {shape[1]}]"
        assert_error(caller_of(op, number), op, args | {name: torch.zeros(shape)}, message)
    message = f"{name} must be float32 [S, {letter}], got float64 [5, {columns}]"
    assert_error(caller_of(op, number), op, args | {name: args[name].double()}, message)


@pytest.mark.parametrize("number", [0, 1, 2], ids=["native", "cpu", "fake"])
def test_bad_lists_and_bounds(number: int) -> None:
    op = "indexer_scores_bwd"
    wrong = {"indices": torch.zeros(S, K, dtype=torch.int64)}
    message = "indices must be int32 [S, K], got int64 [5, 9]"
    assert_error(caller_of(op, number), op, arguments(op) | wrong, message)
    op = "indexer_logits_bwd"
    for name in ("starts", "ends"):
        wrong = {name: torch.zeros(S + 1, dtype=torch.int32)}
        message = f"{name} must be int32 [S=5], got int32 [6]"
        assert_error(caller_of(op, number), op, arguments(op) | wrong, message)


@pytest.mark.parametrize("number", [1, 2], ids=["cpu", "fake"])
def test_fp8_is_refused(number: int) -> None:
    op = "indexer_logits_bwd"
    args = arguments(op) | {"q": torch.zeros(S, HI, DI).to(torch.float8_e4m3fn)}
    assert_error(caller_of(op, number), op, args, "q must be bfloat16, got float8_e4m3fn")


@all_operators
def test_values(op: str) -> None:
    """On the CPU they are the reference's, in float64 too, and the flag changes nothing."""
    args = {name: t.double() if t.is_floating_point() else t for name, t in arguments(op, torch.float32).items()}
    expected = getattr(reference, op)(*args.values())
    for deterministic in (False, True):
        got = getattr(torch.ops.dsa, op)(*args.values(), deterministic)
        assert all(map(torch.equal, got, expected))


@all_operators
def test_opcheck(op: str) -> None:
    overload = getattr(torch.ops.dsa, op).default
    torch.library.opcheck(overload, tuple(arguments(op).values()))
    torch.library.opcheck(overload, (*arguments(op).values(), True))


@all_operators
def test_flop_formula(op: str) -> None:
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.dsa, op)(*arguments(op).values())
    keys = K if op == "indexer_scores_bwd" else S_KV
    assert counter.get_flop_counts()["Global"][getattr(torch.ops.dsa, op)] == 6 * S * HI * keys * DI
