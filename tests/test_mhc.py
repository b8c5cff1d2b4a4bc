"""Hyper-connections without a GPU: references and gradients against plain formulas, the operators, the module."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.nn import HyperConnection
from dsa_ext.reference.mhc import sinkhorn

PRE, PRE_BWD, POST, POST_BWD = "mhc_pre_fwd", "mhc_pre_bwd", "mhc_post_fwd", "mhc_post_bwd"
B, S, N, D = 2, 3, 4, 128
M = N * N + 2 * N


def make_pre(
    streams: int = N, columns: int = D, dtype: torch.dtype = torch.float64, rows: tuple[int, int] = (B, S)
) -> dict[str, Tensor]:
    """Streams of which none is like another, and parameters under which all parts count."""
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


def plain_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """As it is written, stream by stream."""
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


def plain_post(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> Tensor:
    mixing = h_res.exp()
    for _ in range(iterations):
        mixing = mixing / mixing.sum(-2, keepdim=True)
        mixing = mixing / mixing.sum(-1, keepdim=True)
    return torch.einsum("bsij,bsjd->bsid", mixing, x) + torch.einsum("bsi,bsd->bsid", h_post, y)


def gradients(outs: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a random sum over all results."""
    outs = outs if isinstance(outs, tuple) else (outs,)
    generator = torch.Generator().manual_seed(2)
    douts = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outs]
    return torch.autograd.grad(outs, leaves, douts)


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


@pytest.mark.parametrize("iterations", [1, 3, 20])
@pytest.mark.parametrize(("streams", "columns"), [(2, 128), (4, 256), (8, 128)])
def test_post(streams: int, columns: int, iterations: int) -> None:
    args = {name: value.requires_grad_() for name, value in make_post(streams, columns).items()}
    got, expected = dsa_ext.mhc_post(**args, iterations=iterations), plain_post(**args, iterations=iterations)
    torch.testing.assert_close(got, expected)
    leaves = list(args.values())
    torch.testing.assert_close(gradients(got, leaves), gradients(expected, leaves))


def test_gradcheck() -> None:
    pre = [value.requires_grad_() for value in make_pre().values()]
    assert torch.autograd.gradcheck(dsa_ext.mhc_pre, pre, fast_mode=True)
    assert torch.autograd.gradcheck(dsa_ext.mhc_pre, pre[:4], fast_mode=True)
    post = [value.requires_grad_() for value in make_post().values()]
    assert torch.autograd.gradcheck(dsa_ext.mhc_post, post, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    """Computed in fp32; what is like x is rounded once."""
    calls: tuple[tuple[Callable[..., Any], dict[str, Tensor]], ...]
    calls = ((dsa_ext.mhc_pre, make_pre(dtype=dtype)), (dsa_ext.mhc_post, make_post(dtype=dtype)))
    for call, args in calls:
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


def test_saved_results() -> None:
    """What mhc_pre_fwd gives beside the public results."""
    args = make_pre()
    _, _, _, inv_rms, h_mix, h_pre = torch.ops.dsa.mhc_pre_fwd(**args)
    flat = args["x"].flatten(2)
    torch.testing.assert_close(inv_rms, 1 / (flat.square().mean(-1) + 1e-6).sqrt())
    torch.testing.assert_close(h_mix, (flat * args["gamma"]) @ args["phi"].mT)
    assert ((h_pre > 1e-6) & (h_pre < 1 + 1e-6)).all()


def test_sinkhorn() -> None:
    """Rows and columns sum to 1, from weights that no exponential could hold too; a shift of all changes nothing."""
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


@pytest.mark.parametrize("rows", [(0, 3), (2, 0)], ids=str)
def test_empty_tensors(rows: tuple[int, int]) -> None:
    args = {name: value.requires_grad_() for name, value in make_pre(rows=rows).items()}
    h_in, h_post, h_res = dsa_ext.mhc_pre(**args)
    out = dsa_ext.mhc_post(args["x"], h_in, h_post, h_res)
    assert out.shape == args["x"].shape
    out.sum().backward()
    assert args["phi"].grad is not None
    assert not args["phi"].grad.any()


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*sizes, dtype=dtype)


def pre_arguments(**changes: Any) -> dict[str, Any]:
    return make_pre(dtype=torch.bfloat16) | changes


def post_arguments(**changes: Any) -> dict[str, Any]:
    return make_post(dtype=torch.bfloat16) | changes


def bf16(*sizes: int) -> Tensor:
    return zeros(*sizes, dtype=torch.bfloat16)


