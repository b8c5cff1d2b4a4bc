"""torch.ops.dsa.sparse_mla_bwd: gradients of sparse_mla_fwd, from the reference on every device: exact, but slow."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext import reference
from dsa_ext.ops._library import library

_OP = "sparse_mla_bwd"

library.define(
    "sparse_mla_bwd(Tensor dout, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor indices, float? sm_scale=None, "
    "bool causal=True, SymInt q_start=0, SymInt kv_stride=1, Tensor? topk_length=None, Tensor? attn_sink=None, "
    "Tensor? dlse=None) -> (Tensor dq, Tensor dkv, Tensor d_sink)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _fake(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    kv_stride: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    d_sink = q.new_empty(0, dtype=torch.float32) if attn_sink is None else attn_sink.new_empty(attn_sink.shape)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), d_sink


library.impl(_OP, reference.sparse_mla_bwd, "CPU")
library.impl(_OP, reference.sparse_mla_bwd, "CUDA")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)


@register_flop_formula(torch.ops.dsa.sparse_mla_bwd)
def _flops(
    dout_shape: torch.Size,
    q_shape: torch.Size,
    kv_shape: torch.Size,
    out_shape_of_forward: torch.Size,
    lse_shape: torch.Size,
    indices_shape: torch.Size,
    *args: Any,
    out_shape: Any,
    **kwargs: Any,
) -> int:
    """Five matmuls over every listed slot: scores, dP, dQ, and the key's and the value's part of dkv."""
    batch, seq, heads, d_qk = q_shape
    d_v = dout_shape[3]
    return 2 * batch * seq * heads * indices_shape[3] * (3 * d_qk + 2 * d_v)
