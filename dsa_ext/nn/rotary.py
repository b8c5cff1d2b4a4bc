"""Rotary position embedding."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsa_ext.ops._checks import describe
from dsa_ext.ops._library import is_transformed, refuse_batched_gradients
from dsa_ext.ops.rotary import write_rotated_is_compiled

RopeLayout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Yarn:
    """RoPE for longer sequences than a model was first trained on: YaRN (arXiv 2309.00071), as DeepSeek-V3.2 uses it.

    Fast rotations stay as they are, slow ones become `factor` times slower, and those between are interpolated.

    Args:
        factor: how many times longer the sequences are.
        original_positions: length of the sequences before.
        beta_fast, beta_slow: rotations within `original_positions` of the fastest and the slowest pair that is
            interpolated.
        mscale, mscale_all_dim: weights of the logarithm of `factor` in the scale of the rotated columns and in that of
            all columns. If they are equal, only attention's `sm_scale` changes.
    """

    factor: float
    original_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "original_positions", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            number = getattr(self, name)
            if not isinstance(number, Real) or not math.isfinite(number):
                raise ValueError(f"Yarn: {name} must be a finite number, got {number!r}")
        if not self.factor >= 1:
            raise ValueError(f"Yarn: factor must be at least 1, got {self.factor}")
        for name in ("original_positions", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Yarn: {name} must be positive, got {getattr(self, name)}")
        if not self.beta_fast >= self.beta_slow:
            raise ValueError(f"Yarn: beta_fast must be at least beta_slow={self.beta_slow}, got {self.beta_fast}")

    @property
    def rotated_scale(self) -> float:
        """Factor on the rotated columns."""
        return self._scale(self.mscale) / self._scale(self.mscale_all_dim)

    @property
    def sm_scale(self) -> float:
        """Factor on attention's sm_scale."""
        return self._scale(self.mscale_all_dim) ** 2

    def _scale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def slowed(self, frequencies: Tensor, theta: float) -> Tensor:
        pairs = len(frequencies)

        def pair_with(rotations: float) -> float:
            return pairs * math.log(self.original_positions / (rotations * 2 * math.pi)) / math.log(theta)

        first, last = (
            max(math.floor(pair_with(self.beta_fast)), 0),
            min(math.ceil(pair_with(self.beta_slow)), 2 * pairs - 1),
        )
        pair = torch.arange(pairs, device=frequencies.device, dtype=torch.float32)
        slow = ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies / self.factor * slow + frequencies * (1 - slow)


