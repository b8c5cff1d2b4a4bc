"""The operators `torch.ops.dsa.*`: importing this package registers them."""

from dsa_ext.ops import (
    attn_dist,
    block_select,
    block_sparse_attn_bwd,
    block_sparse_attn_fwd,
    indexer_dense_loss,
    indexer_logits,
    indexer_logits_bwd,
    indexer_loss,
    indexer_scores,
    indexer_scores_bwd,
    indexer_topk,
    sparse_mla_bwd,
    sparse_mla_fwd,
    topk_select,
)

__all__ = [
    "attn_dist",
    "block_select",
    "block_sparse_attn_bwd",
    "block_sparse_attn_fwd",
    "indexer_dense_loss",
    "indexer_logits",
    "indexer_logits_bwd",
    "indexer_loss",
    "indexer_scores",
    "indexer_scores_bwd",
    "indexer_topk",
    "sparse_mla_bwd",
    "sparse_mla_fwd",
    "topk_select",
]
