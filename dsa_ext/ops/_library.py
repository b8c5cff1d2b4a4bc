"""What every operator's file shares: the torch.library fragment and the error of a missing kernel."""

from typing import Any, NoReturn

import torch

from dsa_ext import _native

#: Schemas are defined here, in Python, so that a pure-Python install has the operators too; the compiled library adds
#: the CUDA implementations.
library = torch.library.Library("dsa", "DEF")


def explain_missing_cuda(op: str) -> None:
    """Where the compiled library is missing, makes a CUDA call of `op` say why."""
    if _native.library is not None:
        return

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise _native.missing_kernels_error(op)

    library.impl(op, missing, "CUDA")
