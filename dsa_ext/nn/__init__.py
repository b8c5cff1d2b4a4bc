"""Modules built from the operators: the lightning indexer, sparse latent attention with its paged cache, block-sparse
attention for video, hyper-connections, linear layers in fp8."""

from dsa_ext.nn.block_sparse import BlockKVCache, BlockSizes, BlockSparseAttention
from dsa_ext.nn.fp8_linear import FP8Linear
from dsa_ext.nn.hyper_connection import HyperConnection
from dsa_ext.nn.indexer import IndexerTensors, LightningIndexer
from dsa_ext.nn.page_tables import CacheFullError
from dsa_ext.nn.paged_cache import PagedKVCache
from dsa_ext.nn.rotary import Yarn, apply_rope
from dsa_ext.nn.sparse_mla import Phase, SparseMLA
from dsa_ext.nn.tuples import DecodeStep, PrefillStep, SparseMLAOutput

__all__ = [
    "BlockKVCache",
    "BlockSizes",
    "BlockSparseAttention",
    "CacheFullError",
    "DecodeStep",
    "FP8Linear",
    "HyperConnection",
    "IndexerTensors",
    "LightningIndexer",
    "PagedKVCache",
    "Phase",
    "PrefillStep",
    "SparseMLA",
    "SparseMLAOutput",
    "Yarn",
    "apply_rope",
]
