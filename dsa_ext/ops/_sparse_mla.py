"""The arguments that sparse_mla_fwd, sparse_mla_bwd and attn_dist share, and what must hold of them."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import (
    check_q_start,
    check_same_device,
    check_scale,
    check_tensor,
    describe,
    differentiable_dtype,
    fail,
)

_SHAPES = ((576, 512), (512, 512))
_MAX_HEADS_PER_GROUP = 128


def check_inputs(
    op: str,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None,
    d_v: int | None,
    q_start: int,
    kv_stride: int,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
) -> None:
    """Fails unless the arguments, all but those of one kernel's memory layout, are legal. `d_v` is None where no values
    are read."""
    dtype = differentiable_dtype(q)
    check_tensor(op, "q", q, dtype, B=None, S=None, H=None, Dqk=None)
    batch, seq, heads, d_qk = q.shape
    check_tensor(op, "kv", kv, dtype, B=batch, S_kv=None, G=None, Dqk=d_qk)
    groups = kv.shape[2]
    check_tensor(op, "indices", indices, torch.int32, B=batch, S=seq, G=groups, K=None)
    if topk_length is not None:
        check_tensor(op, "topk_length", topk_length, torch.int32, B=batch, S=seq)
    if attn_sink is not None:
        check_tensor(op, "attn_sink", attn_sink, reference.sparse_mla.compute_dtype(q), H=heads)

    if d_v is None and all(d_qk != width for width, _ in _SHAPES):
        fail(op, f"Dqk must be 576 or 512, got {d_qk}")
    if d_v is not None and (d_qk, d_v) not in _SHAPES:
        fail(op, f"(Dqk, d_v) must be (576, 512) or (512, 512), got ({d_qk}, {d_v})")
    if groups < 1 or heads % groups != 0 or heads // groups > _MAX_HEADS_PER_GROUP:
        expected = f"a multiple of kv's groups, at most {_MAX_HEADS_PER_GROUP} a group"
        fail(op, f"q's heads must be {expected}, got {heads} heads and {groups} groups")
    if indices.shape[3] < 1:
        fail(op, f"indices must have at least one slot a row, got {describe(indices)}")
    check_scale(op, sm_scale)
    check_q_start(op, q_start)
    if kv_stride < 1:
        fail(op, f"kv_stride must be at least 1, got {kv_stride}")
    check_same_device(op, "q", q, kv=kv, indices=indices, topk_length=topk_length, attn_sink=attn_sink)
