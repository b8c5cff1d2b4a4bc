"""Projections whose weights are read instead of calling them, and what they may have that forbids it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from dsa_ext.ops.sparse_mla import VALUE_COLUMNS

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
        return type_name(projection)
    if type(projection.weight) not in weights:
        return f"one whose weight is a {type_name(projection.weight)}"
    if projection.bias is not None:
        return "one with a bias"
    return replacement_of(projection)


def replacement_of(linear: nn.Linear) -> str | None:
    """What replaces or surrounds the forward of nn.Linear when the layer is called, apart from hooks of all modules."""
    if type(linear).forward is not nn.Linear.forward or "forward" in vars(linear):
        return "one whose forward is replaced"
    for name, hook in _HOOKS.items():
        if getattr(linear, name):
            return f"one with {hook}"
    return None


def type_name(value: Any) -> str:
    """As torch.typename, which torch.compile cannot call."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_plain(projection: Any) -> bool:
    """Whether a call of a projection is the product with its weight and nothing else: no adapter, hook or bias, and
    no weight that is divided among ranks or quantized."""
    return not nn.modules.module._has_any_global_hook() and excess_of(projection) is None


def plain_weight(projection: Any) -> Tensor | None:
    """The weight of a plain projection, else None."""
    return projection.weight if is_plain(projection) else None


def weight_of(owner: str, projection: Any, like: Tensor) -> Tensor:
    """The weight with which the `kv_b_proj` of a module named `owner` multiplies inputs of the dtype and on the device
    of `like`: with an adapter, a quantizer, an offload or a hook, its product with the unit matrix."""
    if excess_of(projection) is None:  # hooks of all modules, such as those of FlopCounterMode, do not matter
        weight: Tensor = projection.weight
    elif has_bias(projection):
        raise ValueError(f"{owner}: kv_b_proj must have no bias, nor may its adapters, got {type_name(projection)}")
    else:
        weight = projection(torch.eye(VALUE_COLUMNS, device=like.device, dtype=like.dtype)).T
    return weight


def has_bias(projection: Any) -> bool:
    """Whether a projection, or an adapter in it, adds a bias."""
    return any(name.rpartition(".")[2] == "bias" for name, _ in projection.named_parameters())
