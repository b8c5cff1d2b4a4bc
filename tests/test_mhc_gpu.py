"""The kernels of hyper-connections against the references in float64, and their other promises."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_ext
from dsa_ext.testing import tolerances
from dsa_ext.testing.tolerances import FP32_SIMILARITY, SIMILARITY, similarity_error

pytestmark = pytest.mark.gpu

PRE = ("h_in", "h_post", "h_res", "inv_rms", "h_mix", "h_pre")


def make_pre(tokens: tuple[int, int], streams: int, columns: int, gamma: bool = True, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda")

    mixed, flat = streams * streams + 2 * streams, streams * columns
    scale = torch.arange(1, streams + 1, device="cuda")[:, None]
    return {
        "x": (random(*tokens, streams, columns) * scale).bfloat16(),
        "phi": random(mixed, flat) / flat**0.5,
        "alpha": torch.tensor([1.5, -0.7, 2.0], device="cuda"),
        "bias": random(mixed),
        "gamma": 1 + random(flat) / 4 if gamma else None,
    }


def make_post(tokens: tuple[int, int], streams: int, columns: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*tokens, *sizes, generator=generator, device="cuda")

    return {
        "x": random(streams, columns).bfloat16(),
        "y": random(columns).bfloat16(),
        "h_post": 2 * random(streams).sigmoid(),
        "h_res": 2 * random(streams, streams),
    }


SHAPES = [
    ((1, 1), 4, 128),
    ((2, 33), 4, 256),
    ((1, 100), 2, 128),
    ((3, 50), 4, 640),
    ((1, 70), 2, 1280),
    ((1, 300), 4, 1280),
    ((1, 200), 4, 2560),
    ((2, 130), 4, 7168),
    ((1, 65), 2, 7168),
    ((2, 17), 4, 896),
    ((1, 20), 2, 1664),
    ((1, 33), 4, 8192),
    ((1, 33), 2, 8192),
    ((1, 3000), 4, 1280),
    ((1, 5000), 4, 128),
]


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize(("tokens", "streams", "columns"), SHAPES, ids=str)
def test_pre(tokens: tuple[int, int], streams: int, columns: int, gamma: bool) -> None:
    args = make_pre(tokens, streams, columns, gamma)
    got = torch.ops.dsa.mhc_pre_fwd(**args)
    tolerances.check("mhc_pre_fwd", got, args)
    for a, b in zip(got, torch.ops.dsa.mhc_pre_fwd(**args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize(("tokens", "streams", "columns"), SHAPES, ids=str)
def test_pre_gradients(tokens: tuple[int, int], streams: int, columns: int, gamma: bool) -> None:
    args = make_pre(tokens, streams, columns, gamma)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = torch.ops.dsa.mhc_pre_fwd(**args)
    upstream = [torch.randn(t.shape, device="cuda").to(t.dtype) for t in (h_in, h_post, h_res)]
    kept = (args["x"], args["phi"], args["alpha"], args["gamma"], h_post, inv_rms, h_mix, h_pre)
    got = torch.ops.dsa.mhc_pre_bwd(*upstream, *kept)
    names = [argument.name for argument in torch.ops.dsa.mhc_pre_bwd.default._schema.arguments]
    tolerances.check("mhc_pre_bwd", got, dict(zip(names, (*upstream, *kept), strict=False)))
    for a, b in zip(got, torch.ops.dsa.mhc_pre_bwd(*upstream, *kept), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("iterations", [1, 20, 100])
@pytest.mark.parametrize(("tokens", "streams", "columns"), SHAPES, ids=str)
def test_post(tokens: tuple[int, int], streams: int, columns: int, iterations: int) -> None:
    args = make_post(tokens, streams, columns)
    got = torch.ops.dsa.mhc_post_fwd(**args, iterations=iterations)
    tolerances.check("mhc_post_fwd", got, {**args, "iterations": iterations})
    dout = torch.randn(got.shape, device="cuda").bfloat16()
    gradients = torch.ops.dsa.mhc_post_bwd(dout, **args, iterations=iterations)
    tolerances.check("mhc_post_bwd", gradients, {"dout": dout, **args, "iterations": iterations})
    for a, b in zip(gradients, torch.ops.dsa.mhc_post_bwd(dout, **args, iterations=iterations), strict=True):
        assert torch.equal(a, b)


def test_wild_weights() -> None:
    args = make_post((1, 9), 4, 256)
    args["h_res"] *= 300
    out = dsa_ext.mhc_post(**args)
    assert out.isfinite().all()
    tolerances.check("mhc_post_fwd", out, args)


def test_nan_stays_in_its_token() -> None:
    args = make_pre((1, 40), 4, 1280)
    expected = torch.ops.dsa.mhc_pre_fwd(**args)
    args["x"][0, 7, 2, 5] = torch.nan
    for name, a, b in zip(PRE, torch.ops.dsa.mhc_pre_fwd(**args), expected, strict=True):
        others = torch.arange(40, device="cuda") != 7
        assert torch.equal(a[:, others], b[:, others]), name
        if name != "h_in":
            assert a[:, 7].isnan().any(), name


def test_nan_stays_in_its_token_behind_the_layer() -> None:
    others = torch.arange(40, device="cuda") != 7
    for name, at in (("x", (2, 5)), ("y", (5,)), ("h_post", (1,)), ("h_res", (0, 3))):
        args = make_post((1, 40), 4, 1280)
        dout = torch.randn(args["x"].shape, device="cuda").bfloat16()
        results = []
        for value in (float(args[name][(0, 7, *at)]), torch.nan):
            args[name][(0, 7, *at)] = value
            results.append([torch.ops.dsa.mhc_post_fwd(**args), *torch.ops.dsa.mhc_post_bwd(dout, **args)])
        for expected, got in zip(*results, strict=True):
            assert torch.equal(got[:, others], expected[:, others])
        assert results[1][0][:, 7].isnan().any()


def test_a_token_does_not_depend_on_the_others() -> None:
    """Weights of one token are far from usual; those of its neighbours are made in the same warp."""
    args = make_post((1, 40), 4, 256)
    dout = torch.randn(args["x"].shape, device="cuda").bfloat16()
    expected = [torch.ops.dsa.mhc_post_fwd(**args), *torch.ops.dsa.mhc_post_bwd(dout, **args)]
    args["h_res"][0, 7] *= 300
    got = [torch.ops.dsa.mhc_post_fwd(**args), *torch.ops.dsa.mhc_post_bwd(dout, **args)]
    others = torch.arange(40, device="cuda") != 7
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a[:, others], b[:, others])
    assert not torch.equal(got[0][:, 7], expected[0][:, 7])


def test_layouts() -> None:
    args = make_pre((3, 20), 4, 256)
    expected = torch.ops.dsa.mhc_pre_fwd(**args)
    views = {
        "x": args["x"].transpose(0, 1).contiguous().transpose(0, 1),
        "phi": args["phi"].mT.contiguous().mT,
        "bias": torch.stack([args["bias"]] * 2, 1)[:, 0],
    }
    for a, b in zip(torch.ops.dsa.mhc_pre_fwd(**(args | views)), expected, strict=True):
        assert torch.equal(a, b)
    one = args["x"][:, :, :1].expand(-1, -1, 4, -1)
    for a, b in zip(
        torch.ops.dsa.mhc_pre_fwd(**(args | {"x": one})),
        torch.ops.dsa.mhc_pre_fwd(**(args | {"x": one.contiguous()})),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.gpu_memory(28)
def test_more_than_2_to_the_31_elements() -> None:
    """The last tokens are as they are alone."""
    few, many = 5, 80_000
    pre = make_pre((1, few), 4, 7168)
    post = make_post((1, few), 4, 7168)

    def behind_others(value: Tensor) -> Tensor:
        return torch.cat([value[:, :1].expand(-1, many - few, *value.shape[2:]), value], 1)

    def run(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor) -> list[Tensor]:
        h_in, *gates = torch.ops.dsa.mhc_pre_fwd(**(pre | {"x": x}))
        kept = (x, pre["phi"], pre["alpha"], pre["gamma"], gates[0], *gates[2:])
        dx, *_ = torch.ops.dsa.mhc_pre_bwd(h_in, h_post, h_res, *kept)
        out = torch.ops.dsa.mhc_post_fwd(x, y, h_post, h_res)
        return [h_in, *gates, dx, out, *torch.ops.dsa.mhc_post_bwd(x, x, y, h_post, h_res)]

    args = (pre["x"], post["y"], post["h_post"], post["h_res"])
    assert many * 4 * 7168 > 2**31
    for a, b in zip(run(*map(behind_others, args)), run(*args), strict=True):
        assert similarity_error(a[:, -few:], b) <= (SIMILARITY if b.dtype == torch.bfloat16 else FP32_SIMILARITY)


@pytest.mark.parametrize("tokens", [(0, 3), (2, 0)], ids=str)
def test_empty_tensors(tokens: tuple[int, int]) -> None:
    args = make_pre(tokens, 4, 256)
    leaves = [value.requires_grad_() for value in args.values()]
    h_in, h_post, h_res = dsa_ext.mhc_pre(*leaves)
    out = dsa_ext.mhc_post(args["x"], h_in, h_post, h_res)
    assert out.shape == args["x"].shape
    out.sum().backward()
    assert not args["phi"].grad.any()


def test_errors() -> None:
    x = torch.zeros(1, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    args = (torch.zeros(80, 1024, device="cuda"), torch.zeros(3, device="cuda"), torch.zeros(80, device="cuda"))
    with pytest.raises(RuntimeError, match="dsa::mhc_pre_fwd: x must have 2 or 4 streams, got 8"):
        torch.ops.dsa.mhc_pre_fwd(x, *args)
    h_post, h_res = (torch.zeros(1, 2, *sizes, device="cuda") for sizes in ((8,), (8, 8)))
    with pytest.raises(RuntimeError, match="dsa::mhc_post_fwd: x must have 2 or 4 streams, got 8"):
        torch.ops.dsa.mhc_post_fwd(x, x[:, :, 0], h_post, h_res)


def test_graph_capture_at_first_call_and_side_stream() -> None:
    args = make_pre((1, 100), 4, 2560)

    def call(x: Tensor) -> tuple[Tensor, ...]:
        h_in, h_post, h_res, *saved = torch.ops.dsa.mhc_pre_fwd(**(args | {"x": x}))
        return h_in, *saved, torch.ops.dsa.mhc_post_fwd(x, h_in, h_post, h_res)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = call(args["x"])
    graph.replay()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        aside = call(args["x"].clone())
    torch.cuda.synchronize()
    for a, b, c in zip(captured, aside, call(args["x"]), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


def test_autograd_and_compile() -> None:
    args = make_pre((1, 100), 4, 256)
    leaves = [value.requires_grad_() for value in args.values()]

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        h_in, h_post, h_res = dsa_ext.mhc_pre(x, *parameters)
        return dsa_ext.mhc_post(x, h_in.sin(), h_post, h_res).float().square().mean()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        assert torch.equal(a, b)
