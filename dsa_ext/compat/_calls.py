"""What the modules of this package share: calls without gradients, and checks of arguments under their names here."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsa_ext.ops._checks import describe
from dsa_ext.ops._library import is_transformed, refuse_tangents

_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def without_gradient(op: Any, *args: Any) -> Any:
    """The results of an operator. They have no gradient."""
    if is_compiling():
        return op(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))
    if is_transformed():
        refuse_tangents(op._opname, args)
    with _BelowAutograd():
        return op._op(*args)


def fail(function: str, name: str, expected: str, got: Any) -> NoReturn:
    raise RuntimeError(f"{function}: {name} must be {expected}, got {_shown(got)}")


def _shown(value: Any) -> str:
    """Tensors, also those in tuples and lists, by their dtype and sizes: their numbers may be on a GPU."""
    if isinstance(value, (tuple, list)):
        parts = ", ".join(map(_shown, value))
        return f"({parts})" if isinstance(value, tuple) else f"[{parts}]"
    return describe(value) if isinstance(value, Tensor) else str(value)


def check_tensors(function: str, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            fail(function, name, "a tensor", type(tensor).__name__)


def check_paged(function: str, name: str, cache: Tensor) -> None:
    if cache.dim() != 4 or cache.shape[2] != 1:
        fail(function, name, "[blocks, page, 1, columns]", cache)


def check_lengths(function: str, name: str, lengths: Any) -> None:
    """One for each sequence or query."""
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.dtype != torch.int32:
        fail(function, name, "int32 of one dimension", lengths)
