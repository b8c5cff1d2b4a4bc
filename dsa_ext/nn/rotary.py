"""Rotary position embedding."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsa_ext.ops._checks import describe
from dsa_ext.ops._library import is_transformed


def apply_rope(
    x: Tensor, positions: Tensor, theta: float = 10_000.0, *, columns: int | None = None, interleaved: bool = False
) -> Tensor:
    """Rotates pairs of columns: pair i by the angle positions * theta**(-i / half), with `half` pairs.

    Args:
        x: [B, S, ..., D], floating-point.
        positions: [S].
        theta: base of the frequencies.
        columns: number of leading columns to rotate, even; the others are unchanged. All by default.
        interleaved: pair i is columns 2 i and 2 i + 1 of x, as in DeepSeek's checkpoints, instead of column i of the
            first half and column i of the second. In both cases it is the latter in the result.
    """
    if x.dim() < 3 or not x.is_floating_point():
        raise ValueError(f"apply_rope: x must be floating-point [B, S, ..., D], got {describe(x)}")
    columns = x.shape[-1] if columns is None else columns
    if columns % 2 != 0 or not 0 <= columns <= x.shape[-1]:
        raise ValueError(f"apply_rope: columns must be even, from 0 to D={x.shape[-1]}, got {columns}")
    if not isinstance(positions, Tensor) or positions.shape != x.shape[1:2]:
        got = describe(positions) if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"apply_rope: positions must be a tensor [S={x.shape[1]}], got {got}")
    return rotated(x, *rope_tables(x, positions, theta, columns), interleaved)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """apply_rope with given tables."""
    if is_compiling() or is_transformed():
        first, second = halves(x, cos, interleaved)
        turned = (first * cos).addcmul(second, sin, value=-1), (second * cos).addcmul(first, sin)
        return torch.cat([*turned, x[..., 2 * cos.shape[-1] :]], dim=-1)
    result: Tensor = _Rope.apply(x, cos, sin, interleaved, False)  # type: ignore[no-untyped-call]
    return result


def rope_tables(x: Tensor, positions: Tensor, theta: float, columns: int) -> tuple[Tensor, Tensor]:
    """Tables of cos and sin for apply_rope on x [B, S, ..., D]: [1, S, ..., columns / 2], like x."""
    half = columns // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32)[:, None] * frequencies
    angles = angles.view(1, len(positions), *(1,) * (x.dim() - 3), half)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def halves(x: Tensor, cos: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second columns of all pairs."""
    half = cos.shape[-1]
    if interleaved:
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def write_rotated(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, interleaved_out: bool = False
) -> None:
    """Writes the rotated columns of `x` to `out`."""
    first, second = halves(out, cos, interleaved_out)
    x_first, x_second = halves(x, cos, interleaved)
    first.copy_(x_first).mul_(cos).addcmul_(x_second, sin, value=-1)
    second.copy_(x_second).mul_(cos).addcmul_(x_first, sin)


class _Rope(torch.autograd.Function):
    """The backward rotates by the negative angles, and is itself differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, interleaved_out: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layouts = interleaved_out, interleaved
        columns = 2 * cos.shape[-1]
        out = x.new_empty(x.shape)
        write_rotated(out, x, cos, sin, interleaved, interleaved_out)
        out[..., columns:] = x[..., columns:]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rope.apply(dout, cos, -sin, *ctx.layouts), None, None, None, None  # type: ignore[no-untyped-call]
