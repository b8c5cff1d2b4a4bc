"""All tolerances, each defined once, and the comparison of a result with them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Limit of similarity_error for bf16 results and for gradients; see similarity_limit if few numbers are rounded.
SIMILARITY = 7e-6
#: The same for fp32 results, and for results of e4m3 inputs: tensor cores accumulate their products with 13 bits.
FP32_SIMILARITY, FP8_SIMILARITY = 1e-7, 5e-6
#: Error of each element of a bf16 attention output, as a fraction of sum_i p_i |v_i|: rounding of P and of the result.
ELEMENTWISE = 2.0**-7
#: Error of each element that is rounded to bf16 once, as a fraction of its magnitude.
BF16_ROUNDING = 2.0**-8
#: Error of each element of a gradient, as a fraction of the largest magnitude of its row.
GRADIENT_ELEMENTWISE = 0.04
#: Error of each element of an fp32 result, as a fraction of its terms that do not cancel; those that may add noise.
FP32_ELEMENTWISE = 1e-5
FP32_RESOLUTION = 2.0**-23
#: Error of lse: max(LSE_ABSOLUTE, LSE_RELATIVE |lse|), plus units_of_lse * FP32_RESOLUTION * |sm_scale| times
#: max_i sum_d |q_d k_id| over the row's visible keys, the largest value that a partial sum of q.k can take. The second
#: part matters if products cancel to an lse near zero, in rows with a few visible keys, and for large magnitudes.
#: Tensor cores truncate each of D / 16 partial sums, so the errors add up in one direction. If all data have similar
#: magnitudes, so that the largest product is at most WIDE / 2 times the mean, the partial sums stay far below the sum
#: of the magnitudes: up to 1.6 units in 800000 simulated sums of normal numbers. Beyond WIDE times the mean, a few
#: products that cancel may be larger than all others, and more units are needed: in 40000 simulated sums up to 6 where
#: the largest is 400 times the mean, and 13 where it is 10000 times the mean.
LSE_ABSOLUTE, LSE_RELATIVE, WIDE, LSE_UNITS, LSE_UNITS_OF_WIDEST = 1e-6, 3e-5, 48, 2, 16
#: Error of a sum of bf16 products in fp32, and of e4m3 products on tensor cores, as a fraction of the sum of their
#: magnitudes: some units in the last place, since each partial sum is truncated.
SUM_OF_PRODUCTS, SUM_OF_FP8_PRODUCTS = 8 * FP32_RESOLUTION, 2.0**-11
#: fp32 numbers below the smallest normal one may be flushed to 0, in each of a few steps.
TINY = 4 * torch.finfo(torch.float32).tiny
#: The smallest number of fp32, and so the resolution of denormal numbers.
DENORMAL = 2.0**-149
#: Beyond this magnitude fp32 and bf16 may overflow in some order of operations: results of such terms are not checked.
HUGE = 1e37
SIMILARITY_NAME = "similarity error"
#: Similarity error of one rounding of many numbers to bf16.
BF16_SIMILARITY = BF16_ROUNDING**2 / 12
#: bf16 roundings in a gradient's terms: of the upstream gradient, and of the factor that belongs to a score (P, dS or a
#: weighted gradient).
TERM_ROUNDINGS = 2
#: Results of fewer elements are only compared element by element.
FEW = 64


def similarity_error(a: Tensor, b: Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2) in float64: 0 for equal tensors, sensitive to direction and to scale."""
    a, b = a.double(), b.double()
    norms = (a * a).sum() + (b * b).sum()
    return 0.0 if norms == 0 else float((a - b).square().sum() / norms)


def similarity_limit(limit: float, expected: float, count: float) -> float:
    """The limit of similarity_error for a result whose roundings to bf16 make an `expected` similarity error.

    It is `limit`, or more if so few numbers are rounded that their errors do not average out: the mean of the squares
    of `count` normal errors exceeds the factor below once in 10^11 (Laurent and Massart, 2000, lemma 1). This increase
    ends at the similarity error that results if each rounding error is the largest possible and all have the same sign.
    """
    roundings = expected / BF16_SIMILARITY
    largest = (roundings * BF16_ROUNDING) ** 2 / 2
    return max(limit, min(largest, expected * (1 + 10 / math.sqrt(count) + 50 / count)))


def effective_count(squares: Tensor) -> float:
    """Effective number of terms (sum s)^2 / sum s^2 of `squares` s: n for n equal ones, 0 if all are 0."""
    if not squares.any():
        return 0.0
    squares = squares / squares.amax()
    return float(squares.sum() ** 2 / squares.square().sum())


