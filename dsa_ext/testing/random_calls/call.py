"""A call with its arguments: how to run it, how to check its results, and which results repeat bitwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsa_ext.testing.random_calls.draw import Draw
from dsa_ext.testing.tolerances import check

Args = dict[str, Any]
Results = tuple[Tensor, ...]


@dataclass
class Call:
    target: str
    args: Args
    run: Callable[[Args], Results]
    #: Raises AssertionError if results are wrong.
    judge: Callable[[Results, Args], object]
    #: Indices of results that are summed in no fixed order: their last bits may differ from call to call.
    unordered: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    #: Whether it repeats bitwise only if it is run the same way: on the same stream, in a CUDA graph or not.
    same_way: bool = False

    def describe(self) -> str:
        """The target, its arguments, and the notes on what was drawn."""
        args = ", ".join(f"{name}={_describe(value)}" for name, value in self.args.items() if value is not None)
        return f"{self.target}({args})" + (f"  [{'; '.join(self.notes)}]" if self.notes else "")


def operator_call(op: str, args: Args, draw: Draw) -> Call:
    """A call of torch.ops.dsa.<op>, rarely with random bits in place of its numbers."""
    draw.garbage(args)

    def judge(results: Results, a: Args) -> None:
        if draw.judged:
            check(op, results, a)

    # The gradient of the keys is the second result of all operators that have this argument.
    unordered = () if args.get("deterministic", True) else (1,)
    return Call(op, args, lambda a: run_operator(op, a), judge, unordered, draw.notes)


def run_operator(op: str, args: Args) -> Results:
    result = getattr(torch.ops.dsa, op)(**args)
    return (result,) if isinstance(result, Tensor) else tuple(result)


def leaf(tensor: Tensor) -> Tensor:
    """The same memory as a leaf that requires a gradient."""
    return tensor.detach().requires_grad_()


def gradients(results: list[Tensor], upstream: list[Tensor | None], leaves: list[Tensor]) -> Results:
    """The gradients of the leaves, from the results that have an upstream gradient."""
    pairs = [(r, g) for r, g in zip(results, upstream, strict=True) if g is not None]
    return torch.autograd.grad([r for r, _ in pairs], leaves, [g for _, g in pairs])


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def select(args: Args, *names: str) -> Args:
    return {name: args[name] for name in names if name in args}


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{value:g}" if isinstance(value, float) else repr(value)
    dtype = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
    strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{dtype}{list(value.shape)}{strides}"
