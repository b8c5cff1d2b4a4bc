"""Modules of DeepSeek Sparse Attention, made of the operators: the lightning indexer and the attention layer."""

from dsa_ext.nn.indexer import IndexerTensors, LightningIndexer
from dsa_ext.nn.rotary import apply_rope
from dsa_ext.nn.sparse_mla import Phase, SparseMLA, SparseMLAOutput

__all__ = ["IndexerTensors", "LightningIndexer", "Phase", "SparseMLA", "SparseMLAOutput", "apply_rope"]