PRE_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": bf16(B, N, D)}, "x must be bfloat16 [B, S, n, D], got bfloat16 [2, 4, 128]"),
    ({"x": bf16(B, S, 3, D)}, "x must have 2, 4 or 8 streams, got 3"),
    ({"x": bf16(B, S, N, 100)}, "x's columns must be a multiple of 128, at most 8192, got 100"),
    ({"x": bf16(B, S, N, 8320)}, "x's columns must be a multiple of 128, at most 8192, got 8320"),
    ({"phi": zeros(M, D)}, "phi must be float32 [M=24, C=512], got float32 [24, 128]"),
    ({"phi": bf16(M, N * D)}, "phi must be float32 [M, C], got bfloat16 [24, 512]"),
    ({"alpha": zeros(2)}, "alpha must be float32 [A=3], got float32 [2]"),
    ({"bias": zeros(N)}, "bias must be float32 [M=24], got float32 [4]"),
    ({"gamma": zeros(D)}, "gamma must be float32 [C=512], got float32 [128]"),
    ({"eps": -1.0}, "eps must be from 0 to less than 1, got -1"),
]
POST_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"x": bf16(B, S, 3, D)}, "x must have 2, 4 or 8 streams, got 3"),
    ({"y": bf16(B, S, 2 * D)}, "y must be bfloat16 [B=2, S=3, D=128], got bfloat16 [2, 3, 256]"),
    ({"h_post": zeros(B, S, 3)}, "h_post must be float32 [B=2, S=3, M=4], got float32 [2, 3, 3]"),
    ({"h_res": zeros(B, S, N)}, "h_res must be float32 [B, S, M, N], got float32 [2, 3, 4]"),
    ({"iterations": 0}, "iterations must be from 1 to 100, got 0"),
]


def call_of(op: str, kind: str) -> Callable[..., Any]:
    return dict(zip(("native", "cpu", "fake"), callers(op), strict=True))[kind]


@pytest.mark.parametrize("kind", ["native", "cpu", "fake"])
@pytest.mark.parametrize(
    ("op", "args", "message"),
    [(PRE, pre_arguments(**changes), text) for changes, text in PRE_ERRORS]
    + [(POST, post_arguments(**changes), text) for changes, text in POST_ERRORS],
    ids=[f"{op}: {text}" for op, errors in ((PRE, PRE_ERRORS), (POST, POST_ERRORS)) for _, text in errors],
)
def test_errors(op: str, args: dict[str, Any], message: str, kind: str) -> None:
    if kind == "native":
        message = message.replace("2, 4 or 8 streams", "2 or 4 streams")
    assert_error(call_of(op, kind), op, args, message)


