"""SparseMLA with adapters, hooks and offloaded weights: the weight of kv_b_proj is read, kv_b_proj is not called."""

import re
from typing import Any

import pytest
import torch
from test_sparse_mla_module import make_input, make_layer
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
def test_an_adapter_of_kv_b_proj(phase: Any) -> None:
    """A hook, as those of adapters, changes the result as the same change of the weight does, and gets a gradient."""
    layer, merged = make_layer(phase=phase), make_layer(phase=phase)
    merged.load_state_dict(layer.state_dict())
    a = torch.randn(3, layer.kv_lora_rank, dtype=torch.float64, requires_grad=True)
    b = torch.randn(layer.kv_b_proj.out_features, 3, dtype=torch.float64) / 30
    layer.kv_b_proj.register_forward_hook(lambda module, args, result: result + args[0] @ (b @ a).T)
    with torch.no_grad():
        merged.kv_b_proj.weight += b @ a
    x = make_input()
    result = layer(x)
    torch.testing.assert_close(result.out, merged(x).out)
    result.out.sum().backward()
    assert a.grad is not None
    assert a.grad.abs().max() > 0


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.added = base, nn.Linear(base.in_features, base.out_features, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.added(x)
        return result


@pytest.mark.parametrize("name", ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "indexer.wq_b", "indexer.wk"])
def test_compiled_with_adapters(name: str) -> None:
    layer, x = make_layer(), make_input()
    layer.set_submodule(name, Adapted(layer.get_submodule(name)))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).out, layer(x).out)


def no_unit_matrix(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the weight was not used as it is")


def test_profilers_and_fake_tensors_use_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(torch.float32)
    monkeypatch.setattr(torch, "eye", no_unit_matrix)
    with FlopCounterMode(display=False):  # installs hooks of all modules
        expected = layer(make_input(dtype=torch.float32))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = make_layer(torch.float32)
        out = fake(mode.from_tensor(make_input(dtype=torch.float32))).out
    assert out.shape == expected.out.shape


def test_a_bias_of_kv_b_proj_is_an_error() -> None:
    layer = make_layer()
    layer.kv_b_proj = nn.Linear(layer.kv_lora_rank, layer.kv_b_proj.out_features, dtype=torch.float64)
    message = "SparseMLA: kv_b_proj must have no bias, nor may its adapters, got torch.nn.modules.linear.Linear"
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(make_input())


def test_offloaded_weights() -> None:
    accelerate = pytest.importorskip("accelerate")
    layer, offloaded = make_layer(torch.float32), make_layer(torch.float32)
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    assert offloaded.kv_b_proj.weight.is_meta
    x = make_input(dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(offloaded(x).out, layer(x).out)


@pytest.mark.parametrize("norm", [nn.RMSNorm(512, elementwise_affine=False), nn.Identity(), nn.RMSNorm(512).double()])
def test_any_norm_beside_an_adapter(norm: nn.Module) -> None:
    layer = make_layer(torch.float32)
    layer.kv_a_layernorm = norm
    x = make_input(dtype=torch.float32)
    if any(p.dtype == torch.float64 for p in norm.parameters()):
        norm.register_forward_pre_hook(lambda module, args: args[0].double())
    expected = layer(x).out
    layer.kv_b_proj.register_forward_hook(lambda module, args, result: result)
    torch.testing.assert_close(layer(x).out, expected)
