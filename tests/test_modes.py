"""Modes of PyTorch in which operators may be used, on the CPU: the deterministic switch, derivatives that do not exist,
torch.func, autocast, the FLOP counter."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from modes import DIFFERENTIABLE, Args, assert_same, autocast, call, real, total, with_leaves
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import ops
from dsa_ext.nn import SparseMLA
from dsa_ext.testing.calls import ORDINARY

all_operators = pytest.mark.parametrize("op", ops.OPERATORS)


def schema_names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.dsa, op).default._schema.arguments]


# ---- the deterministic switch

SWITCHED = [op for op in ops.OPERATORS if op.endswith("_bwd") and "deterministic" in schema_names(op)]


@contextmanager
def flags_seen(op: str) -> Iterator[list[bool]]:
    """The values of `deterministic` in the calls that reach the CPU implementation of `op`."""
    seen: list[bool] = []
    implementation = ops.OPERATORS[op].implementation
    place = schema_names(op).index("deterministic")

    def spy(*args: Any) -> Any:
        seen.append(len(args) > place and args[place])
        return implementation(*args)

    library = torch.library.Library("dsa", "IMPL")
    library.impl(op, spy, "CPU", allow_override=True)
    try:
        yield seen
    finally:
        library._destroy()


def test_the_flag_is_last() -> None:
    """The implementation of the switch relies on it."""
    assert len(SWITCHED) == 3
    for op in SWITCHED:
        assert schema_names(op)[-1] == "deterministic"


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ordinary": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("op", SWITCHED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", [{}, {"deterministic": False}, {"deterministic": True}], ids=str)
def test_the_switch_implies_the_flag(op: str, mode: str, given: Args, deterministic_algorithms: None) -> None:
    with MODES[mode](), flags_seen(op) as seen:
        args = ORDINARY[op]() | given
        call(op, args)
    assert seen == [True]


@pytest.mark.parametrize("op", SWITCHED)
def test_without_the_switch_the_flag_is_as_given(op: str) -> None:
    with flags_seen(op) as seen:
        for given in ({}, {"deterministic": True}):
            call(op, ORDINARY[op]() | given)
    assert seen == [False, True]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_sparse_mla_follows_the_switch_in_the_forward_pass(on: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    args = ORDINARY["sparse_mla_fwd"]()
    tensors = args["q"], args["kv"], args["indices"]
    function = (
        torch.compile(dsa_ext.sparse_mla, backend="aot_eager", fullgraph=True) if compiled else dsa_ext.sparse_mla
    )
    with flags_seen("sparse_mla_fwd") as seen:
        function(*tensors)
        torch.use_deterministic_algorithms(on)
        try:
            function(*tensors)
        finally:
            torch.use_deterministic_algorithms(False)
        function(*tensors, deterministic=True)
    assert seen == [False, on, True]


def leaves_of(args: Args, *names: str) -> list[Tensor]:
    """Replaces these arguments in `args` by fp32 leaves that require gradients, and returns them."""
    args |= {name: args[name].float().requires_grad_() for name in names}
    return [args[name] for name in names]


@pytest.fixture(params=[False, True], ids=["off", "on"])
def switch(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("given", [False, True], ids=["", "argument"])
@pytest.mark.parametrize("op", ["sparse_mla_fwd", "indexer_scores", "indexer_logits"])
def test_the_switch_and_the_argument_in_backward(op: str, given: bool, compiled: bool, switch: bool) -> None:
    torch._dynamo.reset()
    args = ORDINARY[op]() | {"deterministic": given}
    leaves = leaves_of(args, *({"q", "k", "kv"} & args.keys()))
    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with flags_seen(op.removesuffix("_fwd") + "_bwd") as seen:
        out = function(op, args)[0]
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert seen == [switch or given]


def test_the_switch_between_forward_and_backward() -> None:
    args = ORDINARY["sparse_mla_fwd"]()
    leaves = leaves_of(args, "q", "kv")
    out = call("sparse_mla_fwd", args)[0]
    torch.use_deterministic_algorithms(True)
    try:
        with flags_seen("sparse_mla_bwd") as seen:
            torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True]


@pytest.mark.parametrize("mode", ["ordinary", "no_grad", "inference_mode"])
def test_the_switch_within_an_operator_of_operators(mode: str, deterministic_algorithms: None) -> None:
    with MODES[mode](), flags_seen("indexer_logits_bwd") as seen:
        call("indexer_dense_loss", ORDINARY["indexer_dense_loss"]())
    assert seen == [True]


@pytest.mark.parametrize("given", [False, True])
def test_the_argument_of_functions(given: bool) -> None:
    for name, place in {"sparse_mla": "sparse_mla_fwd", "indexer_scores": "indexer_scores"}.items():
        args = ORDINARY[place]()
        leaves = leaves_of(args, *({"q", "k", "kv"} & args.keys()))
        with flags_seen(place.removesuffix("_fwd") + "_bwd") as seen:
            getattr(dsa_ext, name)(**args, deterministic=given).sum().backward(inputs=leaves)
        assert seen == [given]
    for name in ("indexer_logits", "indexer_dense_loss"):
        args = ORDINARY[name]()
        args.pop("gradients", None)
        leaves = [args[name].requires_grad_() for name in ("q", "k")]
        with flags_seen("indexer_logits_bwd") as seen:
            getattr(dsa_ext, name)(**args, deterministic=given).sum().backward(inputs=leaves)
        assert seen == [given]


def test_the_switch_in_the_warm_up(deterministic_algorithms: None) -> None:
    indexer = {"heads": 8, "head_dim": 64, "precision": "bf16"}
    layer = SparseMLA(48, 4, q_lora_rank=32, nope_dim=16, v_dim=24, topk=5, phase="warmup", indexer=indexer)
    with flags_seen("indexer_logits_bwd") as dense, flags_seen("sparse_mla_bwd") as sparse:
        out, loss, _ = layer(torch.randn(2, 9, 48))
        (out.sum() + loss).backward()
    assert dense == [True, True]
    assert sparse == [True]


# ---- derivatives that do not exist


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_second_derivatives_are_errors(op: str) -> None:
    """A gradient penalty: the incoming gradient is a constant, and the gradient is one of several terms of a loss."""
    args, names = with_leaves(op)
    for name in names:
        (gradient,) = torch.autograd.grad(total(call(op, args)), args[name], create_graph=True)
        assert gradient.requires_grad, name
        loss = gradient.float().square().sum() + sum(args[other].float().sum() for other in names)
        for other in names:
            with pytest.raises(RuntimeError, match=f"^dsa::{DIFFERENTIABLE[op]}: second derivatives .* not supported"):
                torch.autograd.grad(loss, args[other], retain_graph=True)
        with pytest.raises(RuntimeError, match=f"^dsa::{DIFFERENTIABLE[op]}: second derivatives .* not supported"):
            loss.backward()


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_graph_of_gradients_changes_none(op: str) -> None:
    args, names = with_leaves(op)
    leaves = [args[name] for name in names]
    expected = torch.autograd.grad(total(call(op, args)), leaves)
    got = torch.autograd.grad(total(call(op, args)), leaves, create_graph=True)
    assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("op", sorted(set(DIFFERENTIABLE.values()) - {"indexer_loss", "indexer_dense_loss"}))
def test_gradients_of_gradients_are_errors(op: str) -> None:
    """Also when the operator that computes gradients is called directly."""
    args, _ = with_leaves(op)
    for result in call(op, args):
        if result.numel() > 0:
            with pytest.raises(RuntimeError, match=f"^dsa::{op}: second derivatives"):
                result.sum().backward(retain_graph=True)


@pytest.mark.parametrize("op", ["attn_dist", "indexer_topk", "topk_select", "block_select", "act_quant", "fp8_gemm"])
def test_what_has_no_gradient_requires_none(op: str) -> None:
    args, _ = with_leaves(op)
    assert not any(result.requires_grad for result in call(op, args))


@all_operators
def test_forward_mode_is_an_error(op: str) -> None:
    args = ORDINARY[op]()
    error = pytest.raises(RuntimeError, match=f"^dsa::{op}: forward-mode differentiation")
    for name in real(args):
        tangent = torch.ones_like(args[name])
        with forward_ad.dual_level(), torch.no_grad(), error:
            call(op, args | {name: forward_ad.make_dual(args[name], tangent)})
        with error:
            torch.func.jvp(lambda x, name=name: call(op, args | {name: x}), (args[name],), (tangent,))
    with forward_ad.dual_level():  # tangents of other tensors do not matter
        call(op, args)


def test_forward_mode_of_the_public_function() -> None:
    """It skips the operator's autograd layer when no gradient is required."""
    args = ORDINARY["sparse_mla_fwd"]()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"^dsa::sparse_mla_fwd: forward-mode"):
        dsa_ext.sparse_mla(**args | {"q": forward_ad.make_dual(args["q"], torch.ones_like(args["q"]))})


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradient_transforms_are_errors(op: str) -> None:
    args, names = with_leaves(op)
    args = {name: value.detach() if isinstance(value, Tensor) else value for name, value in args.items()}
    for name in names:

        def loss(x: Tensor, name: str = name) -> Tensor:
            return call(op, args | {name: x})[0].float().sum()

        for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
            with pytest.raises(RuntimeError, match=f"^dsa::{op}: .*(torch.func|forward-mode)"):
                transform(loss)(args[name])


