"""Kernels of DeepSeek Sparse Attention for NVIDIA Hopper GPUs, as PyTorch operators."""

from dsa_ext import functional as functional
from dsa_ext import nn as nn
from dsa_ext import ops as ops
from dsa_ext._native import __version__, build_info
from dsa_ext.functional.block_sparse import *  # noqa: F403
from dsa_ext.functional.fp8 import *  # noqa: F403
from dsa_ext.functional.indexer import *  # noqa: F403
from dsa_ext.functional.indexer_paged import *  # noqa: F403
from dsa_ext.functional.mhc import *  # noqa: F403
from dsa_ext.functional.sparse_mha import *  # noqa: F403
from dsa_ext.functional.sparse_mla import *  # noqa: F403
from dsa_ext.nn.page_tables import CacheFullError
from dsa_ext.nn.paged_cache import PagedKVCache

__all__ = ["CacheFullError", "PagedKVCache", "__version__", "build_info", *functional.__all__]


def __dir__() -> list[str]:
    """Without what the modules of `functional` import: type checkers know the functions by the imports above alone."""
    return sorted([*__all__, "functional", "nn", "ops"])
