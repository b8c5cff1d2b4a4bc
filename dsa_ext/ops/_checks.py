"""Argument checks of the CPU and fake implementations, worded as csrc/ words them for the kernels."""

from typing import NoReturn

import torch
from torch import Tensor


def fail(op: str, text: str) -> NoReturn:
    raise RuntimeError(f"dsa::{op}: {text}")


def describe(tensor: Tensor) -> str:
    """For example "int64 [1, 4096, 2048]"."""
    sizes = ", ".join(str(size) for size in tensor.shape)
    return f"{dtype_name(tensor.dtype)} [{sizes}]"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_tensor(
    op: str, name: str, tensor: Tensor, dtype: torch.dtype | tuple[torch.dtype, ...], **dims: int | None
) -> None:
    """Checks dtype, rank and sizes. `dims` maps the letter of each dimension to its size, None where any will do."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    names = " or ".join(map(dtype_name, dtypes))
    if tensor.dtype not in dtypes or tensor.dim() != len(dims):
        fail(op, f"{name} must be {names} [{', '.join(dims)}], got {describe(tensor)}")
    if any(size is not None and got != size for size, got in zip(dims.values(), tensor.shape, strict=True)):
        expected = ", ".join(letter if size is None else f"{letter}={size}" for letter, size in dims.items())
        fail(op, f"{name} must be {names} [{expected}], got {describe(tensor)}")


def check_same_device(op: str, other_name: str, other: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != other.device:
            fail(op, f"{name} must be on the device of {other_name}, {other.device}, got {tensor.device}")
