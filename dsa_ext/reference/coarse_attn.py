"""Attention to pooled keys, and its mean weights per block of queries, in plain PyTorch, on any device.

Arithmetic is fp32, or float64 for float64 inputs. Blocks of queries are processed in chunks, which bounds the memory
needed in addition to the tensors themselves. Letters are those of block_sparse.
"""

import torch
from torch import Tensor

from dsa_ext.reference.block_sparse import BLOCK, blocks
from dsa_ext.reference.layout import empty_rows_like
from dsa_ext.reference.numerics import compute_dtype

#: Maximum number of elements in the temporaries of one chunk.
_CHUNK_ELEMENTS = 2**26


def coarse_attn_fwd(q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`dsa_ext.coarse_attn`. Takes any D.

    Returns out, like q; lse [B, H, Nq] and scores [B, H, Mq, Nkv] in fp32 (float64 for float64 inputs).
    """
    batch, heads, length, dim = q.shape
    kv_heads, kv_length = k.shape[1:3]
    scale = dim**-0.5 if sm_scale is None else sm_scale
    dtype = compute_dtype(q)
    keys, values = (x[:, :, None].to(dtype) for x in (k, v))
    out = empty_rows_like(q)
    lse = q.new_empty(batch, heads, length, dtype=dtype)
    scores = q.new_empty(batch, heads, blocks(length), kv_length, dtype=dtype)

    step = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * BLOCK * (3 * kv_length + 2 * dim)))
    for begin in range(0, blocks(length), step):
        run = slice(begin, begin + step)
        queries = slice(begin * BLOCK, (begin + step) * BLOCK)
        # Heads that read the same keys are grouped: [B, Hkv, H / Hkv, n, D].
        chunk = q[:, :, queries].unflatten(1, (kv_heads, heads // kv_heads)).to(dtype)
        logits = chunk @ keys.mT * scale
        sums = logits.logsumexp(-1)
        probs = logits.softmax(-1)
        out[:, :, queries] = (probs @ values).flatten(1, 2).to(q.dtype)
        lse[:, :, queries] = sums.flatten(1, 2)
        parts = probs.flatten(1, 2).split(BLOCK, dim=2)
        scores[:, :, run] = torch.stack([part.mean(2) for part in parts], dim=2)
    return out, lse, scores
