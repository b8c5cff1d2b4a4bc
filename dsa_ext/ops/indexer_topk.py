"""torch.ops.dsa.indexer_topk: schema, checks, CPU and fake implementation, FLOP formula. It has no gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._indexer import check_scoring, check_topk, scoring_flops
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, without_gradient

_OP = "indexer_topk"
library.define(
    "indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor cu_seqlen_ks, Tensor cu_seqlen_ke, SymInt topk, "
    "Tensor? k_scale=None) -> (Tensor indices, Tensor values)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _cpu(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_scoring(_OP, q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    check_topk(_OP, topk)
    return reference.indexer_topk(q, k, weights, cu_seqlen_ks, cu_seqlen_ke, topk, k_scale)


def _fake(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    topk: int,
    k_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_scoring(_OP, q, k, weights, cu_seqlen_ks, cu_seqlen_ke, k_scale)
    check_topk(_OP, topk)
    seq = q.shape[0]
    values = q.new_empty(seq, topk, dtype=reference.sparse_mla.compute_dtype(q))
    return q.new_empty(seq, topk, dtype=torch.int32), values


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)
follow_autocast(_OP, "q", "k")


@register_flop_formula(torch.ops.dsa.indexer_topk)
def _flops(q_shape: torch.Size, k_shape: torch.Size, *args: Any, out_shape: Any, **kwargs: Any) -> int:
    return scoring_flops(q_shape, k_shape)
