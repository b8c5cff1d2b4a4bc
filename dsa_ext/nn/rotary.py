"""Rotary position embedding, half-split."""

from typing import Any

import torch
from torch import Tensor


def apply_rope(x: Tensor, positions: Tensor, theta: float = 10_000.0, *, columns: int | None = None) -> Tensor:
    """Rotates column i of the first half and column i of the second by the angle positions * theta**(-i / half).

    Args:
        x: [B, S, ..., D].
        positions: [S].
        theta: base of the frequencies.
        columns: number of leading columns to rotate, even; the others are unchanged. All by default.
    """
    columns = x.shape[-1] if columns is None else columns
    return rotated(x, *rope_tables(x, positions, theta, columns))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rope with given tables."""
    result: Tensor = _Rope.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return result


def rope_tables(x: Tensor, positions: Tensor, theta: float, columns: int) -> tuple[Tensor, Tensor]:
    """Tables of cos and sin for apply_rope on x [B, S, ..., D]: [1, S, ..., columns / 2], like x."""
    half = columns // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = angles.view(1, len(positions), *(1,) * (x.dim() - 3), half)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the columns of `out` in place; it must hold a copy of x."""
    half = cos.shape[-1]
    (first, second), (x_first, x_second) = ((t[..., :half], t[..., half:]) for t in (out, x))
    first.mul_(cos).addcmul_(x_second, sin, value=-1)
    second.mul_(cos).addcmul_(x_first, sin)


class _Rope(torch.autograd.Function):
    """The backward rotates by the negative angles, and is itself differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = x.clone(memory_format=torch.contiguous_format)
        columns = 2 * cos.shape[-1]
        rotate_(out[..., :columns], x[..., :columns], cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotated(dout, cos, -sin), None, None
