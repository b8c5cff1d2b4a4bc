"""Quantisation to fp8 with a scale for each block of columns, in plain PyTorch, on any device."""

import torch
from torch import Tensor

BLOCK = 128
#: Largest number of e4m3.
LARGEST = 448.0
#: A block's largest magnitude counts as this at least.
SMALLEST = 1e-4


def act_quant(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.act_quant`."""
    blocks = x.float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    scales = blocks.abs().amax(-1).clamp(min=SMALLEST) / LARGEST
    if round_scale:
        scales = next_power_of_two(scales)
    y = (blocks / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return y.flatten(-2).contiguous(), scales.movedim(-1, 0).contiguous().movedim(0, -1)


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not less, of positive normal fp32 numbers; what is not finite stays."""
    exponent_bits = (x.contiguous().view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(x.isfinite(), exponent_bits.view(torch.float32), x)


def dequantize(y: Tensor, scales: Tensor) -> Tensor:
    """y * scales in fp32 [.., N]."""
    blocks: Tensor = y.float().unflatten(-1, (y.shape[-1] // BLOCK, BLOCK)) * scales[..., None]
    return blocks.flatten(-2)
