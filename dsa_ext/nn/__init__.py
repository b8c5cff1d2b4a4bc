"""Modules made of the operators: the lightning indexer, sparse latent attention, block-sparse attention for video."""

from dsa_ext.nn.block_sparse import BlockKVCache, BlockSizes, BlockSparseAttention
from dsa_ext.nn.indexer import IndexerTensors, LightningIndexer
from dsa_ext.nn.rotary import apply_rope
from dsa_ext.nn.sparse_mla import Phase, SparseMLA, SparseMLAOutput

__all__ = [
    "BlockKVCache",
    "BlockSizes",
    "BlockSparseAttention",
    "IndexerTensors",
    "LightningIndexer",
    "Phase",
    "SparseMLA",
    "SparseMLAOutput",
    "apply_rope",
]