class Rounded:
    """How the squares of all terms are distributed over the distinct numbers that are rounded to bf16.

    Numbers are told apart by a hash of their first bits: those that agree in these bits have about the same rounding
    error, and count as one.
    """

    #: Bits of the hash: it has more values than distinct numbers are needed for errors to average out. Leading bits of
    #: a float64 that two numbers must share to count as one, 9 of them of the fraction. An odd random 64-bit factor.
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
    """Error of q.k in units in the last place of the sum of its products' magnitudes.

    It depends on the ratio of the largest magnitude to the mean: see LSE_ABSOLUTE.
    """
    return torch.where(largest_over_mean <= WIDE, LSE_UNITS, (largest_over_mean / 16).clamp(max=LSE_UNITS_OF_WIDEST))


@dataclass
class Expected:
    """One result in float64, and how far the operator's result may be from it.

    The similarity is computed over some rows (of the last dimension) only: those in which `noise`, the error that no
    implementation can avoid, makes less than half of the limit, or less than all of it if the limit is that of many
    roundings. The other rows, whose terms cancel or whose scores fp32 does not resolve, are only compared element by
    element.
    """

    name: str
    value: Tensor
    bound: Tensor  # of each element's |error|; inf where any finite number is accepted
    noise: Tensor  # the part of `bound` that the similarity has to allow for, as a root mean square
    similarity: float | None = SIMILARITY
    free: Tensor | None = None  # where fp32 may overflow: any value is accepted
    loose: Tensor | None = None  # where a value that is not finite may be NaN or either infinity
    roundings: int = 0  # to bf16, of a factor of a row or of the result, that `noise` does not include
    count: float = math.inf  # number of distinct numbers that are rounded
    least: float = 0  # similarity error that roundings make even if they are of many terms


@dataclass
class Measure:
    """One error of one result, and its limit."""

    result: str
    name: str
    value: float
    limit: float

    @property
    def fraction(self) -> float:
        """The error as a fraction of its limit; more than 1 is a failure."""
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
        # Equal rows may have the same error: they count as one.
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
    """Number of elements that are not of the expected kind: finite, -inf, inf or NaN."""
    value = expected.value
    wrong = _kinds(got) != _kinds(value)
    if expected.loose is not None:
        wrong &= ~(expected.loose.expand_as(value) & ~got.isfinite() & ~value.isfinite())
    return float((wrong & judged).sum())


def _kinds(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=2, posinf=1, neginf=-1).masked_fill(x.isfinite(), 0)


def bits(x: Tensor) -> Tensor:
    """The same memory as integers: -0.0 differs from 0.0, and NaN of the same bits are equal."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def exact_measures(names: Sequence[str], got: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Measure]:
    """The measures of results that must be bitwise equal. All NaN count as equal."""
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
    """The measures of one call of an operator."""

    op: str
    measures: list[Measure]

    @property
    def similarity(self) -> float:
        """The largest similarity error of all results; 0 if it was not computed for any."""
        return max((measure.value for measure in self.measures if measure.name == SIMILARITY_NAME), default=0.0)

    def check(self) -> dict[str, float]:
        """Each measure as a fraction of its limit; raises AssertionError if one exceeds its limit."""
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
    """What rounding to bf16 adds to float64 numbers; 0 where the rounded number overflows."""
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
    """A gradient whose terms are rounded to bf16 before they are summed.

    The bound of an element includes GRADIENT_ELEMENTWISE times the largest element of its row.

    Args:
        name: Name of the gradient.
        value: The gradient in float64.
        noise: Sums of the other errors of the terms.
        squares: Sums of the squares of the terms.
        made: Sums of what rounding adds to the terms.
        free: Where fp32 may overflow.
        count: Number of distinct terms.
        row_squares: Sums of the squares of the rows, if terms are summed row by row and the rows are rounded once more.
    """
    rounding, made = BF16_ROUNDING * squares.sqrt(), made.nan_to_num(0, 0, 0)
    row_rounding = BF16_ROUNDING * torch.as_tensor(row_squares, device=value.device).nan_to_num(0, 0, 0).sqrt()
    term_variance = (TERM_ROUNDINGS * rounding.square() / 6).maximum(made.square())
    largest = _row_largest(value.abs().nan_to_num(0, 0, 0))
    return Expected(
        name,
        value,
        bound=GRADIENT_ELEMENTWISE * largest
        + BF16_ROUNDING * value.abs()
        + 3 * (rounding + row_rounding)
        + made.abs()
        + noise
        + TINY,
        noise=(noise.square() + term_variance + row_rounding.square() / 6).sqrt() + TINY,
        roundings=1,
        count=count,
        # If terms do not cancel, the upstream gradient may have the same error in all, and so may their common factor.
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
