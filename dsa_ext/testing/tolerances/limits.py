"""Every tolerance, each once, and how a result is held against them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Of bf16 results and of gradients: see similarity_error, and similarity_limit for those of few numbers.
SIMILARITY = 7e-6
#: Of fp32 results, and of results of e4m3 inputs: tensor cores add such products up with 13 bits.
FP32_SIMILARITY, FP8_SIMILARITY = 1e-7, 5e-6
#: Of each element of a bf16 output of attention, as a fraction of sum_i p_i |v_i|: the rounding of P and of the result.
ELEMENTWISE = 2.0**-7
#: Of each element that is rounded to bf16 once, as a fraction of itself.
BF16_ROUNDING = 2.0**-8
#: Of each element of a gradient, as a fraction of the largest magnitude of its row.
GRADIENT_ELEMENTWISE = 0.04
#: Of each element of an fp32 result, as a fraction of the terms that do not cancel in it; what may cancel adds noise.
FP32_ELEMENTWISE = 1e-5
FP32_RESOLUTION = 2.0**-23
#: Of lse: max(LSE_ABSOLUTE, LSE_RELATIVE |lse|), plus units_of_lse * FP32_RESOLUTION * |sm_scale| times
#: max_i sum_d |q_d k_id| over the row's visible keys, the largest value that a partial sum of q.k can take. It matters
#: where products cancel to an lse near zero, in rows with a few visible keys, and where magnitudes are large.
#: Tensor cores truncate each of D / 16 partial sums, so that the errors add up in one direction. In data of one
#: magnitude these sums stay far below that of the magnitudes, of which one unit is enough: there the largest product is
#: at most WIDE / 2 times their mean. Beyond WIDE times a few that cancel may be larger than all others, and more units
#: are needed, in 40000 simulated sums up to 6 where the largest is 400 times the mean, and 13 where it is 10000 times.
LSE_ABSOLUTE, LSE_RELATIVE, WIDE, LSE_UNITS_OF_WIDEST = 1e-6, 3e-5, 48, 16
#: What a sum of bf16 products in fp32, or of e4m3 products on tensor cores, may be off, as a fraction of the sum of
#: their magnitudes: some units in the last place, since each partial sum is truncated.
SUM_OF_PRODUCTS, SUM_OF_FP8_PRODUCTS = 8 * FP32_RESOLUTION, 2.0**-11
#: fp32 numbers below the smallest normal one may become 0, in each of a few steps.
TINY = 4 * torch.finfo(torch.float32).tiny
#: Magnitudes from which on fp32 and bf16 may overflow in some order of operations: nothing is asked of what has them.
HUGE = 1e37
SIMILARITY_NAME = "similarity error"
#: The similarity error that one rounding of many numbers to bf16 makes.
BF16_SIMILARITY = BF16_ROUNDING**2 / 12
#: Roundings of a gradient's terms: of what arrives and of the factor of a score, such as P, dS or a weighted gradient.
TERM_ROUNDINGS = 2
#: Results of fewer numbers are judged one by one alone.
FEW = 64


def similarity_error(a: Tensor, b: Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2) in float64: 0 for equal tensors, sensitive to direction and to scale."""
    a, b = a.double(), b.double()
    norms = (a * a).sum() + (b * b).sum()
    return 0.0 if norms == 0 else float((a - b).square().sum() / norms)


def similarity_limit(limit: float, expected: float, count: float) -> float:
    """`limit`, or more where roundings to bf16 that make an `expected` error are of so few numbers that they do not
    average out: the mean of the squares of `count` normal errors is beyond this factor once in 10^11 (Laurent and
    Massart, 2000, lemma 1). It is at most what all roundings make if each is the largest that there is, and all have
    one direction.
    """
    roundings = expected / BF16_SIMILARITY
    largest = (roundings * BF16_ROUNDING) ** 2 / 2
    return max(limit, min(largest, expected * (1 + 10 / math.sqrt(count) + 50 / count)))


def effective_count(squares: Tensor) -> float:
    """Of how many equal numbers the sum of squares would be as uneven as of these; 0 for zeros."""
    if not squares.any():
        return 0.0
    squares = squares / squares.amax()
    return float(squares.sum() ** 2 / squares.square().sum())


