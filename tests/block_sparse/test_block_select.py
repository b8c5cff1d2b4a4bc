"""block_select without a GPU: its reference against a loop over rows in Python; the operator."""

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_ext
from dsa_ext.testing.inputs import nasty_rows

OP = "block_select"
native, cpu, fake = callers(OP)
FLT_MAX = torch.finfo(torch.float32).max
MODES: list[dict[str, Any]] = [
    {},
    {"min_blocks": 0, "min_ratio": 0.0, "max_ratio": 1.0},
    {"tau": 0.3, "min_blocks": 3, "min_ratio": 0.2, "max_ratio": 0.21},
    {"tau": 1.0, "max_ratio": 0.9},
    {"min_blocks": 10**6},
    {"max_ratio": 0.0, "min_ratio": 0.0, "min_blocks": 0},
    {"mode": "top_tau"},
    {"mode": "top_tau", "tau": 1.0, "min_blocks": 0},
    {"mode": "top_tau", "tau": 1e-9, "min_blocks": 2},
    {"mode": "topk", "topk": 1},
    {"mode": "topk", "topk": 7},
    {"mode": "topk", "topk": 10**6},
]


def naive_mass(weight: float, largest: float) -> int:
    """floor(weight * 2^(30 - e)) in exact arithmetic, where 2^(e - 1) <= largest < 2^e."""
    exponent = 0
    while Fraction(2) ** exponent <= Fraction(largest):
        exponent += 1
    while Fraction(largest) < Fraction(2) ** (exponent - 1):
        exponent -= 1
    return math.floor(Fraction(weight) * Fraction(2) ** (30 - exponent))


def naive_row(
    row: list[float],
    mode: str = "gini_tau",
    topk: int = 0,
    tau: float = 0.9,
    min_blocks: int = 1,
    min_ratio: float = 0.05,
    max_ratio: float = 0.5,
) -> list[int]:
    """The ids that a row keeps, by the definition."""
    n = len(row)
    weights = [min(x, FLT_MAX) if x > 0 else 0.0 for x in row]
    order = sorted(range(n), key=lambda i: (-weights[i], i))
    if mode == "topk":
        return sorted(order[:topk])
    if not any(weights):
        return list(range(min(n, min_blocks)))
    masses = [naive_mass(weights[i], max(weights)) for i in order]
    total = sum(masses)
    count = next(count for count in range(n + 1) if float(sum(masses[:count])) >= tau * float(total))
    if mode == "gini_tau":
        moment = sum(i * mass for i, mass in enumerate(reversed(masses), start=1))
        gini = float(2 * moment - (n + 1) * total) / float(n * total)
        exact = Fraction(2 * moment, n * total) - Fraction(n + 1, n)
        assert abs(gini - exact) < 1e-15
        assert 0 <= gini < 1
        count = min(count, math.ceil((max_ratio - (max_ratio - min_ratio) * gini) * n))
    return sorted(order[: max(count, min_blocks)])


def most(n: int, mode: str = "gini_tau", topk: int = 0, min_blocks: int = 1, max_ratio: float = 0.5, **_: Any) -> int:
    limits = {"topk": topk, "top_tau": n, "gini_tau": max(min_blocks, math.ceil(max_ratio * n))}
    return max(1, min(n, limits[mode]))


def check(rows: Tensor, **options: Any) -> None:
    """Rows [R, Mkv] against the definition."""
    n = rows.shape[1]
    index, num = dsa_ext.block_select(rows[None, None], **options)
    slots = most(n, **options)
    assert index.shape == (1, 1, len(rows), slots)
    assert num.shape == (1, 1, len(rows))
    assert index.dtype == num.dtype == torch.int32
    assert index.is_contiguous()
    for row, got, count in zip(rows.tolist(), index[0, 0].tolist(), num[0, 0].tolist(), strict=True):
        expected = naive_row(row, **options)
        assert got == expected + [-1] * (slots - len(expected)), row
        assert count == len(expected)


def subnormal(bits: int) -> float:
    value: float = struct.unpack("f", struct.pack("I", bits))[0]
    return value


