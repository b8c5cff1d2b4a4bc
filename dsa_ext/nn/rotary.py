"""Rotary position embedding, half-split."""

import torch
from torch import Tensor


def apply_rope(x: Tensor, positions: Tensor, theta: float = 10_000.0) -> Tensor:
    """Rotates column i of the first half with column i of the second by positions * theta**(-i / half).

    Args:
        x: [B, S, ..., D], D even.
        positions: [S].
        theta: base of the frequencies.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = angles.view(1, len(positions), *(1,) * (x.dim() - 3), half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
