"""mhc_pre and mhc_post on a GPU, one after the other, as HyperConnection calls them."""

import pytest
import torch
from mhc_gpu_inputs import make_post, make_pre
from streams import captured_and_aside
from torch import Tensor

import dsa_ext
from dsa_ext.testing.tolerances import FP32_SIMILARITY, SIMILARITY, similarity_error

pytestmark = pytest.mark.gpu


@pytest.mark.gpu_memory(28)
def test_more_than_2_to_the_31_elements() -> None:
    """The last tokens have the same results as in a call of their own."""
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

    captured, aside = captured_and_aside(call, args["x"])
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