class Rounded:
    """How much of the squares of all terms belongs to each number that is rounded to bf16, by a hash of its first bits:
    numbers that are as close to one another have about the same error, and count as one."""

    #: More different numbers than are needed to average out; bits of a float64 that two numbers have to share, of which
    #: 9 belong to the fraction; and an odd number of 64 random bits.
    _BITS, _SHARED, _FACTOR = 12, 21, -0x61C8864680B583EB

    def __init__(self, device: torch.device) -> None:
        self.squares = torch.zeros(2**self._BITS, dtype=torch.float64, device=device)

    def add(self, numbers: Tensor, squares: Tensor) -> None:
        shared = numbers.abs().contiguous().view(torch.int64) >> (64 - self._SHARED)
        places = shared * self._FACTOR >> (64 - self._BITS)
        squares = squares.nan_to_num(0, 0, 0).expand_as(numbers)
        self.squares.index_add_(0, (places & (2**self._BITS - 1)).flatten(), squares.flatten())

    @property
    def count(self) -> float:
        return max(1.0, effective_count(self.squares))


def units_of_lse(largest_over_mean: Tensor) -> Tensor:
    """In the last place of the sum of the magnitudes of products, by how far the largest may be above their mean."""
    return torch.where(largest_over_mean <= WIDE, 1, (largest_over_mean / 16).clamp(max=LSE_UNITS_OF_WIDEST))


@dataclass
class Expected:
    """One result in float64, and how far the operator's may be from it.

    The similarity is judged over those rows, of the last dimension, in which `noise`, which no implementation can
    avoid, makes less than half of its limit, or less than all of it where it is what many roundings make: rows of terms
    that cancel, or of scores that fp32 does not resolve, are judged by their elements alone.
    """

    name: str
    value: Tensor
    bound: Tensor  # of each element's |error|; inf where any finite number will do
    noise: Tensor  # the part of `bound` that similarity has to bear, as a root mean square
    similarity: float | None = SIMILARITY
    free: Tensor | None = None  # where fp32 may overflow: anything will do
    loose: Tensor | None = None  # where what is not finite may be NaN or either infinity
    roundings: int = 0  # to bf16, of a row's factor or of the result, that `noise` does not count
    count: float = math.inf  # of different numbers that are rounded
    least: float = 0  # similarity error that roundings make although they are of many terms


@dataclass
class Measure:
    """Of one result, one error and its limit."""

    result: str
    name: str
    value: float
    limit: float

    @property
    def fraction(self) -> float:
        """Of the limit; more than 1 is wrong."""
        return self.value / self.limit if self.limit else (0.0 if self.value == 0 else float("inf"))

    def __str__(self) -> str:
        return f"{self.result}: {self.name} {self.value:.3g}, limit {self.limit:.3g}"


def measures(result: Tensor, expected: Expected) -> list[Measure]:
    name, value = expected.name, expected.value
    if result.shape != value.shape:
        raise AssertionError(f"{name} has shape {list(result.shape)} instead of {list(value.shape)}")
    got = result.double()
    judged = torch.ones_like(value, dtype=torch.bool) if expected.free is None else ~expected.free.expand_as(value)
    found = [
        Measure(name, "elements with the wrong one of finite, -inf, inf and NaN", _wrong(got, expected, judged), 0)
    ]

    finite = judged & value.isfinite() & got.isfinite()
    error = torch.where(finite, got - value, 0).abs()
    bound = torch.where(finite, expected.bound.expand_as(value), torch.inf)
    over = torch.where(error == 0, 0, error / bound).nan_to_num(nan=torch.inf)
    found.append(Measure(name, "largest error of an element over its bound", _largest(over), 1))
    if expected.similarity is not None and value.numel() >= FEW:
        a, b, noise = (
            torch.where(finite, t, 0).reshape(-1, t.shape[-1] if t.dim() else 1)
            for t in (got, value, expected.noise.expand_as(value))
        )
        weights, noise = b.square().sum(-1), noise.square().sum(-1)
        limit = expected.similarity
        counts = noise <= (2 if expected.roundings else 1) * limit * weights
        # Rows that are equal may have one error.
        rows = Rounded(weights.device)
        rows.add(weights[counts].float().double(), weights[counts])
        if int(counts.sum()) * a.shape[1] >= FEW and rows.squares.any():
            if expected.roundings:
                unavoidable = float(noise[counts].sum() / weights[counts].sum()) / 2
                made = expected.roundings * BF16_SIMILARITY + max(unavoidable, expected.least)
                limit = similarity_limit(limit, made, min(rows.count, expected.count))
            found.append(Measure(name, SIMILARITY_NAME, similarity_error(a[counts], b[counts]), limit))
    return found


