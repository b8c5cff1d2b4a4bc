"""Attention with queries, keys and values of each head, expanded from the latent keys.

At the sizes of DeepSeek-V3.2 a pair of a query and a key takes 3.4 times fewer operations than in the absorbed form.
"""

from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import linear, scaled_dot_product_attention

from dsa_ext import functional
from dsa_ext.nn.rotary import write_rotated
from dsa_ext.ops.sparse_mha import NOPE_COLUMNS, ROPE_COLUMNS, VALUE_COLUMNS


def attention_of_heads(q: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, sm_scale: float) -> Tensor:
    """Attention [B, S, H, v] of queries [B, S, H, nope + rope], after RoPE, to latent keys [B, S, latent] and their
    columns of RoPE [B, S, rope], with the weight [H * (nope + v), latent] of kv_b_proj."""
    nope_columns = q.shape[-1] - k_rope.shape[-1]
    keys_and_values = linear(latent, kv_b.to(latent.dtype)).unflatten(-1, (q.shape[2], -1))
    nope, v = keys_and_values.tensor_split([nope_columns], dim=-1)
    return _attend_to_all(q, nope, k_rope, v, sm_scale)


def _attend_to_all(q: Tensor, k: Tensor, k_rope: Tensor, v: Tensor, sm_scale: float) -> Tensor:
    """Causal attention with keys of heads and their shared columns of RoPE, on torch's scaled_dot_product_attention."""
    k = torch.cat([k, k_rope[:, :, None].expand(*k.shape[:3], -1)], dim=-1)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=sm_scale).transpose(1, 2)


#: Most pairs of an expanded query and a key at a time: for each, the weights for a learning indexer take 4 bytes, and
#: the gradients of scores of a head 3.
MOST_PAIRS = 2**28
#: Most queries with a window at a time.
_WINDOW_ROWS = 8192


