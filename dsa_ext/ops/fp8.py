"""Quantization to fp8 with one scale per block, and the product of such matrices. Neither is differentiable."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, describe, fail
from dsa_ext.ops._library import library
from dsa_ext.ops._operator import Args, Operator
from dsa_ext.reference.fp8 import BLOCK

_LIBRARY_IS_THERE = torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)
_MATRICES = "Tensor a, Tensor a_s, Tensor b, Tensor b_s"


def _check_quant(args: Args) -> None:
    x = args.x
    if x.dtype not in (torch.bfloat16, torch.float32) or x.dim() == 0 or x.shape[-1] % BLOCK != 0:
        fail(args.op, f"x must be bfloat16 or float32 [.., N] with N a multiple of {BLOCK}, got {describe(x)}")
    if args.block != BLOCK:
        fail(args.op, f"block must be {BLOCK}, got {args.block}")


def _fake_quant(args: Args) -> tuple[Tensor, Tensor]:
    x = args.x
    y = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return y, x.new_empty(x.shape[-1] // BLOCK, *x.shape[:-1], dtype=torch.float32).movedim(0, -1)


def _check_gemm(args: Args) -> None:
    op, (a, a_s, b, b_s) = args.op, args
    check_tensor(op, "a", a, torch.float8_e4m3fn, M=None, K=None)
    rows, columns = a.shape
    if columns % BLOCK != 0:
        fail(op, f"a's columns must be a multiple of {BLOCK}, got {describe(a)}")
    check_tensor(op, "b", b, torch.float8_e4m3fn, N=None, K=columns)
    blocks = columns // BLOCK
    check_tensor(op, "a_s", a_s, torch.float32, M=rows, Kb=blocks)
    check_tensor(op, "b_s", b_s, torch.float32, Nb=(b.shape[0] + BLOCK - 1) // BLOCK, Kb=blocks)
    check_same_device(op, "a", a, a_s=a_s, b=b, b_s=b_s)


def _many_rows(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    """The product by cuBLASLt, which requires a multiple of 4 rows of a, no overlapping rows, and scales in its layouts
    that start 16-byte aligned."""
    if not _LIBRARY_IS_THERE:
        return a.new_empty(0)
    a, b = (x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous() for x in (a, b))
    rows, missing = a.shape[0], -a.shape[0] % 4
    if missing:
        a = pad(a.view(torch.uint8), (0, 0, 0, missing)).view(a.dtype)
        a_s = pad(a_s, (0, 0, 0, missing))
    if a_s.stride() != (1, a_s.shape[0]) or not _is_aligned(a_s):
        a_s = a_s.mT.clone(memory_format=torch.contiguous_format).mT
    types = torch.nn.functional.ScalingType
    scales = (a_s, types.BlockWise1x128, _in_fours(b_s).mT, types.BlockWise128x128)
    out: Tensor = torch.nn.functional.scaled_mm(a, b.mT, *scales, output_dtype=torch.bfloat16)
    return out[:rows] if missing else out


def _in_fours(b_s: Tensor) -> Tensor:
    """b_s with its rows padded to a multiple of 4 elements, without a copy if prepare_weight has stored it so."""
    rows, blocks = b_s.shape
    padded = -(-blocks // 4) * 4
    end = b_s.storage_offset() + rows * padded
    is_there = end * b_s.element_size() <= b_s.untyped_storage().nbytes()
    if is_there and _is_aligned(b_s) and b_s.stride(1) == 1 and (rows == 1 or b_s.stride(0) == padded):
        return b_s.as_strided((rows, padded), (padded, 1))  # a single row may have any stride
    copy = b_s.new_zeros(rows, padded)
    copy[:, :blocks] = b_s
    return copy


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0


Operator(
    f"act_quant(Tensor x, SymInt block={BLOCK}, bool round_scale=False) -> (Tensor y, Tensor s)",
    check=_check_quant,
    fake=_fake_quant,
    reference=reference.act_quant,
)
Operator(
    f"fp8_gemm({_MATRICES}) -> Tensor",
    check=_check_gemm,
    fake=lambda args: args.a.new_empty(args.a.shape[0], args.b.shape[0], dtype=torch.bfloat16),
    reference=reference.fp8_gemm,
    flops=lambda args: 2 * args.a[0] * args.a[1] * args.b[0],
)
#: fp8_gemm calls this on a GPU for more rows than its kernel takes. Returns a 1-D tensor if PyTorch's CUDA is too old.
library.define(f"_fp8_gemm_many_rows({_MATRICES}) -> Tensor")
library.impl("_fp8_gemm_many_rows", _many_rows, "CUDA")