class PlacedRows:
    """Positions of rows, int64 or int32 [S] or [B, S], with the tables of RoPE for them, which are made once for each
    theta, columns, yarn and dtype: the positions must not change."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def tables(self, x: Tensor, theta: float, columns: int, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
        """See rope_tables."""
        key = theta, columns, yarn, x.dtype
        if key not in self._tables:
            self._tables[key] = self._make_tables(x, theta, columns, yarn)
        cos, sin = self._tables[key]
        shape = *cos.shape[:2], *(1,) * (x.dim() - 3), cos.shape[-1]
        return cos.view(shape), sin.view(shape)

    def _make_tables(self, x: Tensor, theta: float, columns: int, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
        """[1 or B, S, ..., columns / 2]."""
        return _tables_of(x, self.positions, theta, columns, yarn)


def placed(positions: Tensor | PlacedRows) -> Tensor | PlacedRows:
    """With tables that are made once. Compiled code makes equal tables once anyway, and its checkpoints and exported
    modules take no such object."""
    return positions if is_compiling() or isinstance(positions, PlacedRows) else PlacedRows(positions)


class CachedRows(PlacedRows):
    """Rows whose tables are read from those of all positions up to a length: for the few rows of a step of decoding, to
    compute them would take longer than the step's other work. `PagedKVCache.rows` returns one.

    Args:
        positions: of the rows, int64 [B, S].
        length: number of positions; all of `positions` are below.
        tables: cosines and sines of all positions, by the options of RoPE.

    `tables` is filled on first use, but not in the capture of a CUDA graph or in compiled code, to which the memory
    could belong, nor with fake tensors or other subclasses, which later calls could not use.
    """

    def __init__(self, positions: Tensor, length: int, tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]]) -> None:
        super().__init__(positions)
        self.length, self._of_all = length, tables

    def _make_tables(self, x: Tensor, theta: float, columns: int, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
        key = theta, columns, yarn, x.dtype
        every = self._of_all.get(key)
        if every is None and not is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            every = _tables_of(x, torch.arange(self.length, device=x.device), theta, columns, yarn)
            if type(every[0]) is Tensor:
                self._of_all[key] = every
        if every is None:
            return super()._make_tables(x, theta, columns, yarn)
        cos, sin = (t.flatten(0, -2) for t in every)
        return cos[self.positions], sin[self.positions]


def apply_rope(
    x: Tensor,
    positions: Tensor | PlacedRows,
    theta: float = 10_000.0,
    *,
    columns: int | None = None,
    layout: RopeLayout = "half",
    yarn: Yarn | None = None,
) -> Tensor:
    """Rotates pairs of columns: pair i by the angle positions * theta**(-i / half), with `half` pairs.

    Args:
        x: [B, S, ..., D], floating-point.
        positions: [S] or [B, S], or PlacedRows.
        theta: base of the frequencies.
        columns: number of leading columns to rotate, even; the others are unchanged. All by default.
        layout: which columns of x are a pair. "half": column i of the first half and column i of the second;
            "interleaved": columns 2 i and 2 i + 1, as in DeepSeek's checkpoints. In the result it is always the former.
        yarn: slows the frequencies.
    """
    if not isinstance(x, Tensor) or x.dim() < 3 or not x.is_floating_point():
        raise ValueError(f"apply_rope: x must be floating-point [B, S, ..., D], got {describe(x)}")
    columns = x.shape[-1] if columns is None else columns
    if not isinstance(columns, (int, torch.SymInt)) or columns % 2 != 0 or not 0 <= columns <= x.shape[-1]:
        raise ValueError(f"apply_rope: columns must be even, from 0 to D={x.shape[-1]}, got {columns!r}")
    check_layout("apply_rope", "layout", layout)
    check_yarn("apply_rope", yarn, theta)
    check_positions("apply_rope", positions, x)
    return rotated(x, *rope_tables(x, positions, theta, columns, yarn), layout == "interleaved")


def check_layout(where: str, name: str, layout: str) -> None:
    if layout not in ("half", "interleaved"):
        raise ValueError(f"{where}: {name} must be 'half' or 'interleaved', got {layout!r}")


def check_yarn(where: str, yarn: Any, theta: float) -> None:
    if yarn is not None and not isinstance(yarn, Yarn):
        raise TypeError(f"{where}: yarn must be a Yarn or None, got {type(yarn).__name__}")
    if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise ValueError(f"{where}: the base of RoPE's frequencies must be a positive number, got {theta!r}")
    if yarn is not None and not theta > 1:
        raise ValueError(f"{where}: the base of RoPE's frequencies must be greater than 1 with yarn, got {theta}")


def check_positions(where: str, positions: Any, x: Tensor) -> None:
    """`positions` are those of the rows of x [B, S, ...]."""
    positions = positions.positions if isinstance(positions, PlacedRows) else positions
    is_list = isinstance(positions, Tensor) and positions.dtype in (torch.int32, torch.int64)
    if not is_list or positions.device != x.device or positions.shape not in (x.shape[1:2], x.shape[:2]):
        is_tensor = isinstance(positions, Tensor)
        got = f"{describe(positions)} on {positions.device}" if is_tensor else type(positions).__name__
        expected = f"int32 or int64 [S={x.shape[1]}] or [B={x.shape[0]}, S] on the device of x, {x.device}"
        raise ValueError(f"{where}: positions must be {expected}, got {got}")


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """apply_rope with given tables."""
    if is_compiling() or is_transformed():
        first, second = halves(x, cos, interleaved)
        # Not addcmul(second, sin, value=-1), at which torch.func.linearize ends in a segmentation fault.
        turned = (first * cos).addcmul(second, -sin), (second * cos).addcmul(first, sin)
        return torch.cat([*turned, x[..., 2 * cos.shape[-1] :]], dim=-1)
    result: Tensor = _Rope.apply(x, cos, sin, interleaved, False)  # type: ignore[no-untyped-call]
    return result


def rope_tables(
    x: Tensor, positions: Tensor | PlacedRows, theta: float, columns: int, yarn: Yarn | None = None
) -> tuple[Tensor, Tensor]:
    """Tables of cos and sin for apply_rope on x [B, S, ..., D]: [1 or B, S, ..., columns / 2], like x."""
    rows = positions if isinstance(positions, PlacedRows) else PlacedRows(positions)
    return rows.tables(x, theta, columns, yarn)


def _tables_of(x: Tensor, positions: Tensor, theta: float, columns: int, yarn: Yarn | None) -> tuple[Tensor, Tensor]:
    """For x [B, S, ..., D]: [1 or B, S, ..., columns / 2], with 1 for its other dimensions, in its dtype."""
    half = columns // 2
    frequencies = theta ** (torch.arange(0, -half, -1, device=x.device, dtype=torch.float32) / half)
    frequencies = frequencies if yarn is None else yarn.slowed(frequencies, theta)
    angles = (positions if positions.dim() == 2 else positions[None])[..., None] * frequencies  # in fp32
    angles = angles.view(*angles.shape[:2], *(1,) * (x.dim() - 3), half)
    cos, sin = angles.cos(), angles.sin()
    if yarn is not None:
        cos, sin = cos * yarn.rotated_scale, sin * yarn.rotated_scale
    return cos.to(x.dtype), sin.to(x.dtype)


def halves(x: Tensor, cos: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second columns of all pairs."""
    half = cos.shape[-1]
    if interleaved:
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def write_rotated(
    out: Tensor,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    interleaved_out: bool = False,
    *,
    first: int = 0,
) -> None:
    """Writes x [B, S, .., D] to `out`, with the columns of all pairs, from `first` on, rotated. Without gradients.
    `out` may be x itself if the pairs keep their layout."""
    shape = *x.shape[:-1], cos.shape[-1]
    if first % 8 == 0 and x.is_cuda and x.dim() in (3, 4) and x.numel() < 2**33 and write_rotated_is_compiled():
        given = [t.unsqueeze(2) if x.dim() == 3 else t for t in (out, x, cos.expand(shape), sin.expand(shape))]
        if all(_fits(t, multiple) for t, multiple in zip(given, (8, 8, 4, 4), strict=True)):
            torch.ops.dsa._write_rotated(*given, first, interleaved, interleaved_out)
            return
    end = first + 2 * cos.shape[-1]
    to, to_second = halves(out[..., first:], cos, interleaved_out)
    x_first, x_second = halves(x[..., first:], cos, interleaved)
    if out is not x:
        out[..., :first], out[..., end:] = x[..., :first], x[..., end:]
    # Without out=, at which torch.compile would break the graph.
    rotated_first = (x_first * cos).addcmul_(x_second, sin, value=-1)
    rotated_second = (x_second * cos).addcmul_(x_first, sin)
    to.copy_(rotated_first)
    to_second.copy_(rotated_second)


def _fits(x: Tensor, multiple: int) -> bool:
    """Whether the kernel can read x [B, S, H, D]: rows of so many bf16 at a time."""
    strides = *x.stride()[:-1], x.shape[-1], x.storage_offset()
    return x.dtype == torch.bfloat16 and x.stride(-1) == 1 and all(stride % multiple == 0 for stride in strides)


class _Rope(torch.autograd.Function):
    """The backward rotates by the negative angles, and is itself differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, interleaved_out: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.layouts = interleaved_out, interleaved
        out = x.new_empty(x.shape)
        write_rotated(out, x, cos, sin, interleaved, interleaved_out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 5
        refuse_batched_gradients("apply_rope", dout)
        cos, sin = ctx.saved_tensors
        return _Rope.apply(dout, cos, -sin, *ctx.layouts), None, None, None, None  # type: ignore[no-untyped-call]