ROWS: dict[str, list[float]] = {
    "equal": [0.125] * 9,
    "ties where the count ends": [1, 2, 2, 2, 2, 3, 2, 2, 2],
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "one weight": [0, 0, 0, 5, 0, 0],
    "few weights among zeros": [0, 1e-3, 0, 0, 1e-3, 0, -0.0, 2e-3],
    "NaN and negatives": [math.nan, -1, 3, -math.inf, 2, math.nan, 1, 0],
    "nothing but NaN and negatives": [math.nan, -1, -math.inf, -1e-30],
    "infinity": [1, math.inf, 2, FLT_MAX, math.inf, 3e38],
    "infinity alone": [1, 1, math.inf],
    "subnormal": [subnormal(bits) for bits in (1, 2, 3, 2**23 - 1, 7, 0, 2**22)],
    "the smallest subnormal": [0, subnormal(1), subnormal(1), 0, 0],
    "largest and smallest": [subnormal(1), FLT_MAX, 2.0**-126, 1.0],
    "masses that round to 0": [1, 2.0**-31, 2.0**-30, 2.0**-29, 2.0**-40, 1],
    "powers of two": [2.0**-i for i in range(40)],
    "next to a power of two": [1, 1 - 2.0**-24, 1 + 2.0**-23, 2 - 2.0**-23],
    "one block": [0.3],
    "one block of no weight": [0.0],
}


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_edges(name: str, options: dict[str, Any]) -> None:
    check(torch.tensor([ROWS[name]], dtype=torch.float32), **options)


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 31, 100])
def test_nasty_rows(blocks: int, options: dict[str, Any]) -> None:
    rows = torch.stack(list(nasty_rows(blocks).values()))
    check(rows, **options)
    check(rows.bfloat16().float(), **options)


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(st.floats(width=32) | st.floats(0, 1, width=32) | st.sampled_from([0.0, 0.25, 1.0]), max_size=40),
    tau=st.floats(0, 1, exclude_min=True), min_blocks=st.integers(0, 45),
    ratios=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted), mode=st.sampled_from(["gini_tau", "top_tau"]),
)  # fmt: skip
def test_any_row(row: list[float], tau: float, min_blocks: int, ratios: list[float], mode: str) -> None:
    ends = {"min_ratio": ratios[0], "max_ratio": ratios[1]} if mode == "gini_tau" else {}
    check(torch.tensor(row, dtype=torch.float32).view(1, -1), mode=mode, tau=tau, min_blocks=min_blocks, **ends)


def test_the_more_concentrated_the_fewer() -> None:
    rows = torch.rand(1, 300).double().pow(torch.tensor([[0.0], [1], [4], [16], [64]])).float()
    num = dsa_ext.block_select(rows[None, None], tau=1.0, max_ratio=1.0)[1].flatten().tolist()
    assert num[0] == 300
    assert num == sorted(num, reverse=True)
    assert num[-1] < 60


def test_scale_does_not_matter() -> None:
    scores = torch.rand(2, 3, 4, 50) ** 6
    expected = dsa_ext.block_select(scores)
    for exponent in (-60, 100):
        torch.testing.assert_close(dsa_ext.block_select(scores * 2.0**exponent), expected, rtol=0, atol=0)


def test_bf16() -> None:
    scores = (torch.rand(2, 3, 4, 50) ** 6).bfloat16()
    torch.testing.assert_close(dsa_ext.block_select(scores), dsa_ext.block_select(scores.float()), rtol=0, atol=0)


def test_strides() -> None:
    scores = torch.rand(2, 3, 4, 50)
    expected = dsa_ext.block_select(scores)
    for view in (scores.transpose(0, 2).contiguous().transpose(0, 2), scores.mT.contiguous().mT):
        got = dsa_ext.block_select(view)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert all(t.is_contiguous() for t in got)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 5), (1, 0, 3, 5), (1, 2, 0, 5), (1, 2, 3, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("options", MODES, ids=str)
def test_empty_tensors(sizes: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    index, num = dsa_ext.block_select(torch.zeros(sizes), **options)
    assert index.shape == (*sizes[:3], most(sizes[3], **options))
    assert num.shape == sizes[:3]
    if sizes[3] == 0:
        assert (index == -1).all()
        assert (num == 0).all()


def test_lists_are_those_of_block_sparse_attn() -> None:
    """With every block listed, block_sparse_attn is attention over all keys."""
    q, k, v = (torch.randn(1, 2, 150, 64) for _ in range(3))
    lists = dsa_ext.block_select(torch.rand(1, 2, 3, 3), "top_tau", tau=1.0)
    out = dsa_ext.block_sparse_attn(q, k, v, *lists)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), rtol=1e-5, atol=1e-5)


