"""What is no tensor where a tensor is required, on the CPU: the errors of all operators and public functions."""

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from callers import assert_error, cpu, fake
from modes import Args, autocast, with_leaves
from torch import Tensor

import dsa_ext
from dsa_ext import _native, functional, ops
from dsa_ext.testing.calls import ORDINARY


def required(op: str) -> list[str]:
    """The names of the tensors that the operator requires."""
    arguments = getattr(torch.ops.dsa, op).default._schema.arguments
    return [argument.name for argument in arguments if str(argument.type) == "Tensor"]


#: The operators that the dispatcher finds by another argument if one is None.
OPERATORS = [op for op in ops.OPERATORS if len(required(op)) > 1]
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "ordinary": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": autocast,
}
all_modes = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize("op", OPERATORS)
@all_modes
def test_operators_name_what_is_none(op: str, mode: str) -> None:
    for name in required(op):
        with MODES[mode]():
            assert_error(partial(cpu, op), op, ORDINARY[op]() | {name: None}, f"{name} must be a tensor, got None")


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("caller", [cpu, fake])
def test_operators_name_what_is_none_beside_leaves(op: str, caller: Callable[..., Any]) -> None:
    for name in required(op):
        args = with_leaves(op)[0] | {name: None}
        assert_error(partial(caller, op), op, args, f"{name} must be a tensor, got None")


@pytest.mark.skipif(_native.library is None, reason=f"no kernels: {_native.missing_reason}")
@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("leaves", [False, True])
def test_cuda_calls_name_what_is_none(op: str, leaves: bool) -> None:
    """From the autograd layer on, reached with CPU tensors. The CUDA implementation itself does not get that far."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    overload = getattr(torch.ops.dsa, op).default

    def call(**args: Any) -> Any:
        needed = [args.pop(a.name) for a in overload._schema.arguments if not a.has_default_value()]
        return overload.redispatch(keys, *needed, **args)

    for name in required(op):
        args = with_leaves(op)[0] if leaves else ORDINARY[op]()
        assert_error(call, op, args | {name: None}, f"{name} must be a tensor, got None")


# ---- public functions


#: Functions that are no operators, and their arguments.
OTHERS: dict[str, Args] = {
    "prepare_weight": {"w": torch.ones(128, 128)},
    "hadamard_transform": {"x": torch.ones(3, 8)},
    "quantize_indexer": {"q": torch.ones(3, 8, 64), "k": torch.ones(5, 64)},
}


def operator_of(function: str) -> str:
    return function if function in ORDINARY else f"{function}_fwd"


def tensors_of(function: str) -> dict[str, bool]:
    """The arguments that are tensors, and whether they are optional."""
    parameters = inspect.signature(getattr(dsa_ext, function)).parameters
    kinds = {name: str(parameter.annotation) for name, parameter in parameters.items()}
    return {name: "None" in kind for name, kind in kinds.items() if "Tensor" in kind}


def arguments_of(function: str) -> Args:
    if function in OTHERS:
        return OTHERS[function]
    known = inspect.signature(getattr(dsa_ext, function)).parameters
    return {name: value for name, value in ORDINARY[operator_of(function)]().items() if name in known}


def without_batch(args: Args) -> Args:
    return {name: value[0] if isinstance(value, Tensor) else value for name, value in args.items()}


def assert_each_is_named(function: str, args: Args) -> None:
    """The function says of each tensor that it is none, in its own words or in those of PyTorch's dispatcher."""
    op = function if function in OTHERS else operator_of(function)
    for name, optional in tensors_of(function).items():
        same_shape = numpy.ones(args[name].shape) if name in args else numpy.ones(3)
        for value in ([1.0], 1.0, numpy.ones(3), same_shape, *([] if optional else [None])):
            with pytest.raises(RuntimeError) as caught:
                getattr(dsa_ext, function)(**args | {name: value})
            kind = "None" if value is None else type(value).__name__
            own = f"dsa::{op}: {name} must be a tensor, got {kind}"
            other = f"dsa::{op}() Expected a value of type '{'Optional[Tensor]' if optional else 'Tensor'}' for"
            other += f" argument '{name}' but instead found type '{kind}'."
            unlike = rf"dsa::{op}: {name} must have the shape \[.*\], of scores, got \[3\]"
            message = str(caught.value).splitlines()[0]
            assert message in (own, other) or re.fullmatch(unlike, message), (name, kind, message)


@pytest.mark.parametrize("function", functional.__all__)
@all_modes
def test_functions_name_what_is_no_tensor(function: str, mode: str) -> None:
    with MODES[mode]():
        assert_each_is_named(function, arguments_of(function))


@pytest.mark.parametrize("function", ["sparse_mla", "attn_dist"])
@all_modes
def test_functions_without_batch_name_what_is_no_tensor(function: str, mode: str) -> None:
    with MODES[mode]():
        assert_each_is_named(function, without_batch(arguments_of(function)))


def test_the_loss_of_a_number() -> None:
    with pytest.raises(RuntimeError, match=r"^dsa::indexer_loss: scores must be \[.., K\], got float32 \[\]$"):
        dsa_ext.indexer_loss(torch.tensor(1.0), torch.tensor(1.0))