def divided(length: int, most: int) -> list[slice]:
    """Slices of about equal size, of at most `most`; one if the length is 0."""
    parts = int(max(1, -(-length // most)))
    size = -(-length // parts)
    return [slice(i * size, min(length, (i + 1) * size)) for i in range(parts)]


class Expanded(NamedTuple):
    """So many of the first queries of a sequence list keys among so many of the first keys, each once. With a window,
    each lists keys among so many up to its own. With as many keys as queries they list no later keys than their own,
    unless `causal` is False."""

    rows: int
    keys: int
    window: int | None = None
    causal: bool = True

    def places(self) -> list[tuple[slice, slice, bool]]:
        """Queries that are worked on together, the keys among which they list theirs, and whether they list no later
        keys than their own."""
        if self.rows == 0:
            return []
        if self.window is None:
            return [(slice(0, self.rows), slice(0, self.keys), self.causal and self.rows == self.keys)]
        parts = divided(self.rows, _WINDOW_ROWS)
        return [(rows, slice(max(0, rows.start + 1 - self.window), rows.stop), self.causal) for rows in parts]

    @property
    def most_sequences(self) -> int:
        """How many sequences may be worked on together."""
        if self.rows == 0:
            return MOST_PAIRS
        rows, keys, _ = self.places()[-1]
        pairs: int = (rows.stop - rows.start) * (keys.stop - keys.start)
        return max(1, MOST_PAIRS // pairs)


NONE = Expanded(0, 0)


def fits(nope: int, rope: int, v: int) -> bool:
    """Whether sparse_mha takes heads of these columns."""
    return (nope, rope, v) == (NOPE_COLUMNS, ROPE_COLUMNS, VALUE_COLUMNS)


def expanded_rows(seq: int, topk: int, heads: int, nope: int, rope: int, v: int) -> int:
    """How many of the first queries of a sequence, which select `topk` keys, take less time in the expanded form: with
    the columns of sparse_mha four times `topk`, and more with less than 64 heads, which cost the absorbed form nearly
    as much as 64 (measured: bench/NOTES.md); else those that see no more keys than they select."""
    rows = topk * (2 + 128 // max(1, min(heads, 64))) if fits(nope, rope, v) else topk
    rows = min(rows, isqrt(MOST_PAIRS))
    return seq if seq <= rows else rows  # no `min`: of a length that is not known yet, it would remain an expression


def expanded_queries(
    seq: int,
    topk: int,
    heads: int,
    nope: int,
    rope: int,
    v: int,
    *,
    bounded: bool = False,
    longest: int | None = None,
    causal: bool = True,
) -> Expanded:
    """The queries of a sequence of as many keys that take less time in the expanded form.

    Args:
        bounded: whether queries may see less than all keys up to their own.
        longest: then, if it is known, the most keys up to its own that a query may see.
        causal: then, whether it is known that no query sees a later key than its own.
    """
    if not fits(nope, rope, v) and (bounded or is_compiling()):
        return NONE
    sizes = topk, heads, nope, rope, v
    first = expanded_rows(seq, *sizes)
    if not bounded:
        return Expanded(first, first)
    if not causal:
        return Expanded(seq, seq, causal=False) if first == seq else NONE
    if first < seq and longest is not None and 0 < longest == expanded_rows(longest, *sizes):
        return Expanded(seq, seq, window=longest)
    return Expanded(first, first)


def _together(key_weight: Tensor, value_weight: Tensor) -> Tensor:
    """[H, nope + v, latent], from [H, nope, latent] and [H, v, latent]. Without a copy where they are parts of one
    tensor already, as those of kv_b_proj."""
    heads, nope, latent = key_weight.shape
    columns = nope + value_weight.shape[1]
    storages = {part.untyped_storage()._cdata for part in (key_weight, value_weight)}
    behind = value_weight.storage_offset() == key_weight.storage_offset() + nope * latent
    if len(storages) == 1 and behind and key_weight.stride() == value_weight.stride() == (columns * latent, latent, 1):
        return key_weight.as_strided((heads, columns, latent), key_weight.stride())
    return torch.cat([key_weight, value_weight], dim=1)


class Attended(NamedTuple):
    values: Tensor  # [B, S, H, v]
    lse: Tensor | None = None  # [B, S, H]; None of scaled_dot_product_attention


class ExpandedAttention:
    """Of queries to the keys that they list. Runs on sparse_mha, or with other numbers of columns, if queries list all
    keys up to their own, on scaled_dot_product_attention. The keys and values of heads are made again for the backward.

    Args:
        heads: queries [B, S, H, nope + rope], before RoPE.
        key_weight, value_weight: [H, nope, latent] and [H, v, latent].
        kv: keys [B, T, 1, latent + rope].
        ids: listed keys [B, S, K].
        cos, sin, interleaved: RoPE of the queries, see absorbed.Rope; [B, S, 1, rope / 2].
        q_start: where the first query stands among the keys.
        causal: whether no query lists a later key than its own.
        window: see functional.sparse_mha.
    """

    def __init__(
        self,
        heads: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        kv: Tensor,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        *,
        sm_scale: float,
        q_start: int = 0,
        causal: bool = True,
        window: int | None = None,
    ) -> None:
        self.key_weight, self.value_weight, self.cos, self.sin = key_weight, value_weight, cos, sin
        self.interleaved, self.ids = interleaved, ids
        self._options: dict[str, Any] = {"sm_scale": sm_scale, "causal": causal, "q_start": q_start, "window": window}
        n_heads, self.nope, latent = key_weight.shape
        self.q = heads.new_empty(heads.shape)
        write_rotated(self.q, heads, cos, sin, interleaved, first=self.nope)
        self.latent, self.k_rope = kv[:, :, 0].tensor_split([latent], dim=-1)
        weights = _together(key_weight, value_weight).flatten(0, 1)
        keys_and_values = linear(self.latent, weights).unflatten(-1, (n_heads, -1))
        self.k, self.v = keys_and_values.tensor_split([self.nope], dim=-1)
        self.fits = fits(self.nope, self.k_rope.shape[-1], self.v.shape[-1])

    def attend(self) -> Attended:
        if not self.fits:
            return Attended(_attend_to_all(self.q, self.k, self.k_rope, self.v, self._options["sm_scale"]))
        inputs = self.q, self.k, self.k_rope, self.v, self.ids
        return Attended(*functional.sparse_mha(*inputs, **self._options, return_lse=True))

    def distribution(self, attended: Attended) -> Tensor:
        """The weights of the listed keys [B, S, K], summed over heads, where `attend` gives lse."""
        assert attended.lse is not None
        return functional.sparse_mha_dist(self.q, self.k, self.k_rope, self.ids, attended.lse, **self._options)

    def gradients(self, dvalues: Tensor, attended: Attended) -> "ExpandedGradients":
        """From the gradient of the values, [tokens, H, v], and the results of `attend`."""
        dout = dvalues.view(attended.values.shape)
        inputs = self.q, self.k, self.k_rope, self.v
        if attended.lse is not None:
            given = dout, *inputs, *attended, self.ids
            return ExpandedGradients(self, *torch.ops.dsa.sparse_mha_bwd(*given, **self._options))
        with torch.enable_grad():
            leaves = q, k, k_rope, v = tuple(t.detach().requires_grad_() for t in inputs)
            values = _attend_to_all(q, k, k_rope, v, self._options["sm_scale"])
        return ExpandedGradients(self, *torch.autograd.grad(values, leaves, dout))


class ExpandedGradients:
    """Gradients of an attention, from those of its queries, keys and values [B, S, H, columns]."""

    def __init__(self, attention: ExpandedAttention, dq: Tensor, dk: Tensor, dk_rope: Tensor, dv: Tensor) -> None:
        self._of, self._dq, self._dk_rope = attention, dq, dk_rope
        self._dk, self._dv = dk.flatten(0, 1), dv.flatten(0, 1)  # [tokens, H, columns]

    def take_heads(self) -> Tensor:
        """That of the heads, in the memory of the queries' gradient, which is overwritten: to be called once."""
        rope = self._dq[..., self._of.nope :]
        if self._of.interleaved:  # a pair's new columns hold others that are still to be read
            rope.copy_(self._rotate(rope.new_empty(rope.shape), rope))
        else:
            self._rotate(rope, rope)
        return self._dq.contiguous()

    def write_heads(self, dheads: Tensor) -> None:
        """Writes that of the heads to `dheads`."""
        self._rotate(dheads, self._dq, first=self._of.nope)

    def _rotate(self, out: Tensor, gradient: Tensor, first: int = 0) -> Tensor:
        of = self._of
        write_rotated(out, gradient, of.cos, -of.sin, interleaved_out=of.interleaved, first=first)
        return out

    def key_weight(self) -> Tensor:
        return self._weight(self._dk)

    def value_weight(self) -> Tensor:
        return self._weight(self._dv)

    def _weight(self, gradient: Tensor) -> Tensor:
        of_rows: Tensor = gradient.flatten(1).mT @ self._of.latent.flatten(0, 1)
        return of_rows.view(*gradient.shape[1:], -1)

    def keys(self) -> Tensor:
        """That of kv [B, S, 1, latent + rope]."""
        dlatent = self._dk.flatten(1) @ self._of.key_weight.flatten(0, 1)
        dlatent.addmm_(self._dv.flatten(1), self._of.value_weight.flatten(0, 1))
        return torch.cat([dlatent.view(self._of.latent.shape), self._dk_rope], dim=-1)[:, :, None]
