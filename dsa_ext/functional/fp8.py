"""Quantization to fp8 with block scales, and the product of such matrices."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_is_tensor, check_tensor, describe, fail
from dsa_ext.ops._library import refuse_derivatives


def act_quant(x: Tensor, block: int = 128, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantizes x to fp8 with one scale per row and block of 128 columns: x is approximately y * s.

    ::

        s = max(amax |x|, 1e-4) / 448,    y = e4m3(x / s)

    in fp32, rounded to nearest even. (This is how DeepSeek-V3 quantizes activations.) A block that contains a NaN has
    s = NaN, and y is NaN throughout the block.

    Args:
        x: [..., N], bf16 or fp32, with any strides; N is a multiple of 128.
        block: number of columns that share a scale; must be 128.
        round_scale: round s up to a power of two, which ue8m0 can represent.

    Returns:
        y [..., N], float8_e4m3fn, contiguous, and s [..., N / 128], fp32, column-major (strides 1 and the number of
        rows), as block-scaled matrix products read it. Neither is differentiable.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.
    """
    check_is_tensor("act_quant", "x", x)  # without a tensor, the dispatcher finds no implementation
    result: tuple[Tensor, Tensor] = torch.ops.dsa.act_quant.default(x, block, round_scale)
    return result


def prepare_weight(w: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantizes a weight to fp8 with one scale per block of 128 x 128, as :func:`fp8_gemm` takes it.

    The formula is that of :func:`act_quant`, with amax over the elements of a block. It runs in PyTorch; call it once
    per weight.

    Args:
        w: [N, K], bf16 or fp32; K is a multiple of 128.
        round_scale: round the scales up to powers of two.

    Returns:
        b [N, K], float8_e4m3fn, and b_s [ceil(N / 128), K / 128], fp32, a view of a tensor whose rows are padded to a
        multiple of 4 elements.

    Raises:
        RuntimeError: w violates one of these requirements.
    """
    check_is_tensor("prepare_weight", "w", w)
    check_tensor("prepare_weight", "w", w, (torch.bfloat16, torch.float32), N=None, K=None)
    if w.shape[1] % reference.fp8.BLOCK != 0:
        fail("prepare_weight", f"w's columns must be a multiple of {reference.fp8.BLOCK}, got {describe(w)}")
    refuse_derivatives("prepare_weight", (w,))
    return reference.prepare_weight(w.detach(), round_scale)


def fp8_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    """Product of a and the transpose of b, fp8 matrices with block scales.

    ::

        out_mn = sum_k a_s[m, k // 128] * b_s[n // 128, k // 128] * a_mk * b_nk

    accumulated in fp32.

    Args:
        a, a_s: [M, K], float8_e4m3fn, and [M, K / 128], fp32, from :func:`act_quant`; K is a multiple of 128.
        b, b_s: [N, K], float8_e4m3fn, and [ceil(N / 128), K / 128], fp32, from :func:`prepare_weight`. On a GPU rows
            of a and b must be dense (stride 1) and start 16-byte aligned.

    Returns:
        [M, N], bf16. Not differentiable.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU, or when a has more than 64 rows and PyTorch
            was built for CUDA before 12.9.
    """
    result: Tensor = torch.ops.dsa.fp8_gemm.default(a, a_s, b, b_s)
    return result
