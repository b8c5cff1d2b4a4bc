"""Attention of heads with keys and values of their own to listed keys, in plain PyTorch, forward and backward.

Arithmetic is fp32, or float64 for float64 inputs. Queries are processed in chunks with all keys and a mask.

Letters: B batch, S queries, T keys, H heads, K listed slots.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_ext.reference.numerics import compute_dtype, raised
from dsa_ext.reference.sparse_mla import visible_slots

#: Maximum number of scores in one chunk of queries.
_CHUNK_SCORES = 2**24


def seen_slots(
    indices: Tensor,
    s_kv: int,
    causal: bool,
    q_start: int,
    starts: Tensor | None,
    ends: Tensor | None,
    window: int | None,
) -> Tensor:
    """The key of each slot of `indices` [B, S, K] that its query sees, else S_kv."""
    seen = visible_slots(indices[:, :, None], s_kv, causal, q_start, 1, None, starts, ends)[:, :, 0]
    if window is not None:
        position = q_start + torch.arange(indices.shape[1], device=indices.device)[:, None]
        seen = seen & (indices > position - window)
    return torch.where(seen, indices, s_kv).long()


def seen_keys(slots: Tensor, s_kv: int) -> Tensor:
    """Which keys each query lists and sees: bool [B, S, T]."""
    mask = torch.zeros(*slots.shape[:2], s_kv + 1, dtype=torch.bool, device=slots.device)
    return mask.scatter_(2, slots, True)[..., :s_kv]


def of_slots(of_keys: Tensor, slots: Tensor) -> Tensor:
    """What belongs to the key of each slot [B, S, K], from [B, S, T]; 0 where a query sees none."""
    return torch.nn.functional.pad(of_keys, (0, 1)).gather(2, slots)


@dataclass
class MaskedChunk:
    """Consecutive queries with all keys. Keys that no query of the chunk sees are zeros."""

    queries: slice
    q: Tensor  # [B, H, s, 192]
    keys: Tensor  # [B, H, T, 192]
    values: Tensor  # [B, H, T, 128]
    visible: Tensor  # [B, 1, s, T]

    def scores(self, sm_scale: float) -> Tensor:
        return (self.q @ self.keys.mT * sm_scale).masked_fill(~self.visible, -torch.inf)

    def rows(self, by_query: Tensor) -> Tensor:
        """The chunk's part of a tensor [B, S, H, ..], as [B, H, s, ..]."""
        return by_query[:, self.queries].transpose(1, 2).to(self.q.dtype)

    def probabilities(self, lse: Tensor, sm_scale: float) -> Tensor:
        """exp(score - lse) [B, H, s, T], from lse [B, S, H]; 0 of keys that are not visible, and where lse is -inf."""
        own = self.rows(lse)
        base = raised(own.masked_fill(own == -torch.inf, 0))
        p = torch.exp(self.scores(sm_scale) - base[..., None])
        return p.masked_fill(~self.visible | (own == -torch.inf)[..., None], 0)


def masked_chunks(q: Tensor, k: Tensor, k_rope: Tensor, v: Tensor | None, seen: Tensor) -> Iterator[MaskedChunk]:
    """Without `v`, the values are the keys."""
    batch, seq, heads, _ = q.shape
    dtype = compute_dtype(q)
    keys = torch.cat([k, k_rope[:, :, None].expand(-1, -1, heads, -1)], -1)
    step = max(1, _CHUNK_SCORES // max(1, batch * heads * k.shape[1]))
    for begin in range(0, seq, step):
        run = slice(begin, begin + step)
        unseen = ~seen[:, run].any(1)[:, :, None, None]
        yield MaskedChunk(
            queries=run,
            q=q[:, run].transpose(1, 2).to(dtype),
            keys=keys.masked_fill(unseen, 0).transpose(1, 2).to(dtype),
            values=(keys if v is None else v).masked_fill(unseen, 0).transpose(1, 2).to(dtype),
            visible=seen[:, None, run],
        )


def sparse_mha_fwd(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`dsa_ext.sparse_mha` for the arguments. Takes any numbers of columns.

    Returns out [B, S, H, Dv] in the dtype of q and lse [B, S, H] in fp32 (float64 for float64 inputs).
    """
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))
    seen = seen_keys(seen_slots(indices, k.shape[1], causal, q_start, starts, ends, window), k.shape[1])
    for chunk in masked_chunks(q, k, k_rope, v, seen):
        scores = chunk.scores(scale)
        chunk_lse = torch.logsumexp(scores, dim=-1)
        p = scores.softmax(-1).masked_fill((chunk_lse == -torch.inf)[..., None], 0)
        lse[:, chunk.queries] = chunk_lse.transpose(1, 2)
        out[:, chunk.queries] = (p @ chunk.values).transpose(1, 2).to(out.dtype)
    return out, lse


def sparse_mha_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    window: int | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of sparse_mha_fwd: dq, dk, dk_rope and dv, contiguous.

    `dout` [B, S, H, Dv] and `dlse` [B, S, H] are the incoming gradients of its two results `out` and `lse`.
    """
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    dtype, nope = compute_dtype(q), k.shape[3]
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    dq = q.new_empty(q.shape)
    dkeys = q.new_zeros(*k.shape[:3], q.shape[3], dtype=dtype).transpose(1, 2)
    dvalues = q.new_zeros(v.shape, dtype=dtype).transpose(1, 2)
    seen = seen_keys(seen_slots(indices, k.shape[1], causal, q_start, starts, ends, window), k.shape[1])
    for chunk in masked_chunks(q, k, k_rope, v, seen):
        p, do = chunk.probabilities(lse, scale), chunk.rows(dout)
        takes_part = chunk.visible & (chunk.rows(lse) != -torch.inf)[..., None]
        ds = (p * (do @ chunk.values.mT - chunk.rows(delta)[..., None])).masked_fill(~takes_part, 0) * scale
        dq[:, chunk.queries] = (ds @ chunk.keys).transpose(1, 2).to(dq.dtype)
        dkeys += ds.mT @ chunk.q
        dvalues += p.mT @ do
    dk = k.new_empty(k.shape).copy_(dkeys[..., :nope].transpose(1, 2))
    dk_rope = dkeys[..., nope:].sum(1).to(k_rope.dtype)
    return dq, dk, dk_rope, v.new_empty(v.shape).copy_(dvalues.transpose(1, 2))


def sparse_mha_dist(
    q: Tensor,
    k: Tensor,
    k_rope: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """See :func:`dsa_ext.sparse_mha_dist`. Takes any numbers of columns. Returns fp32, float64 for float64 inputs."""
    scale = q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    slots = seen_slots(indices, k.shape[1], causal, q_start, starts, ends, window)
    dist = q.new_zeros(indices.shape, dtype=compute_dtype(q))
    for chunk in masked_chunks(q, k, k_rope, None, seen_keys(slots, k.shape[1])):
        p = chunk.probabilities(lse, scale).sum(1)
        dist[:, chunk.queries] = of_slots(p, slots[:, chunk.queries])
    return dist
