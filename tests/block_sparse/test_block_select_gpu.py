"""The kernel of block_select against the reference on the CPU, bit for bit, and its other promises."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import check_script, written_late
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import nasty_rows

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.block_select.default
DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
#: The operator's arguments after the scores. The modes use masses and Gini coefficients, only masses, or counts.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tau": 0.3, "min_blocks": 3, "min_ratio": 0.2, "max_ratio": 0.21},
    {"tau": 1.0, "min_blocks": 0, "min_ratio": 0.0, "max_ratio": 1.0},
    {"min_blocks": 0, "min_ratio": 0.0, "max_ratio": 0.0},
    {"min_blocks": 10**6},
    {"min_ratio": 1.0, "max_ratio": 1.0},
    {"tau": 1.0, "min_ratio": 1.0, "max_ratio": 1.0, "min_blocks": 0},
    {"tau": 1e-9, "min_ratio": 1.0, "max_ratio": 1.0, "min_blocks": 5},
    {"topk": 1},
    {"topk": 40},
    {"topk": 10**6},
]


def check(scores: Tensor, **options: Any) -> None:
    got = OP(scores, **options)
    assert all(t.is_contiguous() for t in got)
    expected = reference.block_select(scores.cpu(), **options)
    for name, a, b in zip(("q2k_index", "q2k_num"), got, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        wrong = (a.cpu() != b).nonzero().tolist()
        assert not wrong, f"{name} differs at {wrong[:5]}, with {options}"


def weights(*sizes: int, seed: int = 0) -> Tensor:
    """Rows from uniform to concentrated, every third with many ties; on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(sizes, generator=generator)
    x = x ** (2.0 ** torch.randint(-3, 7, (*sizes[:-1], 1), generator=generator))
    coarse = torch.arange(math.prod(sizes[:-1])).view(*sizes[:-1], 1) % 3 == 2
    return torch.where(coarse, (x * 20).floor() / 20, x)


def apart(scores: Tensor, gap: int) -> Tensor:
    """The same scores as a view on the GPU of rows that are `gap` elements longer, with +inf around them."""
    buffer = scores.new_full((*scores.shape[:3], scores.shape[3] + gap), math.inf, device=DEVICE)
    view = buffer[..., gap // 2 : gap // 2 + scores.shape[3]]
    view.copy_(scores)
    return view


@both_dtypes
@pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 364, 365, 511, 512, 513, 1024, 1025, 2048, 5000, 8193, 16384])
def test_rows(blocks: int, dtype: torch.dtype) -> None:
    nasty = torch.stack(list(nasty_rows(blocks).values()))
    rows = torch.cat([nasty, nasty.abs(), weights(20, blocks)]).to(dtype)[None, None]
    for options in OPTIONS:
        check(rows.to(DEVICE), **options)
        check(apart(rows, 3), **options)


@both_dtypes
@pytest.mark.parametrize("rows", [(1, 1, 1), (1, 1, 2), (1, 3, 1), (2, 2, 7), (1, 12, 364), (3, 5, 100)], ids=str)
def test_row_counts(rows: tuple[int, int, int], dtype: torch.dtype) -> None:
    for blocks in (1, 364, 1000):
        scores = weights(*rows, blocks).to(dtype).to(DEVICE)
        for options in ({}, {"min_ratio": 1.0, "max_ratio": 1.0}, {"topk": 40}):
            check(scores, **options)


@both_dtypes
def test_views(dtype: torch.dtype) -> None:
    scores = weights(3, 4, 5, 700).to(dtype).to(DEVICE)
    views = (
        scores.transpose(0, 1),
        scores.permute(2, 0, 1, 3),
        scores[::2, 1:, ::3],
        scores[..., 1:364],
        scores[..., 5:6],
        scores[:1, :, :1].expand(2, -1, 9, -1),
        scores.transpose(2, 3)[..., :1],
    )
    for view in views:
        for options in ({}, {"topk": 40}):
            check(view, **options)


