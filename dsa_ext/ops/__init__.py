"""The operators `torch.ops.dsa.*`: importing this package registers them."""

from dsa_ext.ops import sparse_mla_bwd, sparse_mla_fwd

__all__ = ["sparse_mla_bwd", "sparse_mla_fwd"]
