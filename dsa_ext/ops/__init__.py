"""The operators `torch.ops.dsa.*`: importing this package registers them."""

from dsa_ext.ops import block_sparse as block_sparse
from dsa_ext.ops import fp8 as fp8
from dsa_ext.ops import indexer as indexer
from dsa_ext.ops import indexer_paged as indexer_paged
from dsa_ext.ops import mhc as mhc
from dsa_ext.ops import rotary as rotary
from dsa_ext.ops import sparse_mha as sparse_mha
from dsa_ext.ops import sparse_mla as sparse_mla
from dsa_ext.ops._operator import OPERATORS, Operator

__all__ = ["OPERATORS", "Operator"]
