"""Products with one matrix per head, written in the layout in which they are read: no copies between layouts.

torch.compile chooses layouts itself, so it gets the plain formulas, and so do the transforms of torch.func.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling

from dsa_ext.ops._library import is_transformed
from dsa_ext.ops.sparse_mla import VALUE_COLUMNS


def is_plain(projection: Any) -> bool:
    """Whether a call of a projection is the product with its weight and nothing else: no adapter, hook or bias, and
    no weight that is divided among ranks or quantized."""
    return not nn.modules.module._has_any_global_hook() and excess_of(projection) is None


def weight_of(projection: Any, like: Tensor) -> Tensor:
    """The weight with which a projection of latent keys multiplies inputs of the dtype and on the device of `like`:
    with an adapter, a quantizer, an offload or a hook, its product with the unit matrix."""
    if excess_of(projection) is None:  # hooks of all modules, such as those of FlopCounterMode, do not matter
        weight: Tensor = projection.weight
    elif has_bias(projection):
        raise ValueError(f"kv_b_proj must have no bias, nor may its adapters, got {projection}")
    else:
        weight = projection(torch.eye(VALUE_COLUMNS, device=like.device, dtype=like.dtype)).T
    return weight


def has_bias(projection: Any) -> bool:
    """Whether a projection, or an adapter in it, adds a bias."""
    return any(name.rpartition(".")[2] == "bias" for name, _ in projection.named_parameters())


def multiply(out: Tensor, x: Tensor, weights: Tensor) -> None:
    """out [T, H, b] = x [T, H, a] times weights [H, a, b] per head. `out` may be a slice of the columns of a tensor."""
    out.transpose(0, 1).baddbmm_(x.transpose(0, 1), weights, beta=0)


def weight_gradient(x: Tensor, dout: Tensor) -> Tensor:
    """Gradient of the weights [H, a, b]."""
    return x.permute(1, 2, 0) @ dout.transpose(0, 1)


class _MultiplyHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        out = x.new_empty(*x.shape[:-1], weights.shape[2])
        multiply(out.flatten(0, 1), x.flatten(0, 1), weights)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        dx = x.new_empty(x.shape)
        multiply(dx.flatten(0, 1), dout.flatten(0, 1), weights.mT)
        return dx, weight_gradient(x.flatten(0, 1), dout.flatten(0, 1))


def multiply_heads(x: Tensor, weights: Tensor) -> Tensor:
    """x [B, S, H, a] times weights [H, a, b] per head: [B, S, H, b]. Weights are cast to the dtype of x: under autocast
    they may be wider."""
    weights = weights.to(x.dtype)
    if is_compiling() or is_transformed():
        return torch.einsum("bshc,hcd->bshd", x, weights)
    result: Tensor = _MultiplyHeads.apply(x, weights)  # type: ignore[no-untyped-call]
    return result


#: Types of weights that are neither divided among ranks nor quantized.
WHOLE = (Tensor, nn.Parameter, FakeTensor)
_HOOKS = {
    "_forward_pre_hooks": "a forward pre-hook",
    "_forward_hooks": "a forward hook",
    "_backward_pre_hooks": "a backward pre-hook",
    "_backward_hooks": "a backward hook",
}


def excess_of(projection: Any, weights: tuple[type, ...] = WHOLE) -> str | None:
    """What the projection is or has, apart from hooks of all modules, such that a call of it may be more than the
    product with its weight, which is of one of the types `weights`; None if there is no such thing."""
    if type(projection) is not nn.Linear:
        return torch.typename(type(projection))
    if type(projection.weight) not in weights:
        return f"one whose weight is a {torch.typename(type(projection.weight))}"
    if projection.bias is not None:
        return "one with a bias"
    if "forward" in vars(projection):
        return "one whose forward is replaced"
    for name, hook in _HOOKS.items():
        if getattr(projection, name):
            return f"one with {hook}"
    return None
