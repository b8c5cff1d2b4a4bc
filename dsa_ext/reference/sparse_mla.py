"""Sparse multi-query latent attention in plain PyTorch, on any device: forward, backward, and the weights of attn_dist.

Arithmetic is fp32, or float64 for float64 inputs. Queries are processed in chunks, so that the gathered keys and the
scores of one chunk bound the memory: S=4096 queries with 2048 keys each need less than 1 GB in addition to the tensors
themselves.

Letters: B batch, S queries, H heads, G kv groups, K selected slots, D columns of a key (the first d_v are its value).
Decoding from a paged cache is in decode.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_ext.reference.numerics import compute_dtype, names_one_of, raised

#: Heads per partial sum of attn_dist.
HEADS_PER_BLOCK = 64
#: Maximum number of elements in the temporaries of one chunk of queries.
_CHUNK_ELEMENTS = 2**26


def visible_slots(
    indices: Tensor,
    s_kv: int,
    causal: bool,
    q_start: int,
    positions_per_key: int,
    topk_length: Tensor | None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Which slots of `indices` [B, S, G, K] are visible: bool of the same shape."""
    seq, topk = indices.shape[1], indices.shape[3]
    visible = names_one_of(indices, s_kv)
    if starts is not None and ends is not None:
        visible &= (indices >= starts[:, :, None, None]) & (indices < ends[:, :, None, None])
    elif causal:
        position = q_start + torch.arange(seq, device=indices.device)
        visible &= indices < ((position + 1) // positions_per_key)[:, None, None]
    if topk_length is not None:
        visible &= torch.arange(topk, device=indices.device) < topk_length[:, :, None, None]
    return visible


@dataclass
class QueryChunk:
    """Consecutive queries with their gathered keys. Slots that are not visible hold zeros and point to row S_kv."""

    queries: slice
    q: Tensor  # [B, s, G, H/G, D]
    keys: Tensor  # [B, s, G, K, D]
    visible: Tensor  # [B, s, G, 1, K]
    rows: Tensor  # [B, s, G, K], rows of kv flattened to [B * (S_kv + 1) * G, D]

    def probabilities(self, lse: Tensor, sm_scale: float) -> Tensor:
        """exp(score - lse) [B, s, G, H/G, K]; 0 in slots that are not visible, whatever lse is."""
        scores = self.scores(sm_scale)
        lse = raised(lse.masked_fill(lse == -torch.inf, 0))
        return torch.exp(scores - lse[..., None]).masked_fill(~self.visible, 0)

    def scores(self, sm_scale: float) -> Tensor:
        scores = self.q @ self.keys.mT * sm_scale
        return scores.masked_fill(~self.visible, -torch.inf)


def query_chunks(q: Tensor, kv: Tensor, indices: Tensor, visible: Tensor) -> Iterator[QueryChunk]:
    batch, seq, heads, dim = q.shape
    s_kv, groups = kv.shape[1:3]
    topk = indices.shape[3]
    dtype = compute_dtype(q)
    # Slots that are not visible read zeros from a row after the last one.
    padded = torch.cat([kv, kv.new_zeros(batch, 1, groups, dim)], dim=1)
    ids = torch.where(visible, indices, s_kv).long()
    b = torch.arange(batch, device=q.device)[:, None, None, None]
    g = torch.arange(groups, device=q.device)[:, None]
    rows = (b * (s_kv + 1) + ids) * groups + g
    flat = padded.reshape(-1, dim)

    step = max(1, _CHUNK_ELEMENTS // max(1, batch * topk * (groups * dim + 2 * heads)))
    for begin in range(0, seq, step):
        run = slice(begin, begin + step)
        yield QueryChunk(
            queries=run,
            q=q[:, run].to(dtype).unflatten(2, (groups, heads // groups)),
            keys=flat[rows[:, run]].to(dtype),
            visible=visible[:, run, :, None],
            rows=rows[:, run],
        )


def share_after_sink(lse: Tensor, attn_sink: Tensor | None) -> Tensor:
    """Share of a row's probability mass that the sink leaves: exp(lse) / (exp(lse) + exp(sink)); lse is [B, S, H]."""
    if attn_sink is None:
        return torch.ones_like(lse)
    share = torch.sigmoid(lse - attn_sink.to(lse.dtype))
    return share.masked_fill(lse == -torch.inf, 0)


def sparse_mla_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.sparse_mla` for the arguments. Takes any D and d_v <= D.

    Returns out [B, S, H, d_v] in the dtype of q and lse [B, S, H] in fp32 (float64 for float64 inputs).
    """
    slots = (causal, q_start, positions_per_key, topk_length, starts, ends)
    out, lse, _ = sparse_mla_max_fwd(q, kv, indices, sm_scale, d_v, *slots, attn_sink)
    return out, lse


def sparse_mla_max_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    attn_sink: Tensor | None = None,
    inf_if_empty: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """sparse_mla_fwd, and the largest score of each row [B, S, H], like lse: -inf where no slot is visible.

    With `inf_if_empty` lse is +inf there.
    """
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    visible = visible_slots(indices, kv.shape[1], causal, q_start, positions_per_key, topk_length, starts, ends)
    out = q.new_empty(*q.shape[:3], d_v)
    lse, max_logits = (q.new_empty(q.shape[:3], dtype=compute_dtype(q)) for _ in range(2))
    for chunk in query_chunks(q, kv, indices, visible):
        scores = chunk.scores(scale)
        max_logits[:, chunk.queries] = scores.amax(-1).flatten(2)
        chunk_lse = torch.logsumexp(scores, dim=-1)
        # Normalized by their own sum: if scores are large, lse is too coarse to tell how many keys share the mass.
        p = scores.softmax(-1).masked_fill((chunk_lse == -torch.inf)[..., None], 0)
        lse[:, chunk.queries] = chunk_lse.flatten(2)
        share = share_after_sink(lse[:, chunk.queries], attn_sink)
        out[:, chunk.queries] = (p @ chunk.keys[..., :d_v]).flatten(2, 3) * share[..., None]
    if inf_if_empty:
        lse.masked_fill_(max_logits == -torch.inf, torch.inf)
    return out, lse, max_logits


def sparse_mla_bwd(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    attn_sink: Tensor | None = None,
    dlse: Tensor | None = None,
    return_dist: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of sparse_mla_fwd: dq and dkv like q and kv, d_sink [H] in fp32 (empty without a sink). And with
    `return_dist` what attn_dist returns with `per_head_block` (empty without).

    `dout` [B, S, H, d_v] and `dlse` [B, S, H] are the incoming gradients of its two results `out` and `lse`.

    dkv is summed with `index_add_`: on CUDA the order of the additions, and with it the last bits, differ from call to
    call unless `torch.use_deterministic_algorithms(True)` is set.
    """
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    d_v = dout.shape[3]
    batch, s_kv, groups, dim = kv.shape
    dtype = compute_dtype(q)
    visible = visible_slots(indices, s_kv, causal, q_start, positions_per_key, topk_length, starts, ends)

    dout = dout.to(dtype)
    delta = (dout * out.to(dtype)).sum(-1)
    share = share_after_sink(lse, attn_sink)
    # dS = share * P * (dP - delta) + P * dlse, where P does not include the sink.
    delta_of_scores = share * delta - (0 if dlse is None else dlse)
    dout_beside_sink = share[..., None] * dout

    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dkv = q.new_zeros(batch * (s_kv + 1) * groups, dim, dtype=dtype)
    for chunk in query_chunks(q, kv, indices, visible):
        heads_of = chunk.q.shape[2:4]
        p = chunk.probabilities(lse[:, chunk.queries].unflatten(2, heads_of), scale)
        do = dout_beside_sink[:, chunk.queries].unflatten(2, heads_of)
        dp = do @ chunk.keys[..., :d_v].mT
        ds = p * (dp - delta_of_scores[:, chunk.queries].unflatten(2, heads_of)[..., None]) * scale
        ds = ds.masked_fill(~chunk.visible, 0)  # where p = 0, an infinite dlse must not give NaN
        dq[:, chunk.queries] = (ds @ chunk.keys).flatten(2, 3)
        dkeys = ds.mT @ chunk.q
        dkeys[..., :d_v] += p.mT @ do
        dkv.index_add_(0, chunk.rows.flatten(), dkeys.flatten(0, 3))
    dkv = dkv.view(batch, s_kv + 1, groups, dim)[:, :s_kv].to(kv.dtype, copy=True)

    if attn_sink is None:
        d_sink = q.new_empty(0, dtype=torch.float32)
    else:
        d_sink = ((share - 1) * delta).sum((0, 1)).to(attn_sink.dtype)
    dist = q.new_empty(0, dtype=dtype)
    if return_dist:
        slots = (causal, q_start, positions_per_key, topk_length, starts, ends)
        dist = attn_dist(q, kv, indices, lse, sm_scale, *slots, per_head_block=True)
    return dq, dkv, d_sink, dist


def attn_dist(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    normalize: bool = False,
    per_head_block: bool = False,
) -> Tensor:
    """See :func:`dsa_ext.attn_dist`. Takes any D. Returns fp32, float64 for float64 inputs."""
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    visible = visible_slots(indices, kv.shape[1], causal, q_start, positions_per_key, topk_length, starts, ends)
    group_heads = q.shape[2] // kv.shape[2]
    blocks, size = (-(-group_heads // HEADS_PER_BLOCK), HEADS_PER_BLOCK) if per_head_block else (1, group_heads)
    dist = q.new_zeros(blocks, *indices.shape, dtype=compute_dtype(q))
    for chunk in query_chunks(q, kv, indices, visible):
        chunk_lse = lse[:, chunk.queries].unflatten(2, chunk.q.shape[2:4])
        p = chunk.probabilities(chunk_lse, scale).masked_fill((chunk_lse == -torch.inf)[..., None], 0)
        for block in range(blocks):
            dist[block, :, chunk.queries] = p[:, :, :, block * size : (block + 1) * size].sum(3)
    if per_head_block:
        return dist
    return dist[0] / dist[0].sum(-1, keepdim=True).clamp(min=1e-10) if normalize else dist[0]
