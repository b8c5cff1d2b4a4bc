"""A seeded source of sizes, contents, ids, bounds and memory layouts: ordinary ones and edge cases."""

import math
import random
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, random_indices

T = TypeVar("T")
#: Layout that an operator requires: rows of stride 1 that start 16-byte aligned, rows of stride 1, or any strides.
Rows = Literal["aligned", "dense", "free"]

#: Number of elements beyond which offsets need 64 bits.
_FAR = 2**31
#: Sizes at and next to the boundaries of tiles, blocks, warps and splits.
_EDGES = (
    1,
    2,
    3,
    7,
    8,
    9,
    31,
    32,
    33,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    511,
    513,
    1023,
    1025,
    2047,
    4095,
    4096,
)
#: Limits of the product of a call's sizes, with cumulative probabilities: most calls are small, so that many fit in a
#: minute.
_WORK = {"cpu": ((0.9, 2**15), (1.0, 2**18)), "cuda": ((0.5, 2**20), (0.85, 2**24), (0.97, 2**27), (1.0, 2**30))}
_RANDOM_KEYS = 2**24
#: Magnitudes of scores at which fp32 offsets of a softmax, 32-bit integers and fp32 itself reach their limits.
_SCORE_EDGES = (2.0**20, 2.0**29, 2.0**31, 2.0**33, 2.0**40, 1e20, 1e30, 1e37)


