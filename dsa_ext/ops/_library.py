"""What the operators' files share: the torch.library fragment, the error of a missing kernel, and autograd's part."""

from typing import Any, NoReturn

import torch

from dsa_ext import _native

#: Schemas are defined here, in Python, so that a pure-Python install has the operators too; the compiled library adds
#: the CUDA implementations.
library = torch.library.Library("dsa", "DEF")


def explain_missing_cuda(op: str) -> None:
    """Where the compiled library is missing, or older than `op`, makes a CUDA call of `op` say so."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"dsa::{op}", "CUDA"):
        return

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise _native.missing_kernels_error(op)

    library.impl(op, missing, "CUDA")


def gradient_wanted(*args: Any) -> bool:
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def use_autograd_function(op: str, function: type[torch.autograd.Function]) -> None:
    """Registers `function` as what `op` calls where a gradient is wanted: with the keys below autograd, and the
    arguments but for trailing ones that equal their defaults, which the dispatcher leaves out."""
    redispatch = getattr(torch.ops.dsa, op).default.redispatch

    def autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        keyset = keyset & torch._C._after_autograd_keyset
        if gradient_wanted(*args):
            return function.apply(keyset, *args)
        return redispatch(keyset, *args)

    # torch.library.register_autograd does the same at more than twice the cost a call.
    library.impl(op, autograd, "Autograd", with_keyset=True)


def follow_deterministic_switch(op: str, defaults: tuple[Any, ...]) -> None:
    """Makes torch.use_deterministic_algorithms imply `deterministic`, the last argument of `op`, whose results have no
    gradients. `defaults` are those of the arguments that the dispatcher leaves out where they equal them."""
    overload = getattr(torch.ops.dsa, op).default
    required = len(overload._schema.arguments) - len(defaults)
    redispatch = overload.redispatch

    def above_devices(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled():
            args = args + defaults[len(args) - required :]
            args = (*args[:-1], True)
        return redispatch(keyset & torch._C._after_autograd_keyset, *args)

    library.impl(op, above_devices, "Autograd", with_keyset=True)


def without_gradient(op: str) -> None:
    """Registers `op` with autograd as one whose results never require a gradient."""
    redispatch = getattr(torch.ops.dsa, op).default.redispatch

    def below_autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return redispatch(keyset & torch._C._after_autograd_keyset, *args)

    library.impl(op, below_autograd, "Autograd", with_keyset=True)
