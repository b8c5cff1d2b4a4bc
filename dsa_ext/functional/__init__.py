"""The public functions: typed and documented wrappers of `torch.ops.dsa.*`.

`__all__` is collected from the modules of the operator families.
"""

from dsa_ext import ops as ops  # registers torch.ops.dsa.*
from dsa_ext._public import functions_of
from dsa_ext.functional import block_sparse, fp8, indexer, indexer_paged, mhc
from dsa_ext.functional import sparse_mha as _sparse_mha
from dsa_ext.functional import sparse_mla as _sparse_mla
from dsa_ext.functional.block_sparse import *  # noqa: F403
from dsa_ext.functional.fp8 import *  # noqa: F403
from dsa_ext.functional.indexer import *  # noqa: F403
from dsa_ext.functional.indexer_paged import *  # noqa: F403
from dsa_ext.functional.mhc import *  # noqa: F403
from dsa_ext.functional.sparse_mha import *  # noqa: F403
from dsa_ext.functional.sparse_mla import *  # noqa: F403

_FAMILIES = (block_sparse, fp8, indexer, indexer_paged, mhc, _sparse_mha, _sparse_mla)
__all__ = sorted(name for family in _FAMILIES for name in functions_of(vars(family)))
