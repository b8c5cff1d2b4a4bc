"""Attention to pooled keys, and its mean weights per block of queries, in plain PyTorch, on any device.

It is block-sparse attention with all blocks in each list: the gradients are those of block_sparse_attn, whose
probabilities must come from the same scores, bit for bit, if these are large. Letters are those of block_sparse.
"""

import torch
from torch import Tensor

from dsa_ext.reference.block_sparse import BLOCK, block_chunks, blocks, uncut
from dsa_ext.reference.numerics import compute_dtype


def coarse_attn_fwd(q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`dsa_ext.coarse_attn`. Takes any D.

    Returns out, like q; lse [B, H, Nq] and scores [B, H, Mq, Nkv] in fp32 (float64 for float64 inputs).
    """
    batch, heads, length, dim = q.shape
    kv_length, count, kv_blocks = k.shape[2], blocks(length), blocks(k.shape[2])
    scale = dim**-0.5 if sm_scale is None else sm_scale
    every = torch.arange(kv_blocks, device=q.device, dtype=torch.int32).expand(batch, heads, count, -1)
    used = torch.full((batch, heads, count), kv_blocks, device=q.device, dtype=torch.int32)
    out = q.new_empty(batch, heads, count, BLOCK, dim)
    lse = q.new_empty(batch, heads, count, BLOCK, dtype=compute_dtype(q))
    scores = lse.new_empty(batch, heads, count, kv_length)
    exists = (torch.arange(count * BLOCK, device=q.device) < length).view(count, BLOCK, 1)  # not so in the last block
    for chunk in block_chunks(q, k, v, every, used, None):
        logits = chunk.scores(scale)
        lse[:, :, chunk.queries] = logits.logsumexp(-1)
        probs = logits.softmax(-1)
        out[:, :, chunk.queries] = (probs @ chunk.values).to(q.dtype)
        seen = exists[chunk.queries]
        total = probs[..., :kv_length].masked_fill(~seen, 0).sum(3)
        scores[:, :, chunk.queries] = total / seen.sum(1)
    return uncut(out, q), lse.flatten(2)[..., :length].contiguous(), scores
