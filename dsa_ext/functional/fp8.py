"""Quantisation to fp8."""

import torch
from torch import Tensor


def act_quant(x: Tensor, block: int = 128, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """x as fp8 numbers with a scale for each block of 128 columns of a row: x is nearly y * s.

    ::

        s = max(amax |x|, 1e-4) / 448,    y = e4m3(x / s)

    in fp32, rounded to nearest even, for the kernel as for the CPU: they agree bit by bit. (The formula is that of
    DeepSeek-V3's activations.) A block with a NaN has s = NaN, and NaN everywhere.

    Args:
        x: [..., N], bf16 or fp32, in any strides; N is a multiple of 128. What is not rows 16-byte aligned and evenly
            apart is copied first.
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
