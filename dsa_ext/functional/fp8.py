"""Quantisation to fp8, and the product of such matrices."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_tensor, describe, fail


def act_quant(x: Tensor, block: int = 128, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """x as fp8 numbers with a scale for each block of 128 columns of a row: x is nearly y * s.

    ::

        s = max(amax |x|, 1e-4) / 448,    y = e4m3(x / s)

    in fp32, rounded to nearest even. (The formula is that of DeepSeek-V3's activations.) A block with a NaN has
    s = NaN, and NaN everywhere.

    Args:
        x: [..., N], bf16 or fp32, in any strides; N is a multiple of 128.
        block: columns that share a scale; 128.
        round_scale: round s up to a power of two, which ue8m0 can hold.

    Returns:
        y [..., N], float8_e4m3fn, contiguous, and s [..., N / 128], fp32, the scales of a column of blocks next to each
        other in memory (strides 1 and the number of rows), as block-scaled matrix products read them. Neither has a
        gradient.

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also when a GPU has no kernel.
    """
    result: tuple[Tensor, Tensor] = torch.ops.dsa.act_quant.default(x, block, round_scale)
    return result


def prepare_weight(w: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """A weight as fp8 numbers with a scale for each block of 128 x 128, as :func:`fp8_gemm` takes it.

    The formula is that of :func:`act_quant`, amax of a block's elements. Done once a weight, in PyTorch.

    Args:
        w: [N, K], bf16 or fp32; K is a multiple of 128.
        round_scale: round scales up to powers of two.

    Returns:
        b [N, K], float8_e4m3fn, and b_s [ceil(N / 128), K / 128], fp32, a view of rows that are a multiple of 4 long.

    Raises:
        RuntimeError: w breaks one of these rules.
    """
    check_tensor("prepare_weight", "w", w, (torch.bfloat16, torch.float32), N=None, K=None)
    if w.shape[1] % reference.fp8.BLOCK != 0:
        fail("prepare_weight", f"w's columns must be a multiple of {reference.fp8.BLOCK}, got {describe(w)}")
    return reference.prepare_weight(w.detach(), round_scale)


def fp8_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    """The product of a and b transposed, fp8 matrices with block scales.

    ::

        out_mn = sum_k a_s[m, k // 128] * b_s[n // 128, k // 128] * a_mk * b_nk

    accumulated in fp32.

    Args:
        a, a_s: [M, K], float8_e4m3fn, and [M, K / 128], fp32, from :func:`act_quant`; K is a multiple of 128.
        b, b_s: [N, K], float8_e4m3fn, and [ceil(N / 128), K / 128], fp32, from :func:`prepare_weight`. On a GPU rows
            of a and b must be dense and start 16-byte aligned.

    Returns:
        [M, N], bf16. It has no gradient.

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also when a GPU has no kernel, or more than 64 rows meet a PyTorch for CUDA before 12.9.
    """
    result: Tensor = torch.ops.dsa.fp8_gemm.default(a, a_s, b, b_s)
    return result
