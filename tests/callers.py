"""Ways to call an operator of `torch.ops.dsa` without a GPU, for tests of its checks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsa_ext import _native

Caller = Callable[..., Any]


def callers(op: str) -> tuple[Caller, Caller, Caller]:
    """Calls of `op` by keyword: the compiled library's checks, the CPU implementation, and fake CUDA tensors."""
    return partial(native, op), partial(cpu, op), partial(fake, op)


def native(op: str, **args: Any) -> Any:
    """The checks of the compiled library, reached with CPU tensors."""
    if _native.library is None:
        pytest.skip(f"no kernels: {_native.missing_reason}")
    overload = getattr(torch.ops.dsa, op).default
    required = [args.pop(a.name) for a in overload._schema.arguments if not a.has_default_value()]
    return overload.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *required, **args)


def cpu(op: str, **args: Any) -> Any:
    return getattr(torch.ops.dsa, op)(**args)


def fake(op: str, **args: Any) -> Any:
    """Fake tensors on a CUDA device that need not exist."""
    with FakeTensorMode():
        return cpu(op, **{name: to_fake_cuda(value) for name, value in args.items()})


def to_fake_cuda(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def assert_error(call: Caller, op: str, args: dict[str, Any], message: str) -> None:
    """`call` with these arguments fails with this message, after the operator's name."""
    with pytest.raises(RuntimeError) as caught:
        call(**args)
    assert str(caught.value).splitlines()[0] == f"dsa::{op}: {message}"
