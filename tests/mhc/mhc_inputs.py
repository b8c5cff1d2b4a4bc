"""Inputs of the operators of hyper-connections on the CPU, and checks that they share."""

from collections.abc import Callable
from typing import Any

import torch
from callers import assert_error, callers
from torch import Tensor

B, S, N, D = 2, 3, 4, 128
M = N * N + 2 * N


def make_pre(
    streams: int = N, columns: int = D, dtype: torch.dtype = torch.float64, rows: tuple[int, int] = (B, S)
) -> dict[str, Tensor]:
    """Streams that differ, and parameters with which every term matters."""
    generator = torch.Generator().manual_seed(0)
    mixed, wide = streams * streams + 2 * streams, torch.float64 if dtype == torch.float64 else torch.float32

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    scale = torch.arange(1, streams + 1)[:, None]
    args = {
        "phi": random(mixed, streams * columns) / (streams * columns) ** 0.5,
        "alpha": torch.tensor([1.5, -0.7, 2.0]),
        "bias": random(mixed),
        "gamma": 1 + random(streams * columns) / 4,
    }
    x = (random(*rows, streams, columns) * scale).to(dtype)
    return {"x": x} | {name: value.to(wide) for name, value in args.items()}


def make_post(streams: int = N, columns: int = D, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    sizes = {"x": (streams, columns), "y": (columns,), "h_post": (streams,), "h_res": (streams, streams)}
    dtypes = {"x": dtype, "y": dtype, "h_post": wide, "h_res": wide}
    return {
        name: torch.randn(B, S, *size, generator=generator, dtype=torch.float64).to(dtypes[name])
        for name, size in sizes.items()
    }


def gradients(outs: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a random sum over all results."""
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(2)
    douts = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    return torch.autograd.grad(outs, leaves, douts)


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def bf16(*sizes: int) -> Tensor:
    return zeros(*sizes, dtype=torch.bfloat16)


def pre_bwd_arguments() -> dict[str, Tensor]:
    """Arguments of mhc_pre_bwd, in the order of its schema."""
    pre = make_pre(dtype=torch.bfloat16)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = torch.ops.dsa.mhc_pre_fwd(**pre)
    upstream = {"dh_in": h_in, "dh_post": h_post, "dh_res": h_res}
    kept = {name: pre[name] for name in ("x", "phi", "alpha", "gamma")}
    return upstream | kept | {"h_post": h_post, "inv_rms": inv_rms, "h_mix": h_mix, "h_pre": h_pre}


def post_bwd_arguments() -> dict[str, Tensor]:
    """Arguments of mhc_post_bwd, in the order of its schema."""
    post = make_post(dtype=torch.bfloat16)
    return {"dout": post["x"], **post}


def call_of(op: str, kind: str) -> Callable[..., Any]:
    return dict(zip(("native", "cpu", "fake"), callers(op), strict=True))[kind]


def check_dtypes(call: Callable[..., Any], args: dict[str, Tensor]) -> None:
    """Values and gradients against float64: computed in fp32, and what has the dtype of x is rounded once."""
    leaves = [value.requires_grad_() for value in args.values()]
    exact = [value.detach().double().requires_grad_() for value in leaves]
    outs, expected = call(*leaves), call(*exact)
    outs, expected = (t if isinstance(t, tuple) else (t,) for t in (outs, expected))
    douts = [torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out) for out in outs]
    got = (*outs, *torch.autograd.grad(outs, leaves, douts))
    wanted = (*expected, *torch.autograd.grad(expected, exact, [d.double() for d in douts]))
    for a, b in zip(got, wanted, strict=True):
        rtol = 2**-7 if a.dtype == torch.bfloat16 else 1e-3
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol * float(b.detach().abs().mean()))


def check_wrong_shape(op: str, kind: str, args: dict[str, Tensor], name: str, message: str) -> None:
    """The error when the second dimension of one argument is cut to 1."""
    wrong = args[name][:, :1]
    text = f"{message}, got {str(wrong.dtype).removeprefix('torch.')} {list(wrong.shape)}"
    assert_error(call_of(op, kind), op, args | {name: wrong}, text)


def check_fake_results(op: str, args: dict[str, Any]) -> None:
    """Fake results on a CUDA device have the sizes, dtypes and strides of the CPU's results."""
    _, cpu, fake = callers(op)
    got, expected = fake(**args), cpu(**args)
    got, expected = (t if isinstance(t, tuple) else (t,) for t in (got, expected))
    for a, b in zip(got, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert a.device.type == "cuda"
