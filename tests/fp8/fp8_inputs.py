"""Inputs of the fp8 operators."""

import torch
from torch import Tensor


def random(*sizes: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Normal numbers; each block of 128 columns has a scale of its own."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks = torch.randn(*sizes[:-1], sizes[-1] // 128, 128, generator=generator, device=device)
    return (blocks * torch.rand(*blocks.shape[:-1], 1, generator=generator, device=device)).flatten(-2)
