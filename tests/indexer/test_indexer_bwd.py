"""The operators of the indexer's gradients without a GPU: against autograd and float64; errors, opcheck, FLOPs."""

from typing import Any

import pytest
import torch
from callers import Caller, assert_error, callers
from indexer_small import BOUNDS, DIM, HEADS, KEYS, MORE_BOUNDS, SEQ, inside, make_small, tensors
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dsa_ext import reference
from dsa_ext.testing.inputs import IndexerInputs, make_indexer_inputs

S, S_KV, HI, DI, K = 5, 30, 8, 64, 9
OPS = ("indexer_scores_bwd", "indexer_logits_bwd")
all_operators = pytest.mark.parametrize("op", OPS)


def autograd_of_the_formula(dlogits: Tensor, inputs: IndexerInputs) -> tuple[Tensor, ...]:
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.weights)]
    q, k, weights = leaves
    logits = (torch.einsum("shd,td->sht", q, k).relu() * weights[..., None]).sum(1)
    visible = inside(inputs.ks, inputs.ke, len(k))
    return torch.autograd.grad(logits[visible], leaves, dlogits[visible])


@pytest.mark.parametrize("bounds", [None, BOUNDS, MORE_BOUNDS], ids=["causal", "bounds", "more bounds"])
def test_gradients_match_autograd(bounds: list[tuple[int, int]] | None) -> None:
    inputs = make_small(torch.float64, bounds)
    dlogits = torch.randn(SEQ, KEYS, dtype=torch.float64)
    expected = autograd_of_the_formula(dlogits, inputs)
    dlogits[~inside(inputs.ks, inputs.ke, KEYS)] = torch.nan
    torch.testing.assert_close(
        reference.indexer_logits_bwd(dlogits, *tensors(inputs)), expected, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    """Among them dk, which is a sum over all queries and heads."""
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
    """Keys outside of all bounds, and queries whose bounds are empty, may hold any value."""
    inputs = make_small(torch.float64, [(2, 9), (9, 2), (3, 4), (5, 5), (2, 8), (0, -1), (4, 9)])
    visible = inside(inputs.ks, inputs.ke, KEYS)
    dlogits = torch.randn(SEQ, KEYS, dtype=torch.float64)
    expected = reference.indexer_logits_bwd(dlogits, *tensors(inputs))
    empty, unseen = ~visible.any(1), ~visible.any(0)
    inputs.q[empty], inputs.weights[empty], inputs.k[unseen] = torch.nan, torch.inf, torch.inf
    grads = reference.indexer_logits_bwd(dlogits.masked_fill(~visible, torch.nan), *tensors(inputs))
    torch.testing.assert_close(grads, expected)
    assert not torch.cat([grads[0][empty].flatten(), grads[1][unseen].flatten(), grads[2][empty].flatten()]).any()


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
    """On the CPU they equal the reference, in float64 too, and the deterministic flag changes nothing."""
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
