"""The arguments that the operators between blocks of queries and of keys share, and what must hold of them."""

import torch
from torch import Tensor

from dsa_ext.ops._checks import check_same_device, check_scale, check_tensor, describe, differentiable_dtype, fail
from dsa_ext.reference.block_sparse import blocks

_COLUMNS = (64, 128)


def check_heads(op: str, q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None) -> None:
    """Fails unless queries, keys, values and scale are legal, but for one kernel's memory layout."""
    dtype = differentiable_dtype(q)
    check_tensor(op, "q", q, dtype, B=None, H=None, Nq=None, D=None)
    batch, heads, _, dim = q.shape
    check_tensor(op, "k", k, dtype, B=batch, Hkv=None, Nkv=None, D=dim)
    kv_heads, kv_length = k.shape[1:3]
    check_tensor(op, "v", v, dtype, B=batch, Hkv=kv_heads, Nkv=kv_length, D=dim)
    if dim not in _COLUMNS:
        fail(op, f"q's columns must be 64 or 128, got {dim}")
    if kv_heads < 1 or heads % kv_heads != 0:
        fail(op, f"q's heads must be a multiple of k's, got {heads} and {kv_heads}")
    check_scale(op, sm_scale)
    check_same_device(op, "q", q, k=k, v=v)


def check_inputs(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q2k_index: Tensor,
    q2k_num: Tensor,
    kv_block_size: Tensor | None,
    sm_scale: float | None,
) -> None:
    """The same of block_sparse_attn's arguments, with lists of blocks."""
    check_heads(op, q, k, v, sm_scale)
    rows = {"B": q.shape[0], "H": q.shape[1], "Mq": blocks(q.shape[2])}
    check_tensor(op, "q2k_index", q2k_index, torch.int32, **rows, M=None)
    check_tensor(op, "q2k_num", q2k_num, torch.int32, **rows)
    if kv_block_size is not None:
        check_tensor(op, "kv_block_size", kv_block_size, torch.int32, Mkv=blocks(k.shape[2]))
    if q2k_index.shape[3] < 1:
        fail(op, f"q2k_index must have at least one slot a row, got {describe(q2k_index)}")
    check_same_device(op, "q", q, q2k_index=q2k_index, q2k_num=q2k_num, kv_block_size=kv_block_size)
