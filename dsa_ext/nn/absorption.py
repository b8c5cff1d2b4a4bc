"""Queries of the absorbed form, for some rows at a time: which rows, and how their heads are absorbed."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dsa_ext.nn.expanded import Expanded, ExpandedAttention, divided
from dsa_ext.nn.heads import multiply, multiply_heads, weight_gradient
from dsa_ext.nn.rotary import rotated, write_rotated
from dsa_ext.ops._library import is_transformed


class Rope(NamedTuple):
    """rope_tables [1 or B, S, 1, rope / 2], and the layout of the columns that are rotated."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class Queries(NamedTuple):
    """Queries that are worked on together: of some whole sequences, or a part of one."""

    batch: slice
    rows: slice
    keys: slice | None = None  # among which they list theirs, if their attention is that of ExpandedAttention
    causal: bool = True  # these are arguments of ExpandedAttention
    window: int | None = None

    @property
    def expanded(self) -> bool:
        return self.keys is not None

    def of(self, tensor: Tensor) -> Tensor:
        """Their part of a tensor [B, S, ...]."""
        return tensor[self.batch, self.rows]

    def visible(self, starts: Tensor | None, ends: Tensor | None) -> dict[str, Any]:
        """What functional.sparse_mla needs to know which keys they see."""
        if starts is None and ends is None:
            return {"q_start": self.rows.start}
        bounds = {"starts": starts, "ends": ends}
        return {name: None if bound is None else self.of(bound) for name, bound in bounds.items()}


def all_queries(heads: Tensor) -> Queries:
    return Queries(slice(0, heads.shape[0]), slice(0, heads.shape[1]))


def parts_of(heads: Tensor, columns: int, expanded: Expanded, most_bytes: int) -> Iterator[Queries]:
    """All queries in parts of about equal size, whose absorbed form of so many columns has at most so many bytes; those
    of the expanded form apart."""
    batch, seq, n_heads = heads.shape[:3]
    most = max(1, most_bytes // (n_heads * columns * heads.element_size()))
    places = expanded.places()
    are_whole = len(places) <= 1 and expanded.rows in (0, seq)
    together = max(1, most // max(1, seq)) if are_whole else 1
    for sequences in divided(batch, min(together, expanded.most_sequences)):
        for rows, keys, causal in places:
            yield Queries(sequences, rows, keys, causal, expanded.window)
        if expanded.rows < seq or seq == 0:
            for rows in divided(seq - expanded.rows, most):
                yield Queries(sequences, slice(expanded.rows + rows.start, expanded.rows + rows.stop))


class Absorption:
    """Absorbs the queries of some rows, and returns gradients from there."""

    def __init__(self, heads: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        self.heads, self.key_weight, self.cos, self.sin = heads, key_weight, cos, sin
        self.interleaved = interleaved
        _, self.nope, self.latent = key_weight.shape

    @property
    def head_columns(self) -> tuple[int, int]:
        """Of the queries of a head, without RoPE and with RoPE."""
        return self.nope, self.heads.shape[-1] - self.nope

    @property
    def columns(self) -> int:
        return self.latent + self.head_columns[1]

    def queries(self, rows: Queries) -> Tensor:
        heads = rows.of(self.heads)
        q = heads.new_empty(*heads.shape[:-1], self.columns)
        multiply(q.flatten(0, 1)[..., : self.latent], heads.flatten(0, 1)[..., : self.nope], self.key_weight)
        write_rotated(q[..., self.latent :], heads[..., self.nope :], *self._tables(rows), self.interleaved)
        return q

    def write_gradient(self, dheads: Tensor, dq: Tensor, rows: Queries) -> None:
        """Writes the gradient of the heads of these rows to `dheads`."""
        out = rows.of(dheads)
        multiply(out.flatten(0, 1)[..., : self.nope], dq.flatten(0, 1)[..., : self.latent], self.key_weight.mT)
        cos, sin = self._tables(rows)
        write_rotated(out[..., self.nope :], dq[..., self.latent :], cos, -sin, interleaved_out=self.interleaved)

    def weight_gradient(self, dq: Tensor, rows: Queries) -> Tensor:
        heads = rows.of(self.heads).flatten(0, 1)
        return weight_gradient(heads[..., : self.nope], dq.flatten(0, 1)[..., : self.latent])

    def expanded(
        self, rows: Queries, value_weight: Tensor, kv: Tensor, ids: Tensor, sm_scale: float
    ) -> ExpandedAttention:
        """Attention of these rows to keys [B, T, 1, latent + rope] of their sequences."""
        assert rows.keys is not None
        first = rows.keys.start
        listed = rows.of(ids)[:, :, 0]
        given = rows.of(self.heads), self.key_weight, value_weight, kv[rows.batch, rows.keys]
        return ExpandedAttention(
            *given, listed if first == 0 else listed - first, *self._tables(rows), self.interleaved,
            sm_scale=sm_scale, q_start=rows.rows.start - first, causal=rows.causal, window=rows.window,
        )  # fmt: skip

    def _tables(self, rows: Queries) -> tuple[Tensor, Tensor]:
        shape = *self.heads.shape[:2], 1, -1
        return rows.of(self.cos.expand(shape)), rows.of(self.sin.expand(shape))


def all_keys(heads: Tensor, kv: Tensor) -> Tensor:
    """Ids of all T keys for each query [B, S, 1, T], expanded from one row in memory. At least one slot: the operators
    take no empty rows."""
    (batch, seq), keys = heads.shape[:2], kv.shape[1]
    return torch.arange(max(1, keys), device=kv.device, dtype=torch.int32).expand(batch, seq, 1, -1)


def absorbed_queries(heads: Tensor, key_weight: Tensor, rope: Rope) -> Tensor:
    """Queries of the absorbed form, heads projected to the latent's columns: [B, S, H, latent + rope].

    Args:
        heads: [B, S, H, nope + rope].
        key_weight: [H, nope, latent], for the first `nope` columns of each head.
        rope: for the last `rope` columns.
    """
    key_weight = key_weight.to(heads.dtype)
    if not (torch.is_grad_enabled() or is_compiling() or is_transformed()):
        return Absorption(heads.contiguous(), key_weight, *rope).queries(all_queries(heads))
    nope, turning = heads.split([key_weight.shape[1], heads.shape[-1] - key_weight.shape[1]], dim=-1)
    return torch.cat([multiply_heads(nope, key_weight), rotated(turning, *rope)], dim=-1)
