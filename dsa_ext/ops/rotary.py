"""An operator of the modules in dsa_ext.nn, on CUDA only: they have formulas in PyTorch for the rest."""

from functools import cache
from typing import Any

import torch

from dsa_ext.ops._library import library

library.define(
    "_write_rotated(Tensor(a!) out, Tensor x, Tensor cos, Tensor sin, int first, bool interleaved, "
    "bool interleaved_out) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _nothing(*_: Any) -> None:
    """The results of an operator that returns nothing."""


torch.library.register_fake("dsa::_write_rotated", _nothing, lib=library)


@cache
def write_rotated_is_compiled() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("dsa::_write_rotated", "CUDA")
