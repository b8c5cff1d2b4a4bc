"""Decoding: keys packed in fp8, and sparse multi-query latent attention over a paged cache, in plain PyTorch."""

import torch
from torch import Tensor

from dsa_ext.reference import fp8
from dsa_ext.reference.numerics import compute_dtype, names_one_of
from dsa_ext.reference.sparse_mla import sparse_mla_fwd

#: Columns of a packed key that are e4m3, and the bytes of their scales. A rope part in bf16 may follow.
PACKED_COLUMNS = 512
SCALE_BYTES = PACKED_COLUMNS // fp8.BLOCK * 4


def packed_bytes(d_qk: int) -> int:
    """Bytes of a packed key of so many columns."""
    return PACKED_COLUMNS + SCALE_BYTES + 2 * (d_qk - PACKED_COLUMNS)


def pack_kv_fp8(kv: Tensor) -> Tensor:
    """See :func:`dsa_ext.pack_kv_fp8`."""
    y, scales = fp8.act_quant(kv[..., :PACKED_COLUMNS])
    return torch.cat([_viewed(part, torch.uint8) for part in (y, scales, kv[..., PACKED_COLUMNS:])], -1)


def unpack_kv_fp8(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The keys [.., 576 or 512] of packed rows [.., 656 or 528]."""
    y, scales, rope = (part.to(dtype) for part in parts_of_packed(packed))
    return torch.cat([(y.unflatten(-1, (-1, fp8.BLOCK)) * scales[..., None]).flatten(-2), rope], -1)


def parts_of_packed(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the e4m3 part, the scales in fp32, and the rope part in bf16."""
    y, scales, rope = packed.tensor_split((PACKED_COLUMNS, PACKED_COLUMNS + SCALE_BYTES), -1)
    return _viewed(y, torch.float8_e4m3fn), _viewed(scales, torch.float32), _viewed(rope, torch.bfloat16)


def _viewed(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of rows of any strides, their bytes taken as another dtype."""
    if rows.shape[-1] == 0:
        return rows.new_empty(rows.shape, dtype=dtype)
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def listed_keys(kv_cache: Tensor, indices: Tensor, used: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The keys [n, D] of all slots of the cache that `indices` lists, and `indices` as rows of these.

    Nothing else of the cache is read. Ids that name no slot, and those where `used` is False, become -1.
    """
    blocks, page = kv_cache.shape[:2]
    listed = used & names_one_of(indices, blocks * page)
    slots, places = torch.unique(indices[listed].long(), return_inverse=True)
    rows = kv_cache[slots // max(1, page), slots % max(1, page), 0]
    keys = unpack_kv_fp8(rows, dtype) if kv_cache.dtype == torch.uint8 else rows.to(dtype)
    ids = torch.full_like(indices, -1).masked_scatter_(listed, places.int())
    return keys, ids


def used_slots(indices: Tensor, topk_length: Tensor | None) -> Tensor:
    """Which slots of `indices` [B, N, K] are among the first topk_length[b, n] of their row."""
    if topk_length is None:
        return torch.ones_like(indices, dtype=torch.bool)
    return torch.arange(indices.shape[-1], device=indices.device) < topk_length[..., None]


def sparse_mla_decode(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    inf_if_empty: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.sparse_mla_decode`. With `inf_if_empty` lse is +inf where it would be -inf."""
    used = used_slots(indices, topk_length)
    keys, ids = listed_keys(kv_cache, indices, used, compute_dtype(q))
    out, lse = sparse_mla_fwd(
        q.flatten(0, 1)[None],
        keys[None, :, None],
        ids.flatten(0, 1)[None, :, None],
        sm_scale,
        d_v,
        causal=False,
        attn_sink=attn_sink,
    )
    if inf_if_empty:
        lse.masked_fill_(lse == -torch.inf, torch.inf)
    return out.view(*q.shape[:3], d_v), lse.view(q.shape[:3])
