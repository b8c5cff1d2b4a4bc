"""Quantization to fp8 with one scale per block, and the product of such matrices, in plain PyTorch."""

import torch
from torch import Tensor

BLOCK = 128
#: Largest finite number of e4m3.
LARGEST = 448.0
#: Lower bound on the largest magnitude of a block.
SMALLEST = 1e-4


def act_quant(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.act_quant`."""
    blocks = x.float().unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    scales = _scales(blocks.abs().amax(-1), round_scale)
    y = _quotients(blocks, scales[..., None])
    rows_innermost = scales.new_empty(scales.shape[-1:] + scales.shape[:-1]).copy_(scales.movedim(-1, 0))
    return y.flatten(-2).contiguous(), rows_innermost.movedim(0, -1)


def prepare_weight(w: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.prepare_weight`."""
    rows, columns = w.shape
    row_blocks, column_blocks = -(-rows // BLOCK), columns // BLOCK
    blocks = torch.nn.functional.pad(w.float(), (0, 0, 0, row_blocks * BLOCK - rows))
    blocks = blocks.view(row_blocks, BLOCK, column_blocks, BLOCK)
    scales = _scales(blocks.abs().amax((1, 3)), round_scale)
    b = _quotients(blocks, scales[:, None, :, None]).view(row_blocks * BLOCK, columns)[:rows].contiguous()
    padded = scales.new_zeros(row_blocks, -(-column_blocks // 4) * 4)
    return b, padded[:, :column_blocks].copy_(scales)


def fp8_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    """See :func:`dsa_ext.fp8_gemm`."""
    rows = b_s.repeat_interleave(BLOCK, 0)[: b.shape[0]]
    return (dequantize(a, a_s) @ dequantize(b, rows).mT).bfloat16()


def dequantize(y: Tensor, scales: Tensor) -> Tensor:
    """y * scales in fp32 [..., N]: the inverse of act_quant, up to rounding."""
    blocks: Tensor = y.float().unflatten(-1, (y.shape[-1] // BLOCK, BLOCK)) * scales[..., None]
    return blocks.flatten(-2)


def next_power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two >= x, for positive normal fp32 numbers; numbers that are not finite are unchanged."""
    exponent_bits = (x.contiguous().view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(x.isfinite(), exponent_bits.view(torch.float32), x)


def _scales(largest: Tensor, round_scale: bool) -> Tensor:
    # Divides by a tensor: for a Python number a GPU would multiply by 1 / LARGEST instead.
    scales = largest.clamp(min=SMALLEST) / torch.full_like(largest, LARGEST)
    return next_power_of_two(scales) if round_scale else scales


def _quotients(blocks: Tensor, scales: Tensor) -> Tensor:
    return (blocks / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
