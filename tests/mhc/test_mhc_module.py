"""HyperConnection on the CPU; mhc_pre and mhc_post one after the other, as it calls them."""

import pytest
import torch
from mhc_inputs import B, D, M, N, S, make_pre
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dsa_ext
from dsa_ext.nn import HyperConnection


@pytest.mark.parametrize("rows", [(0, 3), (2, 0)], ids=str)
def test_empty_tensors(rows: tuple[int, int]) -> None:
    args = {name: value.requires_grad_() for name, value in make_pre(rows=rows).items()}
    h_in, h_post, h_res = dsa_ext.mhc_pre(**args)
    out = dsa_ext.mhc_post(args["x"], h_in, h_post, h_res)
    assert out.shape == args["x"].shape
    out.sum().backward()
    assert args["phi"].grad is not None
    assert not args["phi"].grad.any()


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
    """fp32 parameters with bf16 activations; other arguments go to the layer; x and every parameter have gradients."""

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
    """As when a whole model is cast to bf16: parameters are rounded, and the computation is in fp32."""
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
    for name, value in (("iterations", 101), ("eps", 1.0)):
        with pytest.raises(RuntimeError, match=f"dsa::mhc_.*: {name} must be from .*, got {value:g}"):
            HyperConnection(torch.nn.Identity(), D, **{name: value})
    module = HyperConnection(torch.nn.Identity(), D, N)
    for shape in ((B, S, N, 2 * D), (B, S, N // 2, D), (S, N, D)):
        with pytest.raises(ValueError, match=rf"HyperConnection: x must be \[B, S, {N}, {D}\], got float32"):
            module(torch.zeros(shape))
    with pytest.raises(RuntimeError, match="at most 8192, got 8320"):
        HyperConnection(torch.nn.Identity(), 8320)


@pytest.mark.parametrize("result", [None, [1], {}, (), ("more", 1)], ids=repr)
def test_error_of_a_layer_without_a_tensor(result: object) -> None:
    class Layer(torch.nn.Module):
        def forward(self, _x: Tensor) -> object:
            return result

    with pytest.raises(TypeError, match="layer must return a tensor, or a tuple that begins with one, got "):
        HyperConnection(Layer(), D)(torch.zeros(B, S, N, D))


def test_error_of_a_layer_with_another_dtype() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.bfloat16()

    with pytest.raises(ValueError, match="layer must return the dtype of its input, float32, got bfloat16"):
        HyperConnection(Layer(), D)(torch.zeros(B, S, N, D))


def test_streams_learn_what_one_cannot() -> None:
    """The input of the first layer and a later result must both be kept: the gates learn to keep the streams apart."""
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
