"""fp8_gemm and prepare_weight without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from fp8_inputs import random
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext.testing.tolerances import FP8_SIMILARITY, similarity_error

OP = "fp8_gemm"
native, cpu, fake = callers(OP)
E4M3 = torch.float8_e4m3fn


def make(rows: int, width: int, columns: int, round_scale: bool = False) -> dict[str, Tensor]:
    a, a_s = dsa_ext.act_quant(random(rows, columns), round_scale=round_scale)
    b, b_s = dsa_ext.prepare_weight(random(width, columns, seed=1), round_scale)
    return {"a": a, "a_s": a_s, "b": b, "b_s": b_s}


def plain(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor) -> Tensor:
    """Block by block in float64."""
    out = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    rows = torch.arange(b.shape[0]) // 128
    for block in range(a.shape[1] // 128):
        columns = slice(128 * block, 128 * block + 128)
        product = a[:, columns].double() @ b[:, columns].double().mT
        out += product * a_s[:, block, None] * b_s[rows, block]
    return out


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 1, 128), (5, 200, 384), (70, 128, 1280), (3, 300, 256)])
def test_values(rows: int, width: int, columns: int, round_scale: bool) -> None:
    args = make(rows, width, columns, round_scale)
    out, expected = dsa_ext.fp8_gemm(**args), plain(**args)
    assert out.dtype == torch.bfloat16
    assert similarity_error(out, expected) <= FP8_SIMILARITY
    if out.numel() > 100:  # the error of so many elements is an average
        exact = random(rows, columns).double() @ random(width, columns, seed=1).double().mT
        assert similarity_error(out, exact) <= 2e-3


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "columns"), [(256, 384), (200, 512), (1, 128)])
def test_prepare_weight(width: int, columns: int, dtype: torch.dtype, round_scale: bool) -> None:
    w = random(width, columns).to(dtype)
    b, b_s = dsa_ext.prepare_weight(w, round_scale)
    blocks = (-(-width // 128), columns // 128)
    assert (b.dtype, b.shape, b_s.dtype, b_s.shape) == (E4M3, w.shape, torch.float32, blocks)
    assert b_s.stride() == (-(-blocks[1] // 4) * 4, 1)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            exact = w[part].abs().max().double().clamp(min=1e-4) / 448
            ratio = float(b_s[i, j] / exact)
            assert 1 - 1e-6 <= ratio < 2 if round_scale else abs(ratio - 1) <= 1e-6
            expected = (w[part].float() / b_s[i, j]).to(E4M3)
            assert torch.equal(b[part].view(torch.uint8), expected.view(torch.uint8))


def test_a_weight_of_zeros() -> None:
    b, b_s = dsa_ext.prepare_weight(torch.zeros(130, 128))
    assert not b.float().any()
    assert torch.equal(b_s, (torch.tensor(1e-4) / 448).expand(2, 1))


@pytest.mark.parametrize(("rows", "width", "columns"), [(0, 128, 128), (3, 0, 128), (3, 5, 0)])
def test_empty_tensors(rows: int, width: int, columns: int) -> None:
    out = dsa_ext.fp8_gemm(**make(rows, width, columns))
    assert out.shape == (rows, width)
    assert not out.any()


def zeros(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=E4M3)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.zeros(5, 256)}, "a must be float8_e4m3fn [M, K], got float32 [5, 256]"),
    ({"a": zeros(5, 100)}, "a's columns must be a multiple of 128, got float8_e4m3fn [5, 100]"),
    ({"b": zeros(200, 128)}, "b must be float8_e4m3fn [N, K=256], got float8_e4m3fn [200, 128]"),
    ({"a_s": torch.zeros(5, 1)}, "a_s must be float32 [M=5, Kb=2], got float32 [5, 1]"),
    ({"a_s": torch.zeros(5, 2).double()}, "a_s must be float32 [M, Kb], got float64 [5, 2]"),
    ({"b_s": torch.zeros(1, 2)}, "b_s must be float32 [Nb=2, Kb=2], got float32 [1, 2]"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, OP, make(5, 200, 256) | changes, message)


def test_errors_of_the_kernel_alone() -> None:
    args = make(5, 200, 256)
    assert_error(native, OP, args, "a must be on a CUDA device, got cpu")
    wide = {name: torch.cat([args[name]] * 2, 1) for name in ("a", "b")}
    message = "must have stride 1 in its last dimension, got stride 2"
    assert_error(native, OP, args | {"a": wide["a"][:, ::2]}, f"a {message}")
    assert_error(native, OP, args | {"b": wide["b"][:, ::2]}, f"b {message}")


def test_errors_of_prepare_weight() -> None:
    with pytest.raises(
        RuntimeError, match=r"dsa::prepare_weight: w's columns must be a multiple of 128, got .* \[3, 100\]"
    ):
        dsa_ext.prepare_weight(torch.zeros(3, 100))
    with pytest.raises(RuntimeError, match=r"w must be bfloat16 or float32 \[N, K\], got float64 \[3, 128\]"):
        dsa_ext.prepare_weight(torch.zeros(3, 128).double())
    w = torch.zeros(3, 128)
    with pytest.raises(RuntimeError, match=r"^dsa::prepare_weight: the gradient transforms of torch\.func"):
        torch.func.grad(lambda w: dsa_ext.prepare_weight(w)[1].sum())(w)
    with pytest.raises(RuntimeError, match=r"^dsa::prepare_weight: forward-mode differentiation"):
        torch.func.jvp(lambda w: dsa_ext.prepare_weight(w)[1], (w,), (w,))


def test_fake_opcheck_and_flops() -> None:
    args = make(5, 200, 256)
    a, b = fake(**args), cpu(**args)
    assert (a.shape, a.dtype, a.stride(), a.device.type) == (b.shape, b.dtype, b.stride(), "cuda")
    # opcheck compares arguments with torch.allclose, which has no fp8.
    tests = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.dsa.fp8_gemm.default, tuple(args.values()), test_utils=tests)
    with FlopCounterMode(display=False) as counter:
        dsa_ext.fp8_gemm(**args)
    assert counter.get_total_flops() == 2 * 5 * 200 * 256


def test_compile() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    weight = dsa_ext.prepare_weight(random(200, 384))

    def call(x: Tensor) -> Tensor:
        return dsa_ext.fp8_gemm(*dsa_ext.act_quant(x), *weight)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for rows in (5, 7, 70):
        x = random(rows, 384)
        assert torch.equal(compiled(x), call(x))
    assert counter.frame_count == 1
