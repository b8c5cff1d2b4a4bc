"""gated_fusion without a GPU: its reference and gradients against the plain formula; the operators."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_ext
from dsa_ext import reference

FWD, BWD = "gated_fusion_fwd", "gated_fusion_bwd"
native, cpu, fake = callers(FWD)
native_bwd, cpu_bwd, fake_bwd = callers(BWD)
B, H, N, D = 2, 3, 5, 64


def make(*sizes: int, dtype: torch.dtype = torch.float64, gate_dtype: torch.dtype | None = None) -> list[Tensor]:
    """fine and coarse [B, H, N, D], and gate."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, length, dim = sizes or (B, H, N, D)
    fine, coarse = (torch.randn(batch, heads, length, dim, generator=generator).to(dtype) for _ in range(2))
    gate = (torch.randn(batch, heads, length, generator=generator) * 3).to(gate_dtype or dtype)
    return [fine, coarse, gate]


def plain(fine: Tensor, coarse: Tensor, gate: Tensor) -> Tensor:
    share = gate.sigmoid()[..., None]
    return share * fine + (1 - share) * coarse


@pytest.mark.parametrize("sizes", [(B, H, N, D), (1, 1, 1, 128), (1, 12, 70, 128)], ids=str)
def test_values_and_gradients(sizes: tuple[int, int, int, int]) -> None:
    leaves = [t.requires_grad_() for t in make(*sizes)]
    out, expected = dsa_ext.gated_fusion(*leaves), plain(*leaves)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout))


def test_gradcheck() -> None:
    leaves = tuple(t.requires_grad_() for t in make(1, 2, 2, 64))
    assert torch.autograd.gradcheck(dsa_ext.gated_fusion, leaves, fast_mode=True)


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    """Computed in fp32 and rounded once."""
    leaves = [t.requires_grad_() for t in make(dtype=dtype, gate_dtype=gate_dtype)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out, expected = dsa_ext.gated_fusion(*leaves), plain(*wide)
    gradients, exact = torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), wide)
    for got, like, wanted in zip((out, *gradients), (leaves[0], *leaves), (expected, *exact), strict=True):
        assert got.dtype == like.dtype
        rtol = 2**-8 if like.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=1e-5)


def test_gates_of_every_size() -> None:
    """1 - s is precise where s is nearly 1."""
    fine, coarse, _ = make(1, 1, 9, 64, dtype=torch.float32)
    gate = torch.tensor([-math.inf, -200.0, -30, -1, 0, 1, 30, 200, math.inf])[None, None]
    out = dsa_ext.gated_fusion(fine, coarse, gate)
    torch.testing.assert_close(out[0, 0, [0, 1, -2, -1]], torch.cat([coarse[0, 0, :2], fine[0, 0, -2:]]))
    _, dcoarse, _ = torch.ops.dsa.gated_fusion_bwd(torch.ones_like(fine), fine, coarse, gate)
    torch.testing.assert_close(dcoarse[0, 0, :, 0].double(), (-gate[0, 0].double()).sigmoid(), rtol=1e-5, atol=1e-38)


def test_layouts() -> None:
    """out has the layout of fine, each gradient the layout of its argument."""
    fine, coarse, gate = make(dtype=torch.float32)
    expected = dsa_ext.gated_fusion(fine, coarse, gate)
    turned = fine.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    other = gate.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
    leaves = [turned, coarse.requires_grad_(), other]
    out = dsa_ext.gated_fusion(*leaves)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert out.stride() == turned.stride()
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert gradient.stride() == leaf.stride()