def backward_arguments() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of mhc_pre_bwd and of mhc_post_bwd, by name."""
    pre = make_pre(dtype=torch.bfloat16)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = torch.ops.dsa.mhc_pre_fwd(**pre)
    saved = {"h_post": h_post, "inv_rms": inv_rms, "h_mix": h_mix, "h_pre": h_pre}
    upstream = {"dh_in": h_in, "dh_post": h_post, "dh_res": h_res}
    kept = {name: pre[name] for name in ("x", "phi", "alpha", "gamma")}
    return upstream | kept | saved, {"dout": pre["x"]} | post_arguments()


@pytest.mark.parametrize("kind", ["native", "cpu", "fake"])
def test_gradient_errors(kind: str) -> None:
    for op, args, name, message in (
        (PRE_BWD, backward_arguments()[0], "dh_in", "dh_in must be bfloat16 [B=2, S=3, D=128]"),
        (PRE_BWD, backward_arguments()[0], "h_mix", "h_mix must be float32 [B=2, S=3, M=24]"),
        (POST_BWD, backward_arguments()[1], "dout", "dout must be bfloat16 [B=2, S=3, n=4, D=128]"),
    ):
        wrong = args[name][:, :1]
        text = f"{message}, got {str(wrong.dtype).removeprefix('torch.')} {list(wrong.shape)}"
        assert_error(call_of(op, kind), op, args | {name: wrong}, text)


def test_fake_results_are_like_those_of_the_cpu() -> None:
    pre_bwd, post_bwd = backward_arguments()
    for op, args in (
        (PRE, pre_arguments()),
        (POST, post_arguments()),
        (PRE_BWD, pre_bwd),
        (PRE_BWD, pre_bwd | {"gamma": None}),
        (POST_BWD, post_bwd),
    ):
        _, cpu, fake = callers(op)
        got, expected = fake(**args), cpu(**args)
        got, expected = (t if isinstance(t, tuple) else (t,) for t in (got, expected))
        for a, b in zip(got, expected, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), op
            assert a.device.type == "cuda"


def test_opcheck() -> None:
    pre_bwd, post_bwd = backward_arguments()
    pre = tuple(value.requires_grad_() for value in make_pre(dtype=torch.float32).values())
    post = tuple(value.requires_grad_() for value in make_post(dtype=torch.float32).values())
    torch.library.opcheck(torch.ops.dsa.mhc_pre_fwd.default, pre)
    torch.library.opcheck(torch.ops.dsa.mhc_pre_fwd.default, pre[:4])
    torch.library.opcheck(torch.ops.dsa.mhc_post_fwd.default, post)
    names = ("dh_in", "dh_post", "dh_res", "x", "phi", "alpha", "gamma", "h_post", "inv_rms", "h_mix", "h_pre")
    torch.library.opcheck(torch.ops.dsa.mhc_pre_bwd.default, tuple(pre_bwd[name] for name in names))
    torch.library.opcheck(torch.ops.dsa.mhc_post_bwd.default, tuple(post_bwd.values()))


def test_flops() -> None:
    args = [value.requires_grad_() for value in make_pre(dtype=torch.float32).values()]
    with FlopCounterMode(display=False) as counter:
        out = dsa_ext.mhc_pre(*args)[0]
        out.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * B * S * M * N * D


def test_gradients_have_no_gradient() -> None:
    args = [value.requires_grad_() for value in make_pre(dtype=torch.float32).values()]
    gradient = torch.autograd.grad(dsa_ext.mhc_pre(*args)[0].square().sum(), args[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="dsa::mhc_pre_bwd: second derivatives"):
        gradient.sum().backward()


def test_compile() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        h_in, h_post, h_res = dsa_ext.mhc_pre(x, *parameters)
        return dsa_ext.mhc_post(x, h_in.sin(), h_post, h_res).square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for rows in ((2, 5), (6, 7), (2, 9)):
        leaves = [value.requires_grad_() for value in make_pre(dtype=torch.float32, rows=rows).values()]
        got = torch.autograd.grad(compiled(*leaves), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(loss(*leaves), leaves))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1], "another shape was compiled for itself"


@pytest.mark.parametrize("streams", [2, 4])
def test_module_begins_as_a_residual_connection(streams: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(D, D)
    module = HyperConnection(layer, D, streams)
    x = torch.randn(B, S, streams, D)
    torch.testing.assert_close(module(x), x + layer(x.mean(2))[:, :, None], rtol=0.02, atol=0.02)
    same = x[:, :, :1].expand(-1, -1, streams, -1)
    torch.testing.assert_close(module(same).mean(2), same[:, :, 0] + layer(same[:, :, 0]), rtol=0.02, atol=0.02)


def test_module() -> None:
    """Parameters in fp32 beside a layer in bf16; what else comes goes to the layer; everything has a gradient."""

    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, factor: float, *, bias: Tensor) -> Tensor:
            return (x * factor + bias).to(x.dtype)

    module = HyperConnection(Layer(), D, 4)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == {
        "phi": (M, N * D),
        "alpha": (3,),
        "bias": (M,),
        "gamma": (N * D,),
    }
    x, bias = torch.randn(B, S, N, D).bfloat16().requires_grad_(), torch.randn(D, requires_grad=True)
    out = module(x, 3.0, bias=bias)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    out.float().square().sum().backward()
    for name, leaf in {"x": x, "the layer's bias": bias, **dict(module.named_parameters())}.items():
        assert leaf.grad is not None, name
        assert leaf.grad.abs().sum() > 0, name


def test_module_of_a_layer_with_several_results() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, str, None]:
            return 2 * x, "more", None

    x = torch.randn(B, S, N, D)
    module = HyperConnection(Layer(), D, N)
    out, *others = module(x)
    assert others == ["more", None]
    h_in, h_post, h_res = module.read(x)
    torch.testing.assert_close(out, dsa_ext.mhc_post(x, 2 * h_in, h_post, h_res))


def test_module_in_bf16() -> None:
    """As when a whole model is brought there: parameters are rounded, and computed with in fp32."""
    torch.manual_seed(0)
    module, x = HyperConnection(torch.nn.Linear(D, D), D, N), torch.randn(B, S, N, D).bfloat16()
    module.layer.bfloat16()
    exact = module(x)
    module.bfloat16()
    torch.testing.assert_close(module(x), exact, rtol=0.05, atol=0.05)
    module(x).sum().backward()
    assert module.phi.grad.dtype == torch.bfloat16


def test_errors_of_the_module() -> None:
    with pytest.raises(ValueError, match="HyperConnection: streams must be 2, 4 or 8, got 1"):
        HyperConnection(torch.nn.Identity(), D, 1)
    with pytest.raises(ValueError, match="HyperConnection: hidden_size must be a multiple of 128, got 100"):
        HyperConnection(torch.nn.Identity(), 100)


def test_streams_learn_what_one_cannot() -> None:
    """To remember an earlier layer's input beside what came after: the gates learn to keep streams apart."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(HyperConnection(torch.nn.Linear(D, D), D, 2) for _ in range(2))
    optimizer = torch.optim.Adam(layers.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        first = torch.randn(8, 4, D)
        x = first[:, :, None].expand(-1, -1, 2, -1)
        for layer in layers:
            x = layer(x)
        loss = (x[:, :, 0] - first).square().mean() + (x[:, :, 1] + first.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


def test_references_are_the_operators() -> None:
    pre, post = make_pre(), make_post()
    torch.testing.assert_close(torch.ops.dsa.mhc_pre_fwd(**pre), reference.mhc_pre_fwd(**pre))
    torch.testing.assert_close(torch.ops.dsa.mhc_post_fwd(**post), reference.mhc_post_fwd(**post))
