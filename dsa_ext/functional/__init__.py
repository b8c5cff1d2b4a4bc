"""The public functions: typed and documented fronts of `torch.ops.dsa.*`."""

from dsa_ext import ops as ops  # registers torch.ops.dsa.*
from dsa_ext.functional.block_sparse import block_select, block_sparse_attn, coarse_attn, gated_fusion
from dsa_ext.functional.fp8 import act_quant, fp8_gemm, prepare_weight
from dsa_ext.functional.indexer import (
    indexer_dense_loss,
    indexer_logits,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    topk_select,
)
from dsa_ext.functional.mhc import mhc_post, mhc_pre
from dsa_ext.functional.sparse_mla import attn_dist, sparse_mla

__all__ = [
    "act_quant",
    "attn_dist",
    "block_select",
    "block_sparse_attn",
    "coarse_attn",
    "fp8_gemm",
    "gated_fusion",
    "indexer_dense_loss",
    "indexer_logits",
    "indexer_loss",
    "indexer_scores",
    "indexer_topk",
    "mhc_post",
    "mhc_pre",
    "prepare_weight",
    "sparse_mla",
    "topk_select",
]
