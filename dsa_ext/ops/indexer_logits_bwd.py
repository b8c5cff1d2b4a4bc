"""torch.ops.dsa.indexer_logits_bwd: the gradients of indexer_logits in bf16. Schema, checks, CPU and fake
implementation, FLOPs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, fail
from dsa_ext.ops._indexer import check_scoring, gradients_like, scoring_flops
from dsa_ext.ops._library import (
    differentiable_once,
    explain_missing_cuda,
    follow_autocast,
    follow_deterministic_switch,
    library,
)

_OP = "indexer_logits_bwd"
library.define(
    "indexer_logits_bwd(Tensor dlogits, Tensor q, Tensor k, Tensor weights, Tensor cu_seqlen_ks, Tensor cu_seqlen_ke, "
    "bool deterministic=False) -> (Tensor dq, Tensor dk, Tensor dweights)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(dlogits: Tensor, q: Tensor, k: Tensor, weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor) -> None:
    if q.dtype == torch.float8_e4m3fn:
        fail(_OP, "q must be bfloat16, got float8_e4m3fn")
    check_scoring(_OP, q, k, weights, cu_seqlen_ks, cu_seqlen_ke, None)
    dtype = reference.sparse_mla.compute_dtype(q)
    check_tensor(_OP, "dlogits", dlogits, dtype, S=q.shape[0], S_kv=k.shape[0])
    check_same_device(_OP, "q", q, dlogits=dlogits)


def _cpu(
    dlogits: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    deterministic: bool = False,  # matmuls on the CPU always are
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dlogits, q, k, weights, cu_seqlen_ks, cu_seqlen_ke)
    return reference.indexer_logits_bwd(dlogits, q, k, weights, cu_seqlen_ks, cu_seqlen_ke)


def _fake(
    dlogits: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dlogits, q, k, weights, cu_seqlen_ks, cu_seqlen_ke)
    return gradients_like(q, k, weights)


library.impl(_OP, _cpu, "CPU")
differentiable_once(_OP)
follow_deterministic_switch(_OP)
follow_autocast(_OP)
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)


@register_flop_formula(torch.ops.dsa.indexer_logits_bwd)
def _flops(
    dlogits_shape: torch.Size,
    q_shape: torch.Size,
    k_shape: torch.Size,
    *args: Any,
    out_shape: Any,
    **kwargs: Any,
) -> int:
    """Three matmuls over every key: the scores again, dq and dk."""
    return 3 * scoring_flops(q_shape, k_shape)
