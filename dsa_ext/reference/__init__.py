"""Readable PyTorch versions of the operators: the oracle of the tests, and what runs on the CPU."""

from dsa_ext.reference.sparse_mla import sparse_mla_bwd, sparse_mla_fwd

__all__ = ["sparse_mla_bwd", "sparse_mla_fwd"]
