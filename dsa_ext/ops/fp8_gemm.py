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
#: The kernel of decoding, which streams b once; b's rows may be of any number.
library.define("_fp8_gemm_few_rows(Tensor a, Tensor a_s, Tensor b, Tensor b_s) -> Tensor")
explain_missing_cuda("_fp8_gemm_few_rows")
_FEW_ROWS = 64


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


def _cuda(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    """cuBLASLt's product for many rows, and the kernel for few ones, or where that cannot be."""
    _check(a, a_s, b, b_s)
    if a.shape[0] <= _FEW_ROWS:
        return torch.ops.dsa._fp8_gemm_few_rows.default(a, a_s, b, b_s)
    if b.shape[0] % 16 != 0:
        parts = zip(a.split(_FEW_ROWS), a_s.split(_FEW_ROWS), strict=True)
        return torch.cat([torch.ops.dsa._fp8_gemm_few_rows.default(*part, b, b_s) for part in parts])
    if torch.version.cuda is None or tuple(map(int, torch.version.cuda.split(".")[:2])) < (12, 9):
        fail(_OP, f"more than {_FEW_ROWS} rows need a torch for CUDA 12.9 or later, got {torch.version.cuda}")
    types = torch.nn.functional.ScalingType
    rows, blocks = a_s.shape
    if a_s.stride() != (1, rows):
        a_s = a_s.mT.contiguous().mT
    if b_s.stride() != (-(-blocks // 4) * 4, 1):
        b_s = torch.nn.functional.pad(b_s, (0, -blocks % 4))[:, :blocks]
    scales = (a_s, types.BlockWise1x128, b_s.mT, types.BlockWise128x128)
    out: Tensor = torch.nn.functional.scaled_mm(a.contiguous(), b.contiguous().mT, *scales, output_dtype=torch.bfloat16)
    return out


def _fake(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    _check(a, a_s, b, b_s)
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


library.impl(_OP, _cpu, "CPU")
library.impl(_OP, _cuda, "CUDA")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)


@register_flop_formula(torch.ops.dsa.fp8_gemm)
def _flops(
    a_shape: torch.Size, _a_s: torch.Size, b_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any
) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]
