"""Argument checks of the CPU and fake implementations, with the same messages as the checks in csrc/."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

#: The reference computes in fp32 or float64, so the CPU takes these too where a kernel takes bf16.
_CPU_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def fail(op: str, text: str) -> NoReturn:
    raise RuntimeError(f"dsa::{op}: {text}") from None


def describe(tensor: Any) -> str:
    """For example "int64 [1, 4096, 2048]"; the type of what is no tensor."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    sizes = ", ".join(str(size) for size in tensor.shape)
    return f"{dtype_name(tensor.dtype)} [{sizes}]"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_is_tensor(op: str, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        fail(op, f"{name} must be a tensor, got {None if value is None else type(value).__name__}")


def check_are_tensors(op: str, args: Sequence[Any]) -> None:
    """Checks the types of the arguments, in the order of the schema, that the schema declares as tensors."""
    for (name, required), value in zip(_tensor_arguments(op), args, strict=False):
        if required or (required is not None and value is not None):
            check_is_tensor(op, name, value)


@cache
def _tensor_arguments(op: str) -> list[tuple[str, bool | None]]:
    """For each argument its name, and whether it is a required tensor; None if it is no tensor."""
    required = {"Tensor": True, "Optional[Tensor]": False}
    arguments = getattr(torch.ops.dsa, op).default._schema.arguments
    return [(argument.name, required.get(str(argument.type))) for argument in arguments]


def check_sizes(owner: str, **sizes: Any) -> None:
    """Checks sizes that the class `owner` was given."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{owner}: {name} must be a positive int, got {size!r}")


def check_tensor(
    op: str, name: str, tensor: Tensor, dtype: torch.dtype | tuple[torch.dtype, ...], **dims: int | None
) -> None:
    """Checks dtype, rank and sizes. `dims` maps the letter of each dimension to its size, None if any is allowed."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    names = " or ".join(map(dtype_name, dtypes))
    if tensor.dtype not in dtypes or tensor.dim() != len(dims):
        fail(op, f"{name} must be {names} [{', '.join(dims)}], got {describe(tensor)}")
    if any(size is not None and got != size for size, got in zip(dims.values(), tensor.shape, strict=True)):
        expected = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in dims.items())
        fail(op, f"{name} must be {names} [{expected}], got {describe(tensor)}")


def differentiable_dtype(q: Tensor) -> torch.dtype:
    """Required dtype of a differentiable operator's queries and keys: bf16, or on the CPU q's dtype if supported."""
    return q.dtype if q.device.type == "cpu" and q.dtype in _CPU_DTYPES else torch.bfloat16


def check_scale(op: str, sm_scale: float | None) -> None:
    """sm_scale must be finite in fp32, also when multiplied by log2(e): the kernels compute exponentials in base 2."""
    if sm_scale is not None and not abs(sm_scale) <= 2.0**127:
        fail(op, f"sm_scale must be from -2^127 to 2^127, got {sm_scale:g}")


def check_positions(op: str, q_start: int, starts: Tensor | None, ends: Tensor | None) -> None:
    """q_start must be small enough that no query's position overflows. `starts` and `ends` replace it."""
    if q_start < 0 or q_start > 2**62:
        fail(op, f"q_start must be from 0 to 2^62, got {q_start}")
    if (starts is None) != (ends is None):
        fail(op, "starts and ends must be given together")
    if starts is not None and q_start != 0:
        fail(op, f"q_start must be 0 with starts and ends, got {q_start}")


def check_same_device(op: str, other_name: str, other: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != other.device:
            fail(op, f"{name} must be on the device of {other_name}, {other.device}, got {tensor.device}")
