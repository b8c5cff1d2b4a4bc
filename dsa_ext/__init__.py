"""Kernels of DeepSeek Sparse Attention for NVIDIA Hopper GPUs, as PyTorch operators."""

from dsa_ext import nn as nn
from dsa_ext import ops as ops
from dsa_ext._native import __version__, build_info
from dsa_ext.functional import (
    act_quant,
    attn_dist,
    block_select,
    block_sparse_attn,
    coarse_attn,
    fp8_gemm,
    gated_fusion,
    indexer_dense_loss,
    indexer_logits,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    mhc_post,
    mhc_pre,
    prepare_weight,
    sparse_mla,
    topk_select,
)

__all__ = [
    "__version__",
    "act_quant",
    "attn_dist",
    "block_select",
    "block_sparse_attn",
    "build_info",
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
