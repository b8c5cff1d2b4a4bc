"""torch.ops.dsa.indexer_scores: schema, checks, CPU and fake implementation, autograd, FLOP formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._indexer import check_listed
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, use_autograd_function

_OP = "indexer_scores"

library.define(
    "indexer_scores(Tensor q, Tensor k, Tensor weights, Tensor indices) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)
_redispatch: Callable[..., Tensor] = torch.ops.dsa.indexer_scores.default.redispatch


def _cpu(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    check_listed(_OP, q, k, weights, indices)
    return reference.indexer_scores(q, k, weights, indices)


def _fake(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    check_listed(_OP, q, k, weights, indices)
    return q.new_empty(indices.shape, dtype=reference.sparse_mla.compute_dtype(q))


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, keyset: torch._C.DispatchKeySet, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            scores = _redispatch(keyset, q, k, weights, indices)
        ctx.save_for_backward(q, k, weights, indices)
        return scores

    @staticmethod
    def backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.ops.dsa.indexer_scores_bwd(dscores, *ctx.saved_tensors), None


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "q", "k")


@register_flop_formula(torch.ops.dsa.indexer_scores)
def _flops(
    q_shape: torch.Size, k_shape: torch.Size, weights_shape: torch.Size, indices_shape: torch.Size, **kwargs: Any
) -> int:
    """One matmul over every listed slot, whether it takes part or not: the count must not depend on data."""
    seq, heads, dim = q_shape
    return 2 * seq * heads * indices_shape[1] * dim
