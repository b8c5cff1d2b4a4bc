"""mhc_pre_fwd without a GPU: its reference and gradients against the plain formula; the operator."""

from typing import Any

import pytest
import torch
from callers import assert_error
from mhc_inputs import B, D, M, N, S, bf16, call_of, check_dtypes, check_fake_results, gradients, make_pre, zeros
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference

OP = "mhc_pre_fwd"


def plain_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula, stream by stream."""
    streams = x.shape[2]
    flat = torch.cat([x[:, :, i] for i in range(streams)], -1)
    scaled = flat if gamma is None else flat * gamma
    t = torch.einsum("bsc,mc->bsm", scaled, phi) / ((flat**2).mean(-1, keepdim=True) + eps).sqrt()
    pre = 1 / (1 + (-alpha[0] * t[..., :streams] - bias[:streams]).exp()) + eps
    post = 2 / (1 + (-alpha[1] * t[..., streams : 2 * streams] - bias[streams : 2 * streams]).exp())
    res = alpha[2] * t[..., 2 * streams :] + bias[2 * streams :]
    h_in = sum(pre[..., i, None] * x[:, :, i] for i in range(streams))
    assert isinstance(h_in, Tensor)
    return h_in, post, res.unflatten(-1, (streams, streams))


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize(("streams", "columns"), [(2, 128), (4, 256), (8, 128)])
def test_pre(streams: int, columns: int, gamma: bool) -> None:
    args = {name: value.requires_grad_() for name, value in make_pre(streams, columns).items()}
    if not gamma:
        del args["gamma"]
    got, expected = dsa_ext.mhc_pre(**args), plain_pre(**args)
    torch.testing.assert_close(got, expected)
    leaves = list(args.values())
    torch.testing.assert_close(gradients(got, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    check_dtypes(dsa_ext.mhc_pre, make_pre(dtype=dtype))


def test_saved_results() -> None:
    """The results of mhc_pre_fwd that only the backward uses."""
    args = make_pre()
    _, _, _, inv_rms, h_mix, h_pre = torch.ops.dsa.mhc_pre_fwd(**args)
    flat = args["x"].flatten(2)
    torch.testing.assert_close(inv_rms, 1 / (flat.square().mean(-1) + 1e-6).sqrt())
    torch.testing.assert_close(h_mix, (flat * args["gamma"]) @ args["phi"].mT)
    assert ((h_pre > 1e-6) & (h_pre < 1 + 1e-6)).all()


def arguments(**changes: Any) -> dict[str, Any]:
    return make_pre(dtype=torch.bfloat16) | changes


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": bf16(B, N, D)}, "x must be bfloat16 [B, S, n, D], got bfloat16 [2, 4, 128]"),
    ({"x": bf16(B, S, 3, D)}, "x must have 2, 4 or 8 streams, got 3"),
    ({"x": bf16(B, S, N, 100)}, "x's hidden size must be a multiple of 128, at most 8192, got 100"),
    ({"x": bf16(B, S, N, 8320)}, "x's hidden size must be a multiple of 128, at most 8192, got 8320"),
    ({"phi": zeros(M, D)}, "phi must be float32 [M=24, C=512], got float32 [24, 128]"),
    ({"phi": bf16(M, N * D)}, "phi must be float32 [M, C], got bfloat16 [24, 512]"),
    ({"alpha": zeros(2)}, "alpha must be float32 [A=3], got float32 [2]"),
    ({"bias": zeros(N)}, "bias must be float32 [M=24], got float32 [4]"),
    ({"gamma": zeros(D)}, "gamma must be float32 [C=512], got float32 [128]"),
    ({"eps": -1.0}, "eps must be from 0 to less than 1, got -1"),
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


def test_fake_results_are_like_those_of_the_cpu() -> None:
    check_fake_results(OP, arguments())


def test_opcheck() -> None:
    args = tuple(value.requires_grad_() for value in make_pre(dtype=torch.float32).values())
    torch.library.opcheck(torch.ops.dsa.mhc_pre_fwd.default, args)
    torch.library.opcheck(torch.ops.dsa.mhc_pre_fwd.default, args[:4])


def test_flops() -> None:
    args = [value.requires_grad_() for value in make_pre(dtype=torch.float32).values()]
    with FlopCounterMode(display=False) as counter:
        out = dsa_ext.mhc_pre(*args)[0]
        out.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * B * S * M * N * D


def test_references_are_the_operators() -> None:
    args = make_pre()
    torch.testing.assert_close(torch.ops.dsa.mhc_pre_fwd(**args), reference.mhc_pre_fwd(**args))
