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


def without_gradient(op: str) -> None:
    """Registers `op` with autograd as one whose results never require a gradient."""
    redispatch = getattr(torch.ops.dsa, op).default.redispatch

    def below_autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return redispatch(keyset & torch._C._after_autograd_keyset, *args)

    library.impl(op, below_autograd, "Autograd", with_keyset=True)
