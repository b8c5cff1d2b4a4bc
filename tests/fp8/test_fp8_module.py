"""FP8Linear without a GPU."""

import copy
import re

import pytest
import torch
from fp8_inputs import random
from torch import Tensor, nn

import dsa_ext
from dsa_ext.nn import FP8Linear
from dsa_ext.testing.tolerances import similarity_error


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool, round_scale: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(640, 200, bias=bias)
    layer = FP8Linear(linear, round_scale=round_scale)
    x = random(2, 3, 640)
    out = layer(x.bfloat16())
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 3, 200))
    assert similarity_error(out, linear(x).detach()) <= 2e-3
    other = FP8Linear(torch.nn.Linear(640, 200, bias=bias), round_scale=round_scale)
    other.load_state_dict(layer.state_dict())
    for same in (other, copy.deepcopy(layer), copy.deepcopy(layer).to("cpu")):
        assert torch.equal(same(x.bfloat16()), out)


@pytest.mark.parametrize("columns", [128, 384, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("bias", [False, True])
def test_weight_that_is_quantized_already(columns: int, dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(columns, 200, bias=bias)
    weight, scale = dsa_ext.prepare_weight(linear.weight.detach(), round_scale=dtype != torch.float32)
    layer = FP8Linear.from_quantized(weight, scale.contiguous().to(dtype), linear.bias, round_scale=True)
    expected = FP8Linear(linear, round_scale=True)
    if dtype == torch.float32:
        expected.weight, expected.weight_scale = FP8Linear(linear).weight, FP8Linear(linear).weight_scale
    x = random(5, columns).bfloat16()
    assert torch.equal(layer(x), expected(x))
    assert repr(layer) == f"FP8Linear(in_features={columns}, out_features=200, bias={bias}, round_scale=True)"
    state, expected_state = layer.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[name].float(), expected_state[name].float()) for name in state)


def test_errors_of_a_quantized_weight() -> None:
    weight, scale = dsa_ext.prepare_weight(random(200, 256))
    with pytest.raises(
        ValueError, match=r"weight must be float8_e4m3fn \[out_features, multiple of 128\], got float32"
    ):
        FP8Linear.from_quantized(weight.float(), scale)
    with pytest.raises(ValueError, match=r"must be float32 or float8_e8m0fnu \[2, 2\], got float32 \[2, 1\]"):
        FP8Linear.from_quantized(weight, scale[:, :1])
    with pytest.raises(ValueError, match=r"bias must be floating-point \[200\], got float32 \[256\]"):
        FP8Linear.from_quantized(weight, scale, torch.zeros(256))
    with pytest.raises(TypeError, match="weight_scale must be a tensor, got list"):
        FP8Linear.from_quantized(weight, scale.tolist())
    with pytest.raises(ValueError, match="weight_scale must be on the device of weight, cpu, got meta"):
        FP8Linear.from_quantized(weight, scale.to("meta"))
    with pytest.raises(ValueError, match="out_features must be a positive int, got 0"):
        FP8Linear.from_quantized(weight[:0], scale[:0])
    other = FP8Linear.from_quantized(weight.t().contiguous().t(), scale)
    assert other.weight.is_contiguous()
    linear = nn.Linear(256, 200, bias=False)
    linear.load_state_dict({"weight": weight}, assign=True)
    with pytest.raises(ValueError, match=r"got float8_e4m3fn \[200, 256\]: use from_quantized"):
        FP8Linear(linear)


@pytest.mark.parametrize("shape", [(2, 512), (3, 128), (4, 128, 2), ()], ids=str)
def test_error_of_another_width(shape: tuple[int, ...]) -> None:
    layer = FP8Linear(torch.nn.Linear(256, 128))
    with pytest.raises(ValueError, match=re.escape(f"FP8Linear: x must be [..., 256], got {list(shape)}")):
        layer(torch.zeros(shape))


@pytest.mark.parametrize("x", [None, [1.0]])
def test_error_of_no_tensor(x: object) -> None:
    with pytest.raises(TypeError, match=f"FP8Linear: x must be a tensor, got {type(x).__name__}"):
        FP8Linear(torch.nn.Linear(256, 128))(x)


def test_error_of_a_converted_layer() -> None:
    with pytest.raises(TypeError, match=r"linear must be an nn.Linear, got dsa_ext.nn.fp8_linear.FP8Linear"):
        FP8Linear(FP8Linear(torch.nn.Linear(128, 128)))  # type: ignore[arg-type]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_error_of_a_layer_whose_call_is_more_than_a_product() -> None:
    hooked = nn.Linear(128, 128)
    hooked.register_forward_hook(lambda module, args, result: 2 * result)
    for linear, text in ((Doubled(128, 128), "whose forward is replaced"), (hooked, "with a forward hook")):
        with pytest.raises(ValueError, match=f"FP8Linear: linear must be a plain nn.Linear, got one {text}: "):
            FP8Linear(linear)


def test_linear_has_no_gradients() -> None:
    layer = FP8Linear(torch.nn.Linear(128, 128))
    x = torch.zeros(3, 128, requires_grad=True)
    with pytest.raises(ValueError, match=r"it has no gradients, call under torch.no_grad\(\)"):
        layer(x)
    with torch.no_grad():
        assert not layer(x).requires_grad