@all_operators
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop(op: str) -> None:
    args = ORDINARY[op]()
    name = next(name for name, value in args.items() if isinstance(value, Tensor))
    other = args[name].flip(0)
    got = torch.func.vmap(lambda x: call(op, args | {name: x}))(torch.stack([args[name], other]))
    for i, value in enumerate((args[name], other)):
        for a, b in zip(got, call(op, args | {name: value}), strict=True):
            torch.testing.assert_close(a[i], b, rtol=0, atol=0, equal_nan=True)


def test_vmap_keeps_gradients() -> None:
    """Autograd around vmap records them; the public function must not skip the autograd layer then either."""
    args = ORDINARY["sparse_mla_fwd"]()
    several = torch.stack([args["q"], args["q"].flip(2)]).float().requires_grad_()
    others = {name: value for name, value in args.items() if name != "q"} | {"kv": args["kv"].float()}
    for attend in (dsa_ext.sparse_mla, lambda *a, **k: torch.ops.dsa.sparse_mla_fwd(*a, **k)[0]):
        out = torch.func.vmap(lambda q, attend=attend: attend(q, **others))(several)
        (got,) = torch.autograd.grad(out.square().sum(), several)
        loop = torch.stack([dsa_ext.sparse_mla(q, **others) for q in several])
        assert torch.equal(got, torch.autograd.grad(loop.square().sum(), several)[0])