class Draw:
    """All random choices of one call. The seed and the device type determine them."""

    def __init__(self, seed: int, device: torch.device | str, memory: int = 5 * 2**30) -> None:
        """`memory`: most bytes that one tensor may take."""
        self.device, self.memory = torch.device(device), memory
        self.random = random.Random(seed)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        #: What was drawn, in words.
        self.notes: list[str] = []
        #: Whether the results are checked. If the inputs are random bits, the call only has to complete.
        self.judged = True
        level = self.random.random()
        self.work = next(work for share, work in _WORK[self.device.type] if level <= share)

    # Decisions

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def choice(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def size(self, most: int, least: int = 1) -> int:
        """From `least` to `most`; small numbers and tile boundaries are more likely."""
        edges = [edge for edge in _EDGES if least <= edge <= most]
        if edges and self.chance(0.4):
            return self.choice(edges)
        span = max(1, most - least + 1)
        return least + min(span, int(span ** self.random.random())) - 1

    def length(self, most: int) -> int:
        """A size that is occasionally 0."""
        return 0 if self.chance(0.03) else self.size(most)

    def within(self, fixed: int, *sizes: int) -> list[int]:
        """The sizes, reduced (the largest first) until their product with `fixed` is within the limit of the work."""
        shrunk = list(sizes)

        def product() -> int:
            result = max(1, fixed)
            for size in shrunk:
                result *= max(1, size)
            return result

        while product() > self.work and max(shrunk) > 1:
            largest = shrunk.index(max(shrunk))
            shrunk[largest] = shrunk[largest] // 2 + shrunk[largest] % 2 * (shrunk[largest] > 1 and self.chance(0.5))
        return shrunk

    def scale(self) -> float | None:
        """A scale of the scores, or None for the operator's default."""
        if self.chance(0.6):
            return None
        return self.choice((1.0, 0.05, -0.05, 0.3, -1.0, 0.0, 1e-6, 2.5, 1e-30, -1e-42))

    # Contents

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """In [low, high), int32."""
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator, device=self.device).int()

    def floats(self, *shape: int, dtype: torch.dtype = torch.bfloat16, name: str = "") -> Tensor:
        """Contiguous and finite numbers, mostly normally distributed."""
        x = self.normal(*shape)
        kind = self.random.choices(
            ("normal", "small", "large", "denormal", "huge row", "equal", "zeros", "wide", "sparse"),
            (64, 5, 8, 2, 8, 3, 2, 5, 3),
        )[0]
        if kind == "small":
            x *= 1e-3
        elif kind == "large":
            x *= 10 ** self.random.uniform(1, 4)
        elif kind == "denormal":
            x *= 1e-39
        elif kind == "huge row" and x.dim() > 1 and x.numel():
            rows = x.view(-1, shape[-1])
            rows[self.random.randrange(len(rows))] *= self.choice((1e2, 1e4))
        elif kind == "equal":
            x.fill_(self.random.uniform(-2, 2))
        elif kind == "zeros":
            x.zero_()
        elif kind == "wide":  # magnitudes from 2^-16 to 2^8
            x = torch.exp2(self.uniform(*shape) * 24 - 16) * x.sign()
        elif kind == "sparse":
            x *= self.uniform(*shape) < 0.1
        if kind != "normal":
            self.notes.append(f"{name} {kind}".strip())
        return x.to(dtype)

    def gradient(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """An upstream gradient: ordinary numbers, sometimes the same everywhere, as from sum()."""
        if self.chance(0.15):
            return torch.ones(shape, device=self.device, dtype=dtype) * self.choice((1.0, 0.0, -3e-3))
        return (self.normal(*shape) * self.choice((1.0, 1.0, 1.0, 1e-3, 30.0))).to(dtype)

    def to_edge(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """q, or rarely q times a power of two, so that the scores with k reach a limit of fp32 but do not exceed it."""
        if q.numel() == 0 or k.numel() == 0 or not self.chance(0.12):
            return q
        most = self.choice(_SCORE_EDGES)
        largest = float(q.abs().max()) * float(k.abs().max()) * q.shape[-1]
        # Products must also be finite in fp32 before they are scaled.
        bound = min(most / max(abs(scale), 1e-30), 1e37)
        if largest == 0:
            return q
        factor = 2.0 ** torch.tensor(bound / largest, dtype=torch.float64).log2().floor().item()
        if factor * float(q.abs().max()) > 1e38:
            return q
        self.notes.append(f"scores to {most:.3g}")
        return (q.double() * factor).to(q.dtype)

    def garbage(self, args: dict[str, Any]) -> None:
        """Rarely replaces all floating-point numbers by random bits, many of which are NaN or infinite."""
        if not self.chance(0.03):
            return
        self.notes.append("random bits")
        self.judged = False
        for value in args.values():
            if isinstance(value, Tensor) and value.is_floating_point() and value.untyped_storage().nbytes() <= 2**28:
                memory = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
                memory.view(torch.uint8).random_(0, 256, generator=self.generator)

    # Ids and bounds

    def ids(self, *shape: int, keys: int) -> Tensor:
        """int32 [.., K] ids of [0, keys), with padding: numbers that name no key."""
        slots = shape[-1]
        rows = torch.Size(shape[:-1]).numel()
        kind = self.choice(("distinct", "distinct", "distinct", "ascending", "ascending", "repeated", "same", "window"))
        if kind in ("distinct", "ascending") and rows * keys * slots > 0 and rows * keys <= _RANDOM_KEYS:
            ids = random_indices((1, 1, rows, slots), keys, self.generator).view(shape)
            if kind == "ascending":
                ids = torch.where(ids < 0, INT32_MAX, ids).sort(-1).values
        elif kind == "window":
            ids = self.integers(-slots, keys, *shape[:-1], 1) + torch.arange(slots, device=self.device).int()
        elif kind == "same":
            ids = torch.full(shape, self.random.randrange(-1, max(1, keys)), device=self.device, dtype=torch.int32)
        else:
            ids = self.integers(0, keys, *shape)
        padding = self.choice(("none", "none", "right", "left", "scattered", "mixed", "rows", "all", "noise"))
        bad = torch.tensor([-1, INT32_MIN, keys, INT32_MAX, -2], dtype=torch.int32, device=self.device)
        bad = bad[self.integers(0, 5, *shape).long()] if self.chance(0.5) else bad[:1].expand(shape)
        position, count = torch.arange(slots, device=self.device), self.integers(0, slots + 1, *shape[:-1], 1)
        hidden = {
            "right": position >= count,
            "left": position < count,
            "mixed": torch.where(self.uniform(*shape[:-1], 1) < 0.5, position >= count, position < count),
            "scattered": self.uniform(*shape) < self.random.random(),
            "rows": (self.uniform(*shape[:-1], 1) < 0.3).expand(shape),
            "all": torch.ones(shape, dtype=torch.bool, device=self.device),
        }
        if padding == "noise":
            ids = torch.where(self.uniform(*shape) < 0.5, self.integers(INT32_MIN, INT32_MAX, *shape), ids)
        elif padding != "none":
            ids = torch.where(hidden[padding], bad, ids)
        self.notes.append(f"ids {kind}, padding {padding}")
        return ids.int()

    def bounds(self, rows: int, keys: int) -> tuple[Tensor, Tensor]:
        """The first key of each row and the end (exclusive) of its keys, int32 [rows]."""
        row = torch.arange(rows, device=self.device)
        kind = self.choice(("causal", "causal", "packed", "packed", "gaps", "gaps", "all", "random", "noise", "empty"))
        if kind == "causal":
            starts, ends = torch.zeros_like(row), row + (keys - rows + 1)
        elif kind in ("packed", "gaps"):
            # The sequence of each row, and the keys [begin, end) of each sequence.
            sequence = row * self.size(max(1, min(rows, 9))) // max(1, rows)
            count = int(sequence[-1]) + 1 if rows else 1
            cuts = self.integers(0, keys + 1, 2 * count if kind == "gaps" else count - 1).sort().values.long()
            if kind == "gaps":
                begin, end = cuts[::2], cuts[1::2]
            else:
                begin, end = torch.cat([cuts.new_zeros(1), cuts]), torch.cat([cuts, cuts.new_full((1,), keys)])
            starts, ends = begin[sequence], end[sequence]
            if self.chance(0.6):  # causal within each sequence
                position = row - torch.searchsorted(sequence, sequence)
                ends = torch.minimum(ends, starts + position + 1)
        elif kind == "all":
            starts, ends = torch.zeros_like(row), torch.full_like(row, self.choice((keys, INT32_MAX)))
        elif kind == "random":
            starts, ends = self.integers(-9, keys + 9, 2, rows)
        elif kind == "noise":
            starts, ends = self.integers(INT32_MIN, INT32_MAX, 2, rows)
        else:
            starts, ends = torch.full_like(row, INT32_MAX), torch.full_like(row, INT32_MIN)
        self.notes.append(f"bounds {kind}")
        return starts.int(), ends.int()

    # Layouts

    def bounds_of_rows(self, keys: int, *shape: int) -> dict[str, Tensor]:
        """Arguments `starts` and `ends` of any shape and strides."""
        starts, ends = (bound.view(shape) for bound in self.bounds(math.prod(shape), keys))
        return {"starts": self.view(starts, "free"), "ends": self.view(ends, "free")}

    def view(self, x: Tensor, rows: Rows = "aligned", *, repeat: bool = True) -> Tensor:
        """The same values in another memory layout that the operator allows. With `repeat`, occasionally some values
        replace others, because strides are 0 or smaller than a row."""
        if self.chance(0.4) or x.numel() == 0:
            return self._odd_strides(x)
        unit = max(1, 16 // x.element_size()) if rows == "aligned" else 1
        last = x.dim() - 1
        if repeat and rows != "free" and x.dim() > 1 and self.chance(0.04):
            return self._overlapping(x, unit)

        leading = list(range(x.dim() if rows == "free" else last))
        expanded = [dim for dim in leading if repeat and x.shape[dim] > 1 and self.chance(0.1)]
        for dim in expanded:
            x = x.narrow(dim, 0, 1).expand(x.shape)
        order = self.random.sample(leading, len(leading)) if self.chance(0.6) else leading
        pads, offset = self.choice(((0, 0), (1, 1), (3, 2), (64, 5))), unit * self.choice((0, 0, 1, 3))
        strides, step = [1] * x.dim(), 1
        for dim in reversed(order if rows == "free" else [*order, last]):
            strides[dim] = 0 if dim in expanded else step
            if dim not in expanded:
                step = step * (x.shape[dim] + (pads[0] if dim == last else pads[1] if self.chance(0.5) else 0))
                step = -(-step // unit) * unit
        far_dims = [dim for dim in leading if x.shape[dim] > 2 and dim not in expanded]
        is_far = self.device.type == "cuda" and bool(far_dims) and self.chance(0.01)
        if is_far:
            dim = self.choice(far_dims)
            strides[dim] = max(step, -(-_FAR // (x.shape[dim] - 1) // unit + 1) * unit)
        length = offset + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) + 1
        if length * x.element_size() > self.memory:
            return x
        buffer = x.new_empty(length)
        if not is_far:
            buffer.view(torch.uint8).fill_(1 if x.dtype == torch.bool else 0xFF)  # NaN, or -1
        view = buffer.as_strided(x.shape, strides, offset)
        once = view
        for dim in expanded:
            once, x = once.narrow(dim, 0, 1), x.narrow(dim, 0, 1)
        once.copy_(x)
        self.notes.append("far" if is_far else f"strides {strides}")
        return self._odd_strides(view)

    def keys(self, x: Tensor, unused: Tensor, rows: Rows = "aligned") -> Tensor:
        """A view of x, often with NaN and infinity where `unused`, a mask over the leading dimensions of x, says that
        nothing is read."""
        if not self.chance(0.5):
            return self.view(x, rows)
        self.notes.append("NaN where unused")
        poison = torch.full_like(x, torch.nan, dtype=torch.float32)
        if x.dtype != torch.float8_e4m3fn:  # e4m3fn has no infinities
            poison.masked_fill_(self.uniform(*x.shape) < 0.3, torch.inf)
        while unused.dim() < x.dim():
            unused = unused[..., None]
        return self.view(torch.where(unused, poison, x.float()).to(x.dtype), rows, repeat=False)

    def _odd_strides(self, x: Tensor) -> Tensor:
        """x, sometimes with arbitrary strides in dimensions of one element, where the stride is never used."""
        if 1 not in x.shape or not self.chance(0.3):
            return x
        strides = list(x.stride())
        for dim, size in enumerate(x.shape):
            if size == 1:
                strides[dim] = self.choice((0, 1, 7, 12345, 2**33 + 1))
        return x.as_strided(x.shape, strides, x.storage_offset())

    def _overlapping(self, x: Tensor, unit: int) -> Tensor:
        """Rows that share elements with their neighbors, as sliding windows do."""
        strides = list(x.contiguous().stride())
        strides[-2] = max(1, strides[-2] // 2 // unit) * unit
        if strides[-2] > x.contiguous().stride(-2) or any(stride % unit for stride in strides[:-1]):
            return x
        self.notes.append(f"overlapping rows {strides}")
        return x.contiguous().as_strided(x.shape, strides)
