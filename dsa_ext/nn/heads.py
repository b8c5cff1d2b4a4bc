"""Products with one matrix per head, written in the layout in which they are read: no copies between layouts.

torch.compile chooses layouts itself, so it gets the plain formulas, and so do the transforms of torch.func.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsa_ext.ops._library import is_transformed, refuse_batched_gradients, without_autocast


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
        refuse_batched_gradients("SparseMLA", dout)
        x, weights = ctx.saved_tensors
        dx = x.new_empty(x.shape)
        with without_autocast(x):
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
