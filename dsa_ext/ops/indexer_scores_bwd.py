"""torch.ops.dsa.indexer_scores_bwd: the gradients of indexer_scores. Schema, checks, CPU and fake, FLOP formula."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor
from dsa_ext.ops._indexer import check_listed, gradients_like
from dsa_ext.ops._library import (
    differentiable_once,
    explain_missing_cuda,
    follow_autocast,
    follow_deterministic_switch,
    library,
)

_OP = "indexer_scores_bwd"
library.define(
    "indexer_scores_bwd(Tensor dscores, Tensor q, Tensor k, Tensor weights, Tensor indices, bool deterministic=False) "
    "-> (Tensor dq, Tensor dk, Tensor dweights)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(dscores: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> None:
    check_listed(_OP, q, k, weights, indices)
    dtype = reference.sparse_mla.compute_dtype(q)
    check_tensor(_OP, "dscores", dscores, dtype, S=q.shape[0], K=indices.shape[1])
    check_same_device(_OP, "q", q, dscores=dscores)


def _cpu(
    dscores: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    deterministic: bool = False,  # index_add_ on the CPU always is
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dscores, q, k, weights, indices)
    return reference.indexer_scores_bwd(dscores, q, k, weights, indices)


def _fake(
    dscores: Tensor, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, deterministic: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dscores, q, k, weights, indices)
    return gradients_like(q, k, weights)


library.impl(_OP, _cpu, "CPU")
differentiable_once(_OP)
follow_deterministic_switch(_OP)
follow_autocast(_OP)
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)


@register_flop_formula(torch.ops.dsa.indexer_scores_bwd)
def _flops(dscores_shape: torch.Size, q_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    """Three matmuls over every listed slot: the scores again, dq and dk."""
    seq, heads, dim = q_shape
    return 6 * seq * heads * dscores_shape[1] * dim
