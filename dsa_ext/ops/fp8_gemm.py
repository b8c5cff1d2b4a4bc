"""torch.ops.dsa.fp8_gemm: schema, checks, CPU and fake implementation, FLOP formula. It has no gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, describe, fail
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, without_gradient
from dsa_ext.reference.fp8 import BLOCK

_OP = "fp8_gemm"
_LIBRARY_IS_THERE = torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)

library.define(
    "fp8_gemm(Tensor a, Tensor a_s, Tensor b, Tensor b_s) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
#: What the operator calls on a GPU for more rows than its kernel is for. Returns one dimension where it cannot.
library.define("_fp8_gemm_many_rows(Tensor a, Tensor a_s, Tensor b, Tensor b_s) -> Tensor")


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


def _many_rows(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    """cuBLASLt's product, which wants rows of a in fours, none that overlap, and scales in layouts of its own."""
    if not _LIBRARY_IS_THERE:
        return a.new_empty(0)
    a, b = (x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous() for x in (a, b))
    rows, missing = a.shape[0], -a.shape[0] % 4
    if missing:
        a = pad(a.view(torch.uint8), (0, 0, 0, missing)).view(a.dtype)
        a_s = pad(a_s, (0, 0, 0, missing))
    if a_s.stride() != (1, a_s.shape[0]):
        a_s = a_s.mT.contiguous().as_strided(a_s.shape, (1, a_s.shape[0]))
    types = torch.nn.functional.ScalingType
    scales = (a_s, types.BlockWise1x128, _in_fours(b_s).mT, types.BlockWise128x128)
    out: Tensor = torch.nn.functional.scaled_mm(a, b.mT, *scales, output_dtype=torch.bfloat16)
    return out[:rows] if missing else out


def _in_fours(b_s: Tensor) -> Tensor:
    """Rows as prepare_weight has them in memory: with what is behind them, up to a multiple of 4."""
    rows, blocks = b_s.shape
    padded = -(-blocks // 4) * 4
    if padded == blocks:
        return b_s.contiguous()
    end = b_s.storage_offset() + rows * padded
    if b_s.stride() == (padded, 1) and end * b_s.element_size() <= b_s.untyped_storage().nbytes():
        return b_s.as_strided((rows, padded), (padded, 1))
    return pad(b_s, (0, padded - blocks)).contiguous()


def _fake(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    _check(a, a_s, b, b_s)
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


library.impl(_OP, _cpu, "CPU")
library.impl("_fp8_gemm_many_rows", _many_rows, "CUDA")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)
follow_autocast(_OP)


@register_flop_formula(torch.ops.dsa.fp8_gemm)
def _flops(
    a_shape: torch.Size, _a_s: torch.Size, b_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any
) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]
