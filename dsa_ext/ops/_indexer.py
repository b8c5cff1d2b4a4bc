"""The arguments that the indexer's operators share, and what must hold of them."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, describe, differentiable_dtype, dtype_name, fail

#: What the kernels take, and what the reference takes on the CPU besides.
_DTYPES, _CPU_DTYPES = (torch.float8_e4m3fn, torch.bfloat16), (torch.float32, torch.float64)
_HEADS = (8, 16, 32, 64)
_DIMS = (64, 128)
_MAX_TOPK = 4096


def check_scoring(
    op: str,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None,
) -> None:
    """Fails unless the arguments, all but those of one kernel's memory layout, are legal."""
    on_cpu = q.device.type == "cpu" and q.dtype in _CPU_DTYPES
    check_tensor(op, "q", q, (q.dtype,) if on_cpu else _DTYPES, S=None, Hi=None, Di=None)
    seq, heads, dim = q.shape
    check_tensor(op, "k", k, q.dtype, S_kv=None, Di=dim)
    check_tensor(op, "weights", weights, reference.sparse_mla.compute_dtype(q), S=seq, Hi=heads)
    check_tensor(op, "cu_seqlen_ks", cu_seqlen_ks, torch.int32, S=seq)
    check_tensor(op, "cu_seqlen_ke", cu_seqlen_ke, torch.int32, S=seq)
    if q.dtype == torch.float8_e4m3fn:
        if k_scale is None:
            fail(op, "k_scale must be float32 [S_kv] beside float8_e4m3fn, got None")
        check_tensor(op, "k_scale", k_scale, torch.float32, S_kv=k.shape[0])
    elif k_scale is not None:
        fail(op, f"k_scale must be None beside {dtype_name(q.dtype)}, got {describe(k_scale)}")

    check_heads(op, heads, dim)
    check_same_device(
        op, "q", q, k=k, weights=weights, cu_seqlen_ks=cu_seqlen_ks, cu_seqlen_ke=cu_seqlen_ke, k_scale=k_scale
    )


def check_rows(op: str, q: Tensor, k: Tensor, weights: Tensor) -> None:
    """The same for the differentiable operators: q and k in bf16, and weights."""
    dtype = differentiable_dtype(q)
    check_tensor(op, "q", q, dtype, S=None, Hi=None, Di=None)
    seq, heads, dim = q.shape
    check_tensor(op, "k", k, dtype, S_kv=None, Di=dim)
    check_tensor(op, "weights", weights, reference.sparse_mla.compute_dtype(q), S=seq, Hi=heads)
    check_heads(op, heads, dim)
    check_same_device(op, "q", q, k=k, weights=weights)


def check_listed(op: str, q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> None:
    """check_rows and the lists of keys."""
    check_rows(op, q, k, weights)
    check_tensor(op, "indices", indices, torch.int32, S=q.shape[0], K=None)
    check_same_device(op, "q", q, indices=indices)


def check_heads(op: str, heads: int, dim: int) -> None:
    if heads not in _HEADS:
        fail(op, f"q's heads must be 8, 16, 32 or 64, got {heads}")
    if dim not in _DIMS:
        fail(op, f"q's columns must be 64 or 128, got {dim}")


def check_topk(op: str, topk: int) -> None:
    if topk < 1 or topk > _MAX_TOPK:
        fail(op, f"topk must be from 1 to {_MAX_TOPK}, got {topk}")


def gradients_like(q: Tensor, k: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk and dweights."""
    return q.new_empty(q.shape), k.new_empty(k.shape), weights.new_empty(weights.shape)


def scoring_flops(q_shape: torch.Size, k_shape: torch.Size) -> int:
    """One matmul over every key, inside the bounds or not: the count must not depend on data."""
    seq, heads, dim = q_shape
    return 2 * seq * heads * k_shape[0] * dim
