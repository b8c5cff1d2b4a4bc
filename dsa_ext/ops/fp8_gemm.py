"""torch.ops.dsa.fp8_gemm: schema, checks, CPU and fake implementation, FLOP formula. It has no gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, describe, fail
from dsa_ext.ops._library import explain_missing_cuda, library, without_gradient
from dsa_ext.reference.fp8 import BLOCK

_OP = "fp8_gemm"

library.define(
    "fp8_gemm(Tensor a, Tensor a_s, Tensor b, Tensor b_s) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> None:
    check_tensor(_OP, "a", a, torch.float8_e4m3fn, M=None, K=None)
    rows, columns = a.shape
    if columns % BLOCK != 0:
        fail(_OP, f"a's columns must be a multiple of {BLOCK}, got {describe(a)}")
    check_tensor(_OP, "b", b, torch.float8_e4m3fn, N=None, K=columns)
    blocks = columns // BLOCK
    check_tensor(_OP, "a_s", a_s, torch.float32, M=rows, Kb=blocks)
    check_tensor(_OP, "b_s", b_s, torch.float32, Nb=(b.shape[0] + BLOCK - 1) // BLOCK, Kb=blocks)
    check_same_device(_OP, "a", a, a_s=a_s, b=b, b_s=b_s)


def _cpu(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    _check(a, a_s, b, b_s)
    return reference.fp8_gemm(a, a_s, b, b_s)


def _fake(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    _check(a, a_s, b, b_s)
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)


@register_flop_formula(torch.ops.dsa.fp8_gemm)
def _flops(
    a_shape: torch.Size, _a_s: torch.Size, b_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any
) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]