# ---- autocast


#: The arguments that autocast casts; all others are unchanged.
CAST = {
    "sparse_mla_fwd": ("q", "kv"),
    "sparse_mla_max_fwd": ("q", "kv"),
    "sparse_mha_fwd": ("q", "k", "k_rope", "v"),
    "sparse_mha_dist": ("q", "k", "k_rope"),
    "sparse_mla_decode": ("q",),
    "attn_dist": ("q", "kv"),
    "indexer_logits": ("q", "k"),
    "indexer_topk": ("q", "k"),
    "indexer_logits_paged": ("q", "k_cache"),
    "indexer_topk_paged": ("q", "k_cache"),
    "indexer_scores": ("q", "k"),
    "indexer_dense_loss": ("q", "k", "main_q", "main_kv"),
    "block_sparse_attn_fwd": ("q", "k", "v"),
    "coarse_attn_fwd": ("q", "k", "v"),
    "gated_fusion_fwd": ("fine", "coarse"),
    "mhc_pre_fwd": ("x",),
    "mhc_post_fwd": ("x", "y"),
}


@all_operators
def test_autocast_changes_nothing_within(op: str) -> None:
    args = ORDINARY[op]()
    expected = call(op, args)
    with autocast():
        assert_same(call(op, args), expected)


@pytest.mark.parametrize("op", CAST)
def test_autocast_casts(op: str) -> None:
    """Gradients have the dtype that the arguments had before the cast."""
    args, names = with_leaves(op)
    wide = args | {name: args[name].detach().float().requires_grad_(name in names) for name in CAST[op]}
    with autocast():
        got = call(op, wide)
    expected = call(op, args)
    assert_same(got, expected)
    if op in DIFFERENTIABLE:
        got = torch.autograd.grad(total(got), [wide[name] for name in names])
        expected = torch.autograd.grad(total(expected), [args[name] for name in names])
        assert all(gradient.dtype == wide[name].dtype for name, gradient in zip(names, got, strict=True))
        assert_same(tuple(gradient.float() for gradient in got), tuple(gradient.float() for gradient in expected))


@all_operators
def test_autocast_in_float16_casts_nothing(op: str) -> None:
    args = ORDINARY[op]()
    expected = call(op, args)
    with torch.autocast("cpu", torch.float16):
        assert_same(call(op, args), expected)


def test_autocast_leaves_float64() -> None:
    args = {name: t.double() if name in ("q", "kv") else t for name, t in ORDINARY["sparse_mla_fwd"]().items()}
    with autocast():
        assert call("sparse_mla_fwd", args)[0].dtype == torch.float64


def test_autocast_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    args = ORDINARY["sparse_mla_fwd"]()
    wide = args | {name: args[name].float() for name in ("q", "kv")}

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(args: Args) -> Tensor:
        with autocast():
            return dsa_ext.sparse_mla(**args)

    assert torch.equal(attend(wide), dsa_ext.sparse_mla(**args))


# ---- the FLOP counter


@all_operators
def test_operators_with_matrix_products_have_a_flop_formula(op: str) -> None:
    """Those whose CPU implementation computes any. Otherwise the counter would count nothing for them."""
    args = ORDINARY[op]()
    with FlopCounterMode(display=False) as within:
        ops.OPERATORS[op].implementation(**args)
    with FlopCounterMode(display=False) as counter:
        call(op, args)
    assert (counter.get_total_flops() > 0) == (within.get_total_flops() > 0)
