"""mhc_post_fwd and mhc_post_bwd without a GPU: reference and gradients against the plain formula; the operators."""

from typing import Any

import pytest
import torch
from callers import assert_error
from mhc_inputs import (
    B,
    D,
    N,
    S,
    bf16,
    call_of,
    check_dtypes,
    check_fake_results,
    check_wrong_shape,
    gradients,
    make_post,
    post_bwd_arguments,
    zeros,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.reference.mhc import sinkhorn

OP, BWD = "mhc_post_fwd", "mhc_post_bwd"


def plain_post(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> Tensor:
    mixing = h_res.exp()
    for _ in range(iterations):
        mixing = mixing / mixing.sum(-2, keepdim=True)
        mixing = mixing / mixing.sum(-1, keepdim=True)
    return torch.einsum("bsij,bsjd->bsid", mixing, x) + torch.einsum("bsi,bsd->bsid", h_post, y)


@pytest.mark.parametrize("iterations", [1, 3, 20])
@pytest.mark.parametrize(("streams", "columns"), [(2, 128), (4, 256), (8, 128)])
def test_post(streams: int, columns: int, iterations: int) -> None:
    args = {name: value.requires_grad_() for name, value in make_post(streams, columns).items()}
    got, expected = dsa_ext.mhc_post(**args, iterations=iterations), plain_post(**args, iterations=iterations)
    torch.testing.assert_close(got, expected)
    leaves = list(args.values())
    torch.testing.assert_close(gradients(got, leaves), gradients(expected, leaves))


def test_gradcheck() -> None:
    args = [value.requires_grad_() for value in make_post().values()]
    assert torch.autograd.gradcheck(dsa_ext.mhc_post, args, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    check_dtypes(dsa_ext.mhc_post, make_post(dtype=dtype))


def test_sinkhorn() -> None:
    """Rows and columns sum to 1, also for weights whose exponentials overflow; adding a constant changes nothing."""
    generator = torch.Generator().manual_seed(0)
    h_res = 2 * torch.randn(5, 4, 4, generator=generator, dtype=torch.float64)
    mixing = sinkhorn(h_res, 100)[-1].exp()
    for dim in (-1, -2):
        torch.testing.assert_close(mixing.sum(dim), torch.ones(5, 4, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(sinkhorn(h_res + 1000, 100)[-1].exp(), mixing)
    wild = 500 * torch.randn(5, 4, 4, generator=generator)
    assert sinkhorn(wild, 20)[-1].isfinite().all()
    torch.testing.assert_close(sinkhorn(wild, 20)[-1].exp().sum(-1), torch.ones(5, 4))
    permutation = torch.full((3, 3), -200.0)
    permutation[[0, 1, 2], [2, 0, 1]] = 0
    assert torch.equal(sinkhorn(permutation, 20)[-1].exp(), permutation.exp())


def arguments(**changes: Any) -> dict[str, Any]:
    return make_post(dtype=torch.bfloat16) | changes


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": bf16(B, S, 3, D)}, "x must have 2, 4 or 8 streams, got 3"),
    ({"y": bf16(B, S, 2 * D)}, "y must be bfloat16 [B=2, S=3, D=128], got bfloat16 [2, 3, 256]"),
    ({"h_post": zeros(B, S, 3)}, "h_post must be float32 [B=2, S=3, M=4], got float32 [2, 3, 3]"),
    ({"h_res": zeros(B, S, N)}, "h_res must be float32 [B, S, M, N], got float32 [2, 3, 4]"),
    ({"iterations": 0}, "iterations must be from 1 to 100, got 0"),
]


@pytest.mark.parametrize("kind", ["native", "cpu", "fake"])
@pytest.mark.parametrize(
    ("op", "args", "message"),
    [(OP, arguments(**changes), text) for changes, text in ERRORS],
    ids=[f"{OP}: {text}" for _, text in ERRORS],
)
def test_errors(op: str, args: dict[str, Any], message: str, kind: str) -> None:
    if kind == "native":
        message = message.replace("2, 4 or 8 streams", "2 or 4 streams")
    assert_error(call_of(op, kind), op, args, message)


@pytest.mark.parametrize("kind", ["native", "cpu", "fake"])
def test_gradient_errors(kind: str) -> None:
    check_wrong_shape(BWD, kind, post_bwd_arguments(), "dout", "dout must be bfloat16 [B=2, S=3, n=4, D=128]")


def test_fake_results_are_like_those_of_the_cpu() -> None:
    check_fake_results(OP, arguments())
    check_fake_results(BWD, post_bwd_arguments())


def test_opcheck() -> None:
    args = tuple(value.requires_grad_() for value in make_post(dtype=torch.float32).values())
    torch.library.opcheck(torch.ops.dsa.mhc_post_fwd.default, args)
    torch.library.opcheck(torch.ops.dsa.mhc_post_bwd.default, tuple(post_bwd_arguments().values()))


def test_flops() -> None:
    args = [value.requires_grad_() for value in make_post(dtype=torch.float32).values()]
    with FlopCounterMode(display=False) as counter:
        dsa_ext.mhc_post(*args).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * B * S * N * N * D


def test_references_are_the_operators() -> None:
    args = make_post()
    torch.testing.assert_close(torch.ops.dsa.mhc_post_fwd(**args), reference.mhc_post_fwd(**args))