def _wrong(got: Tensor, expected: Expected, judged: Tensor) -> float:
    """How many elements are not of the right kind."""
    value = expected.value
    wrong = _kinds(got) != _kinds(value)
    if expected.loose is not None:
        wrong &= ~(expected.loose.expand_as(value) & ~got.isfinite() & ~value.isfinite())
    return float((wrong & judged).sum())


def _kinds(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=2, posinf=1, neginf=-1).masked_fill(x.isfinite(), 0)


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, which tell -0.0 from 0.0 and equal NaN."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def exact_measures(names: Sequence[str], got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Measure]:
    """Of results that have to be the same bits. Every NaN counts as one."""
    found = []
    for name, a, b in zip(names, got, expected, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise AssertionError(f"{name}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
        b = b.to(a.device)
        differs = bits(a.contiguous()) != bits(b.contiguous())
        if a.dtype.is_floating_point:
            differs &= ~(a.float().isnan() & b.float().isnan())
        found.append(Measure(name, "elements of other bits", float(differs.sum()), 0))
    return found


@dataclass
class Errors:
    """Of one call of an operator."""

    op: str
    measures: list[Measure]

    @property
    def similarity(self) -> float:
        """The largest of all results; 0 where none is judged."""
        return max((measure.value for measure in self.measures if measure.name == SIMILARITY_NAME), default=0.0)

    def check(self) -> dict[str, float]:
        """Each measure as a fraction of its limit; fails where one is beyond it."""
        beyond = [measure for measure in self.measures if not measure.fraction <= 1]
        if beyond:
            raise AssertionError(f"beyond the tolerances of {self.op}: {'; '.join(map(str, beyond))}")
        return {f"{measure.result}: {measure.name}": measure.fraction for measure in self.measures}


def wide(args: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with every floating-point tensor in float64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in args.items()
    }


def rounding_error(x: Tensor) -> Tensor:
    """What rounding to bf16 adds to float64 numbers; 0 where it overflows."""
    return (x.bfloat16().double() - x).nan_to_num(0, 0, 0)


def gradient(
    name: str,
    value: Tensor,
    noise: Tensor,
    squares: Tensor,
    made: Tensor,
    free: Tensor | None = None,
    count: float = math.inf,
    row_squares: Tensor | float = 0.0,
) -> Expected:
    """A gradient whose terms are rounded to bf16 before they are summed, `squares` being the sums of their squares,
    `made` the sums of what rounding adds to them, and `count` the number of different ones. Where they are summed row
    by row, and rows are rounded once more, `row_squares` are the sums of the rows' squares. Elements are held to
    GRADIENT_ELEMENTWISE of their row's largest one."""
    rounding, made = BF16_ROUNDING * squares.sqrt(), made.nan_to_num(0, 0, 0)
    of_rows = BF16_ROUNDING * torch.as_tensor(row_squares, device=value.device).nan_to_num(0, 0, 0).sqrt()
    of_terms = (TERM_ROUNDINGS * rounding.square() / 6).maximum(made.square())
    largest = _row_largest(value.abs().nan_to_num(0, 0, 0))
    return Expected(
        name,
        value,
        bound=GRADIENT_ELEMENTWISE * largest
        + BF16_ROUNDING * value.abs()
        + 3 * (rounding + of_rows)
        + made.abs()
        + noise
        + TINY,
        noise=(noise.square() + of_terms + of_rows.square() / 6).sqrt() + TINY,
        roundings=1,
        count=count,
        # Where terms do not cancel, what arrives may have one error in all of them, and so has what they share.
        least=BF16_SIMILARITY * (1 + (TERM_ROUNDINGS - 1) / count),
        free=overflows(value, noise) if free is None else free | overflows(value, noise),
        loose=torch.ones_like(value, dtype=torch.bool),
    )


def overflows(*magnitudes: Tensor) -> Tensor:
    """Where fp32 may overflow although all inputs are finite."""
    result = torch.zeros_like(magnitudes[0], dtype=torch.bool)
    for magnitude in magnitudes:
        result = result | (magnitude.isfinite() & (magnitude.abs() > HUGE))
    return result


def _row_largest(magnitude: Tensor) -> Tensor:
    return magnitude.amax(-1, keepdim=True) if magnitude.shape[-1] else magnitude


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
