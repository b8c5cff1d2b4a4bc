"""Readable PyTorch implementations of the operators: the reference of the tests, and what runs on the CPU."""

from dsa_ext.reference.block_select import *  # noqa: F403
from dsa_ext.reference.block_sparse import *  # noqa: F403
from dsa_ext.reference.coarse_attn import *  # noqa: F403
from dsa_ext.reference.decode import *  # noqa: F403
from dsa_ext.reference.fp8 import *  # noqa: F403
from dsa_ext.reference.gated_fusion import *  # noqa: F403
from dsa_ext.reference.indexer import *  # noqa: F403
from dsa_ext.reference.indexer_paged import *  # noqa: F403
from dsa_ext.reference.mhc import *  # noqa: F403
from dsa_ext.reference.sparse_mha import *  # noqa: F403
from dsa_ext.reference.sparse_mla import *  # noqa: F403
