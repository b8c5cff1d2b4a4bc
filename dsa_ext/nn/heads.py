"""Products with one matrix per head, written in the layout in which they are read: no copies between layouts.

torch.compile chooses layouts itself, so it gets the plain formulas, and so do the transforms of torch.func. Weights are
cast to the dtype of what they multiply: under autocast they may be wider.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsa_ext.nn.rotary import rotated, write_rotated
from dsa_ext.ops._library import is_transformed


def _multiply(out: Tensor, x: Tensor, weights: Tensor) -> None:
    """out [T, H, b] = x [T, H, a] times weights [H, a, b] per head. `out` may be a slice of the columns of a tensor."""
    out.transpose(0, 1).baddbmm_(x.transpose(0, 1), weights, beta=0)


def _weight_gradient(x: Tensor, dout: Tensor) -> Tensor:
    """Gradient of the weights [H, a, b]."""
    return x.permute(1, 2, 0) @ dout.transpose(0, 1)


class _MultiplyHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        out = x.new_empty(*x.shape[:-1], weights.shape[2])
        _multiply(out.flatten(0, 1), x.flatten(0, 1), weights)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, weights = ctx.saved_tensors
        dx = x.new_empty(x.shape)
        _multiply(dx.flatten(0, 1), dout.flatten(0, 1), weights.mT)
        return dx, _weight_gradient(x.flatten(0, 1), dout.flatten(0, 1))


class _AbsorbedQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(heads, key_weight, cos, sin)
        ctx.interleaved = interleaved
        _, nope, latent = key_weight.shape
        q = heads.new_empty(*heads.shape[:-1], latent + heads.shape[-1] - nope)
        _multiply(q.flatten(0, 1)[..., :latent], heads.flatten(0, 1)[..., :nope], key_weight)
        write_rotated(q[..., latent:], heads[..., nope:], cos, sin, interleaved)
        return q

    @staticmethod
    def backward(ctx: Any, dq: Tensor) -> tuple[Tensor | None, ...]:
        heads, key_weight, cos, sin = ctx.saved_tensors
        _, nope, latent = key_weight.shape
        dheads = heads.new_empty(heads.shape)
        _multiply(dheads.flatten(0, 1)[..., :nope], dq.flatten(0, 1)[..., :latent], key_weight.mT)
        write_rotated(dheads[..., nope:], dq[..., latent:], cos, -sin, interleaved_out=ctx.interleaved)
        dweight = _weight_gradient(heads.flatten(0, 1)[..., :nope], dq.flatten(0, 1)[..., :latent])
        return dheads, dweight, None, None, None


def multiply_heads(x: Tensor, weights: Tensor) -> Tensor:
    """x [B, S, H, a] times weights [H, a, b] per head: [B, S, H, b]."""
    weights = weights.to(x.dtype)
    if is_compiling() or is_transformed():
        return torch.einsum("bshc,hcd->bshd", x, weights)
    result: Tensor = _MultiplyHeads.apply(x, weights)  # type: ignore[no-untyped-call]
    return result


def absorbed_queries(heads: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Queries of the absorbed form, heads projected to the latent's columns: [B, S, H, latent + rope].

    Args:
        heads: [B, S, H, nope + rope].
        key_weight: [H, nope, latent], for the first `nope` columns of each head.
        cos, sin: rope_tables for the last `rope` columns.
        interleaved: see apply_rope.
    """
    key_weight = key_weight.to(heads.dtype)
    if is_compiling() or is_transformed():
        nope, rope = heads.split([key_weight.shape[1], heads.shape[-1] - key_weight.shape[1]], dim=-1)
        return torch.cat([multiply_heads(nope, key_weight), rotated(rope, cos, sin, interleaved)], dim=-1)
    result: Tensor = _AbsorbedQueries.apply(heads, key_weight, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return result
