"""torch.ops.dsa.mhc_post: schema, checks, CPU and fake implementation, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function
from dsa_ext.ops._mhc import check_post

_OP = "mhc_post"
library.define(
    "mhc_post(Tensor x, Tensor y, Tensor h_post, Tensor h_res, SymInt iterations=20) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., Tensor] = torch.ops.dsa.mhc_post.default.redispatch


def _cpu(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> Tensor:
    check_post(_OP, x, y, h_post, h_res, iterations)
    return reference.mhc_post(x, y, h_post, h_res, iterations)


def _fake(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> Tensor:
    check_post(_OP, x, y, h_post, h_res, iterations)
    return x.new_empty(x.shape)


class _Autograd(torch.autograd.Function):
    """Saves the arguments; the gradients come from dsa::mhc_post_bwd."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        x: Tensor,
        y: Tensor,
        h_post: Tensor,
        h_res: Tensor,
        iterations: int = 20,
    ) -> Tensor:
        ctx.save_for_backward(x, y, h_post, h_res)
        ctx.iterations = iterations
        with torch._C._AutoDispatchBelowAutograd():
            return _redispatch(keyset, x, y, h_post, h_res, iterations)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.ops.dsa.mhc_post_bwd(dout, *ctx.saved_tensors, ctx.iterations), None


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "x", "y")
