"""Readable PyTorch versions of the operators: the oracle of the tests, and what runs on the CPU."""

from dsa_ext.reference.block_select import block_select
from dsa_ext.reference.block_sparse import block_sparse_attn_bwd, block_sparse_attn_fwd
from dsa_ext.reference.coarse_attn import coarse_attn_fwd
from dsa_ext.reference.fp8 import act_quant, fp8_gemm, prepare_weight
from dsa_ext.reference.gated_fusion import gated_fusion_bwd, gated_fusion_fwd
from dsa_ext.reference.indexer import (
    indexer_logits,
    indexer_logits_bwd,
    indexer_loss,
    indexer_scores,
    indexer_scores_bwd,
    indexer_topk,
    topk_select,
)
from dsa_ext.reference.mhc import mhc_post_bwd, mhc_post_fwd, mhc_pre_bwd, mhc_pre_fwd
from dsa_ext.reference.sparse_mla import attn_dist, sparse_mla_bwd, sparse_mla_fwd

__all__ = [
    "act_quant",
    "attn_dist",
    "block_select",
    "block_sparse_attn_bwd",
    "block_sparse_attn_fwd",
    "coarse_attn_fwd",
    "fp8_gemm",
    "gated_fusion_bwd",
    "gated_fusion_fwd",
    "indexer_logits",
    "indexer_logits_bwd",
    "indexer_loss",
    "indexer_scores",
    "indexer_scores_bwd",
    "indexer_topk",
    "mhc_post_bwd",
    "mhc_post_fwd",
    "mhc_pre_bwd",
    "mhc_pre_fwd",
    "prepare_weight",
    "sparse_mla_bwd",
    "sparse_mla_fwd",
    "topk_select",
]