@pytest.mark.parametrize("sizes", [(0, 2, 3, 64), (1, 0, 3, 64), (1, 2, 0, 128)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int, int]) -> None:
    leaves = [t.requires_grad_() for t in make(*sizes)]
    out = dsa_ext.gated_fusion(*leaves)
    assert out.shape == leaves[0].shape
    out.sum().backward()


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def arguments(**changes: Any) -> dict[str, Any]:
    return {**dict(zip(("fine", "coarse", "gate"), make(dtype=torch.bfloat16), strict=True)), **changes}


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"fine": zeros(H, N, D)}, "fine must be bfloat16 [B, H, N, D], got bfloat16 [3, 5, 64]"),
    ({"fine": zeros(B, H, N, D).half()}, "fine must be bfloat16 [B, H, N, D], got float16 [2, 3, 5, 64]"),
    (
        {"coarse": zeros(B, H, 4, D)},
        "coarse must be bfloat16 [B=2, H=3, N=5, D=64], got bfloat16 [2, 3, 4, 64]",
    ),
    ({"gate": zeros(B, N, H)}, "gate must be bfloat16 or float32 [B=2, H=3, N=5], got bfloat16 [2, 5, 3]"),
    ({"gate": zeros(B, H, N).half()}, "gate must be bfloat16 or float32 [B, H, N], got float16 [2, 3, 5]"),
    (
        {"fine": zeros(B, H, N, 96), "coarse": zeros(B, H, N, 96)},
        "fine's head dimension must be 64 or 128, got 96",
    ),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, FWD, arguments(**changes), message)


@pytest.mark.parametrize("call", [native_bwd, cpu_bwd, fake_bwd], ids=["native", "cpu", "fake"])
def test_gradient_errors(call: Callable[..., Any]) -> None:
    args, message = arguments(dout=zeros(B, H, 4, D)), "dout must be bfloat16 [B=2, H=3, N=5, D=64]"
    assert_error(call, BWD, args, f"{message}, got bfloat16 [2, 3, 4, 64]")
    args = arguments(dout=zeros(B, H, N, D), gate=zeros(1))
    assert_error(call, BWD, args, "gate must be bfloat16 or float32 [B, H, N], got bfloat16 [1]")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fine": zeros(B, H, N, 2 * D)[..., ::2]},
            "fine must have stride 1 in its last dimension, got stride 2",
        ),
        (
            {"coarse": zeros(B, H, N, D + 4)[..., :D]},
            "coarse must have rows that start 16-byte aligned: strides in multiples of 8 elements, got stride 1020 "
            "in dimension 0",
        ),
        ({}, "fine must be on a CUDA device, got cpu"),
    ],
)
def test_errors_of_the_kernel_alone(changes: dict[str, Any], message: str) -> None:
    assert_error(native, FWD, arguments(**changes), message)
    assert_error(native_bwd, BWD, arguments(**changes, dout=zeros(B, H, N, D)), message)


def test_fake_results_are_like_those_of_the_cpu() -> None:
    args = arguments(fine=zeros(B, N, H, D).transpose(1, 2), gate=zeros(B, N, H).mT)
    dout = zeros(B, H, N, D)
    got = (fake(**args), *fake_bwd(**args, dout=dout))
    expected = (cpu(**args), *cpu_bwd(**args, dout=dout))
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.device.type == "cuda"


def test_opcheck() -> None:
    leaves = tuple(t.requires_grad_() for t in make(dtype=torch.bfloat16))
    torch.library.opcheck(torch.ops.dsa.gated_fusion_fwd.default, leaves)
    args = (torch.randn(B, H, N, D).bfloat16(), *make(dtype=torch.bfloat16))
    torch.library.opcheck(torch.ops.dsa.gated_fusion_bwd.default, args)


def test_gradients_have_no_gradient() -> None:
    leaves = [t.requires_grad_() for t in make(dtype=torch.float32)]
    gradient = torch.autograd.grad(dsa_ext.gated_fusion(*leaves).square().sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="dsa::gated_fusion_bwd: second derivatives"):
        gradient.sum().backward()


def test_compile() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def loss(*leaves: Tensor) -> Tensor:
        return dsa_ext.gated_fusion(*leaves).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for sizes in ((2, 3, 5, 64), (3, 2, 7, 64), (2, 4, 6, 64)):
        leaves = [t.requires_grad_() for t in make(*sizes, dtype=torch.float32)]
        got = torch.autograd.grad(compiled(*leaves), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(loss(*leaves), leaves))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1], "another shape was compiled for itself"


def test_reference_takes_any_columns() -> None:
    args = make(1, 1, 3, 7)
    torch.testing.assert_close(reference.gated_fusion_fwd(*args), plain(*args))
