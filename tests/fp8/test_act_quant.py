"""act_quant without a GPU: its reference against the formula in float64, special values, layouts; the operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_ext
from dsa_ext import reference
from dsa_ext.reference.fp8 import dequantize, next_power_of_two

OP = "act_quant"
native, cpu, fake = callers(OP)
E4M3 = torch.float8_e4m3fn


def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks with magnitudes from 1e-6 to 1e6."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(*shape[:-1], shape[-1] // 128, 128, generator=generator)
    blocks *= 10 ** (12 * torch.rand(*blocks.shape[:-1], 1, generator=generator) - 6)
    return blocks.flatten(-2).to(dtype)


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128,), (3, 256), (2, 5, 384)], ids=str)
def test_values(shape: tuple[int, ...], dtype: torch.dtype, round_scale: bool) -> None:
    x = make(*shape, dtype=dtype)
    y, s = dsa_ext.act_quant(x, round_scale=round_scale)
    assert (y.dtype, y.shape, s.dtype, s.shape) == (E4M3, x.shape, torch.float32, (*shape[:-1], shape[-1] // 128))
    blocks = x.double().unflatten(-1, (-1, 128))
    exact = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    if round_scale:
        assert torch.equal(s.double(), 2 ** (exact * (1 - 2**-23)).log2().ceil())
    else:
        torch.testing.assert_close(s.double(), exact, rtol=2**-23, atol=0)
    # Three bits after the leading one for normal numbers, which are at least 2^-6.
    error = (dequantize(y, s).double() - x.double()).unflatten(-1, (-1, 128)).abs()
    assert (error <= torch.maximum(blocks.abs() * 2**-4, s.double()[..., None] * 2**-10) * (1 + 2**-20)).all()


def test_the_largest_magnitude_is_448() -> None:
    x = make(7, 640)
    y, _ = dsa_ext.act_quant(x)
    largest = y.float().abs().unflatten(-1, (-1, 128)).amax(-1)
    big_enough = x.abs().unflatten(-1, (-1, 128)).amax(-1) >= 1e-4
    assert (largest[big_enough] == 448).all()
    assert big_enough.any()


def test_powers_of_two() -> None:
    exact = 2.0 ** torch.arange(-126, 128)
    assert torch.equal(next_power_of_two(exact), exact)
    above = torch.nextafter(exact[:-1], torch.tensor(torch.inf))
    assert torch.equal(next_power_of_two(above), exact[1:])
    special = torch.tensor([torch.inf, torch.nan])
    torch.testing.assert_close(next_power_of_two(special), special, equal_nan=True)


def test_special_values() -> None:
    x = torch.zeros(4, 256)
    x[0, 0], x[0, 1] = -0.0, 1e-11
    x[1, 3], x[1, 4] = torch.nan, 1.0
    x[2, 5], x[2, 6] = -torch.inf, 2.0
    x[3, :128] = 3e38
    y, s = dsa_ext.act_quant(x)
    smallest = torch.tensor(1e-4) / 448
    assert torch.equal(s[:, 1], smallest.expand(4))
    assert s[0, 0] == smallest
    assert torch.equal(y[0].view(torch.uint8)[:3], torch.tensor([0x80, 0, 0], dtype=torch.uint8))
    assert s[1, 0].isnan()
    assert y[1, :128].float().isnan().all()
    assert s[2, 0] == torch.inf
    assert torch.equal(y[2, :128].float().isnan(), x[2, :128].isinf())
    assert (y[2, 6:].float() == 0).all()
    assert (y[3, :128].float() == 448).all()


def test_layout_of_scales() -> None:
    """Scales of one column of blocks are adjacent in memory, for any strides of x."""
    x = make(6, 5, 384)
    for view in (x, x.transpose(0, 1), x[:, ::2], x[1:2, :, 128:]):
        y, s = dsa_ext.act_quant(view)
        assert y.is_contiguous()
        rows = view.shape[:-1]
        assert s.stride() == (*torch.empty(rows).stride(), rows.numel())
        expected_y, expected_s = dsa_ext.act_quant(view.contiguous())
        assert torch.equal(y.view(torch.uint8), expected_y.view(torch.uint8))
        assert torch.equal(s, expected_s)


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (2, 0, 128)], ids=str)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    y, s = dsa_ext.act_quant(torch.zeros(shape))
    assert (y.shape, s.shape) == (shape, (*shape[:-1], shape[-1] // 128))


ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"x": torch.zeros(3, 100)},
        "x must be bfloat16 or float32 [.., N] with N a multiple of 128, got float32 [3, 100]",
    ),
    (
        {"x": torch.zeros(3, 128).half()},
        "x must be bfloat16 or float32 [.., N] with N a multiple of 128, got float16 [3, 128]",
    ),
    ({"x": torch.zeros(())}, "x must be bfloat16 or float32 [.., N] with N a multiple of 128, got float32 []"),
    ({"x": torch.zeros(3, 128), "block": 64}, "block must be 128, got 64"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("args", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], args: dict[str, Any], message: str) -> None:
    assert_error(call, OP, args, message)


def test_errors_of_the_kernel_alone() -> None:
    assert_error(native, OP, {"x": torch.zeros(3, 128)}, "x must be on a CUDA device, got cpu")


def test_fake_results_are_like_those_of_the_cpu() -> None:
    for x in (make(6, 5, 384), make(6, 5, 384).transpose(0, 1), make(256)):
        for a, b in zip(fake(x=x), cpu(x=x), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
            assert a.device.type == "cuda"


def test_opcheck_and_gradient() -> None:
    x = make(3, 256).requires_grad_()
    # opcheck compares results with torch.allclose, which has no fp8.
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.dsa.act_quant.default, (x,), test_utils=tests)
    assert not any(t.requires_grad for t in dsa_ext.act_quant(x))


def test_compile() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(x: Tensor) -> Tensor:
        return dequantize(*dsa_ext.act_quant(x, round_scale=True))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((3, 256), (5, 384), (7, 640)):
        x = make(*shape)
        assert torch.equal(compiled(x), call(x))
    assert counter.frame_count == 1


def test_reference_is_the_operator() -> None:
    x = make(3, 256)
    for a, b in zip(reference.act_quant(x), dsa_ext.act_quant(x), strict=True):
        assert torch.equal(a.float(), b.float())
