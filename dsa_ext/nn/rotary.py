"""Rotary position embedding, half-split."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsa_ext.ops._checks import describe
from dsa_ext.ops._library import is_transformed


def apply_rope(x: Tensor, positions: Tensor, theta: float = 10_000.0, *, columns: int | None = None) -> Tensor:
    """Rotates column i of the first half and column i of the second by the angle positions * theta**(-i / half).

    Args:
        x: [B, S, ..., D], floating-point.
        positions: [S].
        theta: base of the frequencies.
        columns: number of leading columns to rotate, even; the others are unchanged. All by default.
    """
    if x.dim() < 3 or not x.is_floating_point():
        raise ValueError(f"apply_rope: x must be floating-point [B, S, ..., D], got {describe(x)}")
    columns = x.shape[-1] if columns is None else columns
    if columns % 2 != 0 or not 0 <= columns <= x.shape[-1]:
        raise ValueError(f"apply_rope: columns must be even, from 0 to D={x.shape[-1]}, got {columns}")
    if not isinstance(positions, Tensor) or positions.shape != x.shape[1:2]:
        got = describe(positions) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"apply_rope: positions must be a tensor [S={x.shape[1]}], got {got}")
    return rotated(x, *rope_tables(x, positions, theta, columns))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """apply_rope with given tables."""
    if not is_compiling() and is_transformed():
        half = cos.shape[-1]
        first, second, others = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        turned = (first * cos).addcmul(second, sin, value=-1), (second * cos).addcmul(first, sin)
        return torch.cat([*turned, others], dim=-1)
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
