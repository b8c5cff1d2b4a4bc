"""fp8_gemm on a GPU against float64: its own kernel for few rows, and PyTorch's scaled product for many."""

from functools import partial

import fp8_inputs
import pytest
import torch
from streams import captured_and_aside
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing import tolerances
from dsa_ext.testing.tolerances import FP8_SIMILARITY, similarity_error

pytestmark = pytest.mark.gpu

random = partial(fp8_inputs.random, device="cuda")


def make(rows: int, width: int, columns: int, round_scale: bool = False) -> tuple[Tensor, ...]:
    x, w = random(rows, columns).bfloat16(), random(width, columns, seed=1).bfloat16()
    return (*dsa_ext.act_quant(x, round_scale=round_scale), *dsa_ext.prepare_weight(w, round_scale))


def check(args: tuple[Tensor, ...]) -> Tensor:
    out = dsa_ext.fp8_gemm(*args)
    assert out.dtype == torch.bfloat16
    tolerances.check("fp8_gemm", out, dict(zip(("a", "a_s", "b", "b_s"), args, strict=True)))
    assert torch.equal(out, dsa_ext.fp8_gemm(*args))
    return out


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize(
    ("width", "columns"),
    [(1, 128), (64, 256), (200, 384), (201, 640), (576, 4096), (2112, 7168), (4096, 1536), (5120, 640), (7168, 2048)],
)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 31, 32, 50, 64, 65, 100, 257])
def test_values(rows: int, width: int, columns: int, round_scale: bool) -> None:
    check(make(rows, width, columns, round_scale))


def test_large() -> None:
    check(make(4096, 2112, 7168))


@pytest.mark.parametrize("rows", [3, 64])
def test_several_tiles_for_each_sm(rows: int) -> None:
    for width in (9001, 20000):
        check(make(rows, width, 384))


@pytest.mark.gpu_memory(5)
def test_weight_of_more_than_2_to_the_31_elements() -> None:
    a, a_s, b, b_s = make(64, 1280, 16384)
    many = b.view(torch.uint8).repeat(110, 1).view(b.dtype)
    out = dsa_ext.fp8_gemm(a, a_s, many, b_s.repeat(110, 1))
    assert many.numel() > 2**31
    assert similarity_error(out[:, -1280:], check((a, a_s, b, b_s))) <= FP8_SIMILARITY


def test_a_chain_of_kernels_that_start_early() -> None:
    """Each kernel reads what the one before it writes, and writes memory that an earlier one reads."""
    weights = [dsa_ext.prepare_weight((random(1024, 1024, seed=i) / 18).bfloat16()) for i in range(4)]

    def run(x: Tensor, wait: bool) -> Tensor:
        for i in range(40):
            quantized = dsa_ext.act_quant(x)
            if wait:
                torch.cuda.synchronize()
            x = dsa_ext.fp8_gemm(*quantized, *weights[i % 4])
            if wait:
                torch.cuda.synchronize()
        return x

    x = random(64, 1024).bfloat16()
    expected = run(x, wait=True)
    assert expected.isfinite().all()
    assert expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(x, wait=False)
    for _ in range(10):
        graph.replay()
        assert torch.equal(run(x, wait=False), expected)
        assert torch.equal(captured, expected)


def test_layouts() -> None:
    for rows in (5, 100):
        a, a_s, b, b_s = make(rows, 256, 640)
        expected = dsa_ext.fp8_gemm(a, a_s, b, b_s)
        apart = torch.nn.functional.pad(a.view(torch.uint8), (0, 128)).view(a.dtype)[:, :-128]
        for other in (
            (a, a_s.contiguous(), b, b_s),
            (a, a_s, b, b_s.contiguous()),
            (a, a_s, b, b_s.mT.contiguous().mT),
            (a, a_s, b, torch.nn.functional.pad(b_s, (4, 0))[:, 4:]),
            (apart, a_s, b, b_s),
        ):
            assert torch.equal(dsa_ext.fp8_gemm(*other), expected)