def arguments(**changes: Any) -> dict[str, Any]:
    return {"scores": torch.rand(1, 2, 3, 4), **changes}


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"scores": torch.zeros(2, 3, 4)}, "scores must be float32 or bfloat16 [B, H, Mq, Mkv], got float32 [2, 3, 4]"),
    (
        {"scores": torch.zeros(1, 2, 3, 4).half()},
        "scores must be float32 or bfloat16 [B, H, Mq, Mkv], got float16 [1, 2, 3, 4]",
    ),
    ({"scores": torch.zeros(1, 1, 1, 16385)}, "scores must have at most 16384 blocks per row, got 16385"),
    ({"topk": 0}, "topk must be at least 1, got 0"),
    ({"tau": 0.0}, "tau must be above 0 and at most 1, got 0"),
    ({"tau": 1.5}, "tau must be above 0 and at most 1, got 1.5"),
    ({"tau": math.nan}, "tau must be above 0 and at most 1, got nan"),
    ({"min_blocks": -1}, "min_blocks must be at least 0, got -1"),
    ({"min_ratio": -0.5}, "min_ratio and max_ratio must be ascending, from 0 to 1, got -0.5 and 0.5"),
    ({"max_ratio": 1.25}, "min_ratio and max_ratio must be ascending, from 0 to 1, got 0.05 and 1.25"),
    ({"min_ratio": 0.75}, "min_ratio and max_ratio must be ascending, from 0 to 1, got 0.75 and 0.5"),
    ({"max_ratio": math.nan}, "min_ratio and max_ratio must be ascending, from 0 to 1, got 0.05 and nan"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, OP, arguments(**changes), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scores": torch.rand(1, 2, 4, 4)[..., ::2]},
            "scores must have stride 1 in its last dimension, got stride 2",
        ),
        ({}, "scores must be on a CUDA device, got cpu"),
    ],
)
def test_errors_of_the_kernel_alone(changes: dict[str, Any], message: str) -> None:
    assert_error(native, OP, arguments(**changes), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "top_p"}, "mode must be 'gini_tau', 'top_tau' or 'topk', got 'top_p'"),
        ({"mode": "topk"}, "topk must be a number in mode 'topk', got None"),
        ({"topk": 3}, "topk must be None in mode 'gini_tau', got 3"),
        ({"mode": "top_tau", "topk": 3}, "topk must be None in mode 'top_tau', got 3"),
    ],
)
def test_errors_of_the_mode(options: dict[str, Any], message: str) -> None:
    def call(**args: Any) -> Any:
        return dsa_ext.block_select(**args)

    assert_error(call, OP, arguments(**options), message)


@pytest.mark.parametrize("options", [{}, {"topk": 3}, {"min_blocks": 2, "min_ratio": 0.5, "max_ratio": 1.0}], ids=str)
def test_fake_results_are_like_those_of_the_cpu(options: dict[str, Any]) -> None:
    for got, expected in zip(fake(**arguments(**options)), cpu(**arguments(**options)), strict=True):
        assert (got.shape, got.dtype, got.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert got.device.type == "cuda"


def test_opcheck() -> None:
    scores = torch.rand(2, 3, 4, 9, requires_grad=True)
    for options in ({}, {"topk": 3}, {"tau": 0.5, "min_blocks": 2, "max_ratio": 1.0}):
        torch.library.opcheck(torch.ops.dsa.block_select.default, (scores,), options)


def test_results_have_no_gradient() -> None:
    assert not any(t.requires_grad for t in dsa_ext.block_select(torch.rand(1, 2, 3, 4, requires_grad=True)))


@pytest.mark.parametrize("options", [{}, {"mode": "topk", "topk": 3}, {"mode": "top_tau"}], ids=str)
def test_compile(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def select(scores: Tensor) -> tuple[Tensor, Tensor]:
        index, num = dsa_ext.block_select(scores * 2, **options)
        return index + 1, num

    compiled = torch.compile(select, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for sizes in ((2, 3, 4, 50), (3, 2, 5, 61), (2, 5, 3, 7)):
        scores = torch.rand(sizes)
        torch.testing.assert_close(compiled(scores), select(scores), rtol=0, atol=0)
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1], "another shape was compiled for itself"