@pytest.mark.gpu_memory(6)
def test_rows_more_than_2_to_the_31_elements_apart() -> None:
    buffer = torch.full((2**31 + 1000,), math.inf, device=DEVICE, dtype=torch.bfloat16)
    for strides in ((2**31 + 8, 0, 0, 1), (0, 2**31 + 8, 0, 1), (0, 0, 2**31 + 8, 1)):
        sizes = [2 if stride > 1 else 1 for stride in strides[:3]]
        scores = buffer.as_strided((*sizes, 700), strides)
        scores.copy_(weights(*sizes, 700))
        check(scores)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 5), (1, 0, 3, 5), (1, 2, 0, 5), (1, 2, 3, 0), (0, 0, 0, 0)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int, int]) -> None:
    for dtype in DTYPES:
        for options in OPTIONS:
            check(torch.zeros(sizes, dtype=dtype, device=DEVICE), **options)


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.integers(1, 600) | st.integers(1, 3000), seed=st.integers(0, 999), min_blocks=st.integers(0, 700),
    tau=st.floats(0, 1, exclude_min=True), ratios=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_any_options(
    blocks: int, seed: int, min_blocks: int, tau: float, ratios: list[float], dtype: torch.dtype
) -> None:
    rows = torch.cat([torch.stack(list(nasty_rows(blocks, seed).values())), weights(10, blocks, seed=seed)])
    scores = apart(rows.to(dtype)[None, None], seed % 5)
    check(scores, tau=tau, min_blocks=min_blocks, min_ratio=ratios[0], max_ratio=ratios[1])


@pytest.mark.parametrize("blocks", [364, 2048])
def test_repeats_are_bitwise_equal(blocks: int) -> None:
    scores = weights(1, 12, 364, blocks).bfloat16().float().to(DEVICE)  # many are equal
    first = OP(scores)
    for _ in range(25):
        torch.testing.assert_close(OP(scores), first, rtol=0, atol=0)


def test_modes() -> None:
    scores = weights(2, 3, 50, 364)
    for mode, options in (("gini_tau", {}), ("top_tau", {"tau": 0.5}), ("topk", {"topk": 9})):
        got = dsa_ext.block_select(scores.to(DEVICE), mode, **options)
        expected = dsa_ext.block_select(scores, mode, **options)
        torch.testing.assert_close(tuple(t.cpu() for t in got), expected, rtol=0, atol=0)


def test_side_stream() -> None:
    """Scores that are written late on a side stream: a kernel on any other stream would read zeros."""
    scores = weights(1, 12, 364, 364).to(DEVICE)
    expected = OP(scores)
    torch.testing.assert_close(written_late(scores, OP), expected, rtol=0, atol=0)


GRAPH_SCRIPT = """
import torch, dsa_ext
calls = []
for blocks, dtype in ((364, torch.float32), (2048, torch.bfloat16), (16384, torch.float32)):
    calls.append(torch.rand(1, 2, 30, blocks, device="cuda").pow(8).to(dtype))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [torch.ops.dsa.block_select(scores) for scores in calls]
for scores in calls:
    scores.copy_(scores.flip(3) ** 2)
for _ in range(3):
    graph.replay()
for results, scores in zip(captured, calls):
    torch.testing.assert_close(results, torch.ops.dsa.block_select(scores), rtol=0, atol=0)
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


@both_dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    scores = torch.rand(1, 2, 3, 50, dtype=dtype, device=DEVICE, requires_grad=True)
    for options in ({}, {"topk": 9}):
        torch.library.opcheck(OP, (scores,), options)


def test_compile() -> None:
    torch._dynamo.reset()
    scores = torch.rand(1, 2, 30, 364, device=DEVICE)

    def select(x: Tensor) -> tuple[Tensor, Tensor]:
        return dsa_ext.block_select(x.softmax(-1) ** 2)

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(scores), select(scores), rtol=0, atol=0)


def test_lists_are_those_of_the_cpu_after_a_coarse_attention() -> None:
    """Scores and lists as a model makes them. The lists are equal on both devices because the scores are."""
    scores = (torch.randn(1, 12, 100, 364, generator=torch.Generator().manual_seed(0)) * 3).softmax(-1)
    index, num = dsa_ext.block_select(scores.to(DEVICE))
    assert int(num.min()) >= 1
    assert int(num.max()) <= index.shape[3]
    used = torch.arange(index.shape[3], device=DEVICE) < num[..., None]
    assert ((index >= 0) == used).all()
    assert ((index[..., 1:] > index[..., :-1]) | ~used[..., 1:]).all()
    check(scores.to(DEVICE))