@pytest.mark.parametrize("columns", [128, 512, 640])
@pytest.mark.parametrize("rows", [40, 65])
def test_any_stride_of_a_single_row_of_scales(rows: int, columns: int) -> None:
    a, a_s, b, b_s = make(rows, 32, columns)
    far = b_s.new_empty(2, 12345)[:1, : columns // 128].copy_(b_s)
    assert torch.equal(check((a, a_s, b, far)), check((a, a_s, b, b_s)))


@pytest.mark.parametrize("columns", [512, 640])
@pytest.mark.parametrize("rows", [40, 128])
def test_scales_that_are_not_aligned(rows: int, columns: int) -> None:
    """In the layouts that cuBLASLt takes, but from addresses that it does not take."""
    a, a_s, b, b_s = make(rows, 208, columns)
    expected = dsa_ext.fp8_gemm(a, a_s, b, b_s)
    for offset in (1, 2, 3):
        shifted = [s.new_empty(4 + s.untyped_storage().nbytes() // 4)[offset:] for s in (a_s, b_s)]
        views = [new.as_strided(s.shape, s.stride(), offset) for new, s in zip(shifted, (a_s, b_s), strict=True)]
        for view, s in zip(views, (a_s, b_s), strict=True):
            view.copy_(s)
        assert torch.equal(dsa_ext.fp8_gemm(a, views[0], b, b_s), expected)
        assert torch.equal(dsa_ext.fp8_gemm(a, a_s, b, views[1]), expected)


@pytest.mark.parametrize("rows", [40, 200])
def test_rows_that_overlap(rows: int) -> None:
    """Few rows, and many, which PyTorch multiplies."""
    a, a_s, b, b_s = make(rows, 256, 1024)
    for step in (0, 128, 512):
        check((a, a_s, b.as_strided(b.shape, (step, 1)), b_s))
        check((a.as_strided(a.shape, (step, 1)), a_s, b, b_s))


def test_nan_stays_in_its_row() -> None:
    for rows in (5, 100):
        a, a_s, b, b_s = make(rows, 256, 640)
        expected = dsa_ext.fp8_gemm(a, a_s, b, b_s)
        a.view(torch.uint8)[3, 77] = 0x7F
        out = dsa_ext.fp8_gemm(a, a_s, b, b_s)
        others = torch.arange(rows, device="cuda") != 3
        assert out[3].isnan().all()
        assert torch.equal(out[others], expected[others])


def test_graph_capture_at_first_call_and_side_stream() -> None:
    args = make(33, 2112, 1536)
    captured, aside = captured_and_aside(lambda: dsa_ext.fp8_gemm(*args))
    expected = check(args)
    assert torch.equal(captured, expected)
    assert torch.equal(aside, expected)


@pytest.mark.parametrize("rows", [5, 100])
def test_errors(rows: int) -> None:
    a, a_s, b, b_s = make(rows, 256, 640)
    shifted = torch.nn.functional.pad(a.view(torch.uint8), (8, 0)).view(a.dtype)[:, 8:]
    with pytest.raises(RuntimeError, match="dsa::fp8_gemm: a must have rows that start 16-byte aligned"):
        dsa_ext.fp8_gemm(shifted, a_s, b, b_s)
    with pytest.raises(RuntimeError, match="dsa::fp8_gemm: b must have stride 1 in its last dimension, got stride 256"):
        dsa_ext.fp8_gemm(a, a_s, b.mT.contiguous().mT, b_s)
    with pytest.raises(RuntimeError, match="dsa::fp8_gemm: b_s must be on the device of a"):
        torch.ops.dsa.fp8_gemm(a, a_s, b, b_s.cpu())


@pytest.mark.parametrize("shape", [(0, 64, 128), (5, 0, 128), (100, 0, 128), (100, 64, 0), (5, 64, 0)], ids=str)
def test_empty_tensors(shape: tuple[int, int, int]) -> None:
    rows, width, columns = shape
    a, b = (torch.zeros(n, columns, device="cuda").to(torch.float8_e4m3fn) for n in (rows, width))
    a_s, b_s = (torch.zeros(n, columns // 128, device="cuda") for n in (rows, -(-width // 128)))
    out = dsa_ext.fp8_gemm(a, a_s, b, b_s)
    assert out.shape == (rows, width)
    assert not out.any()


def test_the_reference_runs_there_too() -> None:
    args = make(5, 200, 256)
    assert similarity_error(reference.fp8_gemm(*args), check(args)) <= FP8_SIMILARITY
