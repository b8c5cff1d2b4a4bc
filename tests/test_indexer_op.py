"""The indexer's operators as operators: errors, fake tensors, autograd, compile, FLOPs. All without a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from callers import assert_error, cpu, fake, to_fake_cuda
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import IndexerInputs, make_indexer_inputs

S, S_KV, HI, DI, K = 4, 16, 8, 64, 5
FP8 = torch.float8_e4m3fn


def scoring_arguments(dtype: torch.dtype = FP8, **changes: Any) -> dict[str, Any]:
    """Valid arguments of indexer_logits, of small size."""
    inputs = make_indexer_inputs(S, S_KV, HI, DI, dtype=dtype)
    return {
        "q": inputs.q,
        "k": inputs.k,
        "weights": inputs.weights,
        "starts": inputs.ks,
        "ends": inputs.ke,
        "k_scale": inputs.k_scale,
        **changes,
    }


def arguments(op: str, **changes: Any) -> dict[str, Any]:
    if op == "topk_select":
        bounds = {"starts": torch.zeros(S).int(), "ends": torch.full((S,), S_KV).int()}
        return {"logits": torch.randn(S, S_KV), **bounds, "topk": K, **changes}
    return scoring_arguments(**({"topk": K, **changes} if op == "indexer_topk" else changes))


# What is wrong, and the message without the operator's name. Every implementation says the same.
SCORING_ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"q": torch.zeros(S, DI).bfloat16()},
        "q must be float8_e4m3fn or bfloat16 [S, Hi, Di], got bfloat16 [4, 64]",
    ),
    (
        {"q": torch.zeros(S, HI, DI).half()},
        "q must be float8_e4m3fn or bfloat16 [S, Hi, Di], got float16 [4, 8, 64]",
    ),
    (
        {"q": torch.zeros(S, HI, DI).to(torch.float8_e5m2)},
        "q must be float8_e4m3fn or bfloat16 [S, Hi, Di], got float8_e5m2 [4, 8, 64]",
    ),
    ({"k": torch.zeros(S_KV, DI).bfloat16()}, "k must be float8_e4m3fn [S_kv, Di], got bfloat16 [16, 64]"),
    (
        {"q": torch.zeros(S, HI, DI).bfloat16(), "k_scale": None},
        "k must be bfloat16 [S_kv, Di], got float8_e4m3fn [16, 64]",
    ),
    ({"k": torch.zeros(S_KV, 1, DI).to(FP8)}, "k must be float8_e4m3fn [S_kv, Di], got float8_e4m3fn [16, 1, 64]"),
    ({"k": torch.zeros(S_KV, 128).to(FP8)}, "k must be float8_e4m3fn [S_kv, Di=64], got float8_e4m3fn [16, 128]"),
    ({"weights": torch.zeros(S, HI).bfloat16()}, "weights must be float32 [S, Hi], got bfloat16 [4, 8]"),
    ({"weights": torch.zeros(HI, S)}, "weights must be float32 [S=4, Hi=8], got float32 [8, 4]"),
    ({"starts": torch.zeros(S).long()}, "starts must be int32 [S], got int64 [4]"),
    ({"starts": torch.zeros(S + 1).int()}, "starts must be int32 [S=4], got int32 [5]"),
    ({"ends": torch.zeros(S, 1).int()}, "ends must be int32 [S], got int32 [4, 1]"),
    ({"ends": torch.zeros(0).int()}, "ends must be int32 [S=4], got int32 [0]"),
    ({"k_scale": None}, "k_scale must be float32 [S_kv] beside float8_e4m3fn, got None"),
    ({"k_scale": torch.ones(S_KV).bfloat16()}, "k_scale must be float32 [S_kv], got bfloat16 [16]"),
    ({"k_scale": torch.ones(S_KV, 1)}, "k_scale must be float32 [S_kv], got float32 [16, 1]"),
    ({"k_scale": torch.ones(S)}, "k_scale must be float32 [S_kv=16], got float32 [4]"),
    (
        scoring_arguments(torch.bfloat16, k_scale=torch.ones(S_KV)),
        "k_scale must be None beside bfloat16, got float32 [16]",
    ),
    (
        {"q": torch.zeros(S, 12, DI).to(FP8), "weights": torch.zeros(S, 12)},
        "q's heads must be 8, 16, 32 or 64, got 12",
    ),
    (
        {"q": torch.zeros(S, 0, DI).to(FP8), "weights": torch.zeros(S, 0)},
        "q's heads must be 8, 16, 32 or 64, got 0",
    ),
    (
        {"q": torch.zeros(S, HI, 96).to(FP8), "k": torch.zeros(S_KV, 96).to(FP8)},
        "q's columns must be 64 or 128, got 96",
    ),
]
TOPK_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"topk": 0}, "topk must be from 1 to 4096, got 0"),
    ({"topk": -1}, "topk must be from 1 to 4096, got -1"),
    ({"topk": 4097}, "topk must be from 1 to 4096, got 4097"),
]
SELECTING_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(S, S_KV).half()}, "logits must be float32 or bfloat16 [R, C], got float16 [4, 16]"),
    ({"logits": torch.zeros(S_KV)}, "logits must be float32 or bfloat16 [R, C], got float32 [16]"),
    ({"starts": torch.zeros(S)}, "starts must be int32 [R], got float32 [4]"),
    ({"starts": torch.zeros(1).int()}, "starts must be int32 [R=4], got int32 [1]"),
    ({"ends": torch.zeros(S).long()}, "ends must be int32 [R], got int64 [4]"),
    ({"ends": torch.zeros(S + 1).int()}, "ends must be int32 [R=4], got int32 [5]"),
    *TOPK_ERRORS,
]
ERRORS = [
    *(("indexer_logits", *case) for case in SCORING_ERRORS),
    *(("indexer_topk", *case) for case in SCORING_ERRORS + TOPK_ERRORS),
    *(("topk_select", *case) for case in SELECTING_ERRORS),
]
OPS = ("indexer_logits", "topk_select", "indexer_topk")


@pytest.mark.parametrize("call", [cpu, fake])
@pytest.mark.parametrize(("op", "changes", "message"), ERRORS, ids=[f"{op}: {text}" for op, _, text in ERRORS])
def test_errors(call: Callable[..., Any], op: str, changes: dict[str, Any], message: str) -> None:
    assert_error(partial(call, op), op, arguments(op, **changes), message)


def test_dtypes_of_the_cpu_alone() -> None:
    """fp32 and float64 go no further than the CPU; weights are as precise as q."""
    with pytest.raises(RuntimeError, match=r"q must be float8_e4m3fn or bfloat16 .*, got float32"):
        fake("indexer_logits", **scoring_arguments(torch.float32))
    with pytest.raises(RuntimeError, match=r"logits must be float32 or bfloat16 .*, got float64"):
        fake("topk_select", **arguments("topk_select", logits=torch.zeros(S, S_KV).double()))
    with pytest.raises(RuntimeError, match=r"weights must be float64 \[S, Hi\], got float32"):
        cpu("indexer_logits", **scoring_arguments(torch.float64, weights=torch.zeros(S, HI)))


@pytest.mark.parametrize(
    ("op", "first", "name"),
    [("indexer_logits", "q", "k"), ("indexer_topk", "q", "k"), ("topk_select", "logits", "starts")],
)
def test_a_mix_of_devices(op: str, first: str, name: str) -> None:
    args = arguments(op)
    with FakeTensorMode(allow_non_fake_inputs=True):
        args[first] = to_fake_cuda(args[first])
        with pytest.raises(RuntimeError, match=f"{op}: {name} must be on the device of {first}, cuda:0, got cpu"):
            cpu(op, **args)


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
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    overload = getattr(torch.ops.dsa, op).default
    if op == "topk_select":
        args = arguments(op, logits=torch.randn(S, S_KV).to(torch.float32 if dtype == FP8 else dtype))
    else:
        args = arguments(op) | scoring_arguments(dtype)
    if dtype != FP8:
        args = {
            name: value.requires_grad_() if name in ("q", "k", "weights", "logits") else value
            for name, value in args.items()
        }
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype != FP8:  # torch.allclose, with which it looks for changed arguments, does not know it
        tests.append("test_schema")
    torch.library.opcheck(overload, (), args, test_utils=tests)


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


def test_any_strides_on_the_cpu() -> None:
    logits = torch.randn(S, S_KV)
    args = arguments("topk_select")
    args.pop("logits")
    expected = cpu("topk_select", logits=logits, **args)
    results = cpu("topk_select", logits=logits.T.contiguous().T, **args)
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


@pytest.mark.parametrize("op", ["topk_select", "indexer_topk"])
def test_selections_have_no_gradient(op: str) -> None:
    args = arguments(op)
    name = "logits" if op == "topk_select" else "weights"
    args[name] = args[name].requires_grad_()
    assert not any(result.requires_grad for result in cpu(op, **args))


def test_gradcheck() -> None:
    args = scoring_arguments(torch.float64)
    leaves = [args[name].requires_grad_() for name in ("q", "k", "weights")]

    def call(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        logits = dsa_ext.indexer_logits(q, k, weights, args["starts"], args["ends"])
        return logits.masked_fill(logits == -torch.inf, 0)  # differences of -inf are NaN

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_partial_gradients() -> None:
    """Only one input wants a gradient; it is that of all together."""
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


def loss(inputs: IndexerInputs) -> Tensor:
    """The softmax of the scores against the keys that the same scores select."""
    logits = dsa_ext.indexer_logits(inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke)
    indices, values = dsa_ext.topk_select(logits, inputs.ks, inputs.ke, K)
    selected = logits.gather(1, indices.clamp(min=0).long()) + torch.where(indices < 0, -torch.inf, 0.0)
    others, _ = dsa_ext.indexer_topk(inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke, K)
    return (selected.logsumexp(1) - logits.logsumexp(1)).sum() + values.sum() + others.sum()


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


def test_compile_without_gradients() -> None:
    torch._dynamo.reset()
    args = scoring_arguments()
    k_scale = args.pop("k_scale")

    def select(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return dsa_ext.indexer_topk(*tensors, K, k_scale=k_scale)

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args.values()), select(*args.values()))


@pytest.mark.parametrize("op", ["indexer_logits", "indexer_topk"])
def test_flop_formula(op: str) -> None:
    args = arguments(op)
    with FlopCounterMode(display=False) as counter:
        cpu(op, **args)
    counts = counter.get_flop_counts()["Global"]
    assert counts == {getattr(torch.ops.dsa, op): 2 * S * HI * S_KV * DI}
