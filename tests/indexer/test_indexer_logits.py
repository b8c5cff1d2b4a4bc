"""indexer_logits without a GPU: its reference against loops in float64, and the operator. What calls all three of
indexer_logits, topk_select and indexer_topk is here too."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from callers import assert_error, cpu, fake
from indexer_cases import (
    DI,
    FP8,
    HI,
    S_KV,
    K,
    S,
    arguments,
    check_a_mix_of_devices,
    check_flop_formula,
    errors_of,
    loss,
    opcheck,
    scoring_arguments,
)
from indexer_small import BOUNDS, DIM, DTYPES, HEADS, KEYS, MORE_BOUNDS, SEQ, inside, make_small, tensors
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import IndexerInputs, make_indexer_inputs
from dsa_ext.testing.tolerances import logits_errors


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
    """The queries have the last positions, and the logits undo both fp8 scales."""
    inputs, plain = (make_indexer_inputs(SEQ, KEYS, 8, 64, dtype=dtype) for dtype in (DTYPES[0], torch.float32))
    assert inputs.ks.tolist() == [0] * SEQ
    assert inputs.ke.tolist() == list(range(KEYS - SEQ + 1, KEYS + 1))
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
    visible = inside(inputs.ks, inputs.ke, KEYS)
    for t in range(KEYS):
        inputs.k[t], saved = torch.nan, inputs.k[t].clone()
        logits = reference.indexer_logits(*tensors(inputs))
        assert logits[visible[:, t], t].isnan().all()
        logits[visible[:, t], t] = clean[visible[:, t], t]
        torch.testing.assert_close(logits, clean)
        inputs.k[t] = saved


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_small(torch.float64, BOUNDS)
    dlogits = torch.randn(SEQ, KEYS, dtype=torch.float64)

    def results() -> list[Any]:
        logits = reference.indexer_logits(*tensors(inputs))
        return [
            logits,
            reference.indexer_logits_bwd(dlogits, *tensors(inputs)),
            reference.topk_select(logits, inputs.ks, inputs.ke, 4),
            reference.indexer_topk(*tensors(inputs), 4),
        ]

    whole = results()
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 2 * HEADS * KEYS)
    assert [(run.start, run.stop) for run in reference.indexer.runs(5, HEADS * KEYS)] == [(0, 2), (2, 4), (4, 6)]
    torch.testing.assert_close(results(), whole)
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(results(), whole)


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


@pytest.mark.parametrize("call", [cpu, fake])
@errors_of("indexer_logits")
def test_errors(call: Callable[..., Any], op: str, changes: dict[str, Any], text: str) -> None:
    assert_error(partial(call, op), op, arguments(op, **changes), text)


def test_dtypes_of_the_cpu_alone() -> None:
    """Only the CPU takes fp32 and float64; weights then have the dtype of q."""
    with pytest.raises(RuntimeError, match=r"q must be float8_e4m3fn or bfloat16 .*, got float32"):
        fake("indexer_logits", **scoring_arguments(torch.float32))
    with pytest.raises(RuntimeError, match=r"logits must be float32 or bfloat16 .*, got float64"):
        fake("topk_select", **arguments("topk_select", logits=torch.zeros(S, S_KV).double()))
    with pytest.raises(RuntimeError, match=r"weights must be float64 \[S, Hi\], got float32"):
        cpu("indexer_logits", **scoring_arguments(torch.float64, weights=torch.zeros(S, HI)))


@pytest.mark.parametrize(("op", "first", "name"), [("indexer_logits", "q", "k")])
def test_a_mix_of_devices(op: str, first: str, name: str) -> None:
    check_a_mix_of_devices(op, first, name)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seq", [0, 33])
@pytest.mark.parametrize("s_kv", [0, 1000])
def test_fake_tensors_on_a_cuda_device(dtype: torch.dtype, seq: int, s_kv: int) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        q, k = torch.empty(seq, 64, 128, dtype=dtype), torch.empty(s_kv, 128, dtype=dtype)
        weights, ks, ke = torch.empty(seq, 64), torch.empty(seq).int(), torch.empty(seq).int()
        k_scale = torch.empty(s_kv) if dtype == FP8 else None
        logits = dsa_ext.indexer_logits(q, k, weights, ks, ke, k_scale=k_scale)
        assert (logits.shape, logits.dtype, logits.device.type) == ((seq, s_kv), torch.float32, "cuda")
        indices, values = dsa_ext.indexer_topk(q, k, weights, ks, ke, 2048, k_scale=k_scale)
        assert (indices.shape, indices.dtype, indices.device.type) == ((seq, 2048), torch.int32, "cuda")
        assert (values.shape, values.dtype, values.device.type) == ((seq, 2048), torch.float32, "cuda")
        indices, values = dsa_ext.topk_select(logits.bfloat16(), ks, ke, 4096)
        assert (indices.shape, indices.dtype) == ((seq, 4096), torch.int32)
        assert (values.shape, values.dtype) == ((seq, 4096), torch.bfloat16)


@pytest.mark.parametrize("call", [cpu, fake])
@pytest.mark.parametrize("s_kv", [1, 5, 16])
def test_rows_of_logits_start_where_topk_select_takes_them(call: Callable[..., Any], s_kv: int) -> None:
    """16-byte aligned for any number of keys."""
    inputs = make_indexer_inputs(S, s_kv, HI, DI)
    changes = {"k": inputs.k, "k_scale": inputs.k_scale}
    logits = call("indexer_logits", **scoring_arguments(**changes))
    assert logits.shape == (S, s_kv)
    assert logits.stride() == (-(-s_kv // 4) * 4, 1)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["indexer_logits"])
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    opcheck(op, dtype)


def test_public_functions_are_the_operators() -> None:
    args = scoring_arguments()
    positional = [args[name] for name in ("q", "k", "weights", "starts", "ends")]
    k_scale = args["k_scale"]
    logits = dsa_ext.indexer_logits(*positional, k_scale=k_scale)
    assert torch.equal(logits, reference.indexer_logits(*positional, k_scale))
    assert torch.equal(dsa_ext.indexer_logits(*positional, k_scale=k_scale, clean=False)[-1], logits[-1])
    expected = reference.topk_select(logits, *positional[3:], K)
    for results in (
        dsa_ext.topk_select(logits, *positional[3:], K),
        dsa_ext.indexer_topk(*positional, K, k_scale=k_scale),
    ):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("name", ["q", "k", "weights", "k_scale"])
def test_gradients_beside_fp8_are_refused(name: str) -> None:
    args = scoring_arguments()
    args[name] = args[name].requires_grad_()
    message = "dsa::indexer_logits: q must be bfloat16 where an argument requires a gradient, got float8_e4m3fn"
    with pytest.raises(RuntimeError, match=message):
        cpu("indexer_logits", **args)
    with torch.no_grad():
        assert not cpu("indexer_logits", **args).requires_grad


def test_gradcheck() -> None:
    args = scoring_arguments(torch.float64)
    leaves = [args[name].requires_grad_() for name in ("q", "k", "weights")]

    def call(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        logits = dsa_ext.indexer_logits(q, k, weights, args["starts"], args["ends"])
        return logits.masked_fill(logits == -torch.inf, 0)  # differences of -inf are NaN

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_partial_gradients() -> None:
    """When only one input requires a gradient, it equals the gradient that is computed for all."""
    args = scoring_arguments(torch.bfloat16)
    dlogits = torch.randn(S, S_KV)
    expected = reference.indexer_logits_bwd(dlogits, *list(args.values())[:5])
    for name, gradient in zip(("q", "k", "weights"), expected, strict=True):
        leaf = args[name].clone().requires_grad_()
        (got,) = torch.autograd.grad(cpu("indexer_logits", **{**args, name: leaf}), leaf, dlogits)
        assert got.dtype == leaf.dtype
        assert torch.equal(got, gradient)


def test_second_derivatives_are_refused() -> None:
    args = scoring_arguments(torch.float32)
    logits = cpu("indexer_logits", **{**args, "q": args["q"].requires_grad_()})
    (dq,) = torch.autograd.grad(logits[-1].square().sum(), args["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="dsa::indexer_logits_bwd: second derivatives"):
        dq.sum().backward()


def gradients(function: Callable[[IndexerInputs], Tensor], seq: int) -> list[Tensor]:
    inputs = make_indexer_inputs(seq, seq + S_KV, HI, DI, dtype=torch.bfloat16, seed=seq)
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.weights)]
    result = function(inputs)
    return [result, *torch.autograd.grad(result, leaves)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=backend)
    for seq in (3, 5, 7):
        torch.testing.assert_close(gradients(compiled, seq), gradients(loss, seq))
    assert backend.frame_count == (1 if dynamic else 3)


@pytest.mark.parametrize("op", ["indexer_logits"])
def test_flop_formula(op: str) -> None:
    check_flop_formula(op)
