"""DeepSeek Sparse Attention on several GPUs, with torch.distributed."""

from dsa_ext.distributed.layer import ParallelSparseMLA, parallelize

__all__ = ["ParallelSparseMLA", "parallelize"]
