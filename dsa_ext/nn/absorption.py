"""Queries of the absorbed form, for some rows at a time: which rows, and how their heads are absorbed."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsa_ext.nn.dense import DenseAttention
from dsa_ext.nn.heads import multiply, weight_gradient
from dsa_ext.nn.rotary import write_rotated


class Rope(NamedTuple):
    """rope_tables [1 or B, S, 1, rope / 2], and the layout of the columns that are rotated."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class Queries(NamedTuple):
    """Queries that are worked on together: of some whole sequences, or a part of one."""

    batch: slice
    rows: slice
    dense: bool = False  # whether they list all keys up to their own

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


def parts_of(heads: Tensor, columns: int, dense_rows: int, most_bytes: int) -> Iterator[Queries]:
    """All queries in parts of about equal size, whose absorbed form of so many columns has at most so many bytes; the
    first `dense_rows` of sequences apart."""
    batch, seq, n_heads = heads.shape[:3]
    most = max(1, most_bytes // (n_heads * columns * heads.element_size()))
    whole = dense_rows in (0, seq)
    for sequences in divided(batch, max(1, most // max(1, seq)) if whole else 1):
        if dense_rows > 0:
            yield Queries(sequences, slice(0, dense_rows), dense=True)
        if dense_rows == 0 or not whole:
            for rows in divided(seq - dense_rows, most):
                yield Queries(sequences, slice(dense_rows + rows.start, dense_rows + rows.stop))


def divided(length: int, most: int) -> list[slice]:
    """Slices of about equal size, of at most `most`; one if the length is 0."""
    size = -(-length // max(1, -(-length // most)))
    return [slice(begin, min(length, begin + size)) for begin in range(0, max(1, length), max(1, size))]


class Absorption:
    """Absorbs the queries of some rows, and returns gradients from there."""

    def __init__(self, heads: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        self.heads, self.key_weight, self.cos, self.sin = heads, key_weight, cos, sin
        self.interleaved = interleaved
        _, self.nope, self.latent = key_weight.shape

    @property
    def columns(self) -> int:
        return self.latent + self.heads.shape[-1] - self.nope

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

    def dense(
        self, rows: Queries, value_weight: Tensor, kv: Tensor, sm_scale: float, *, differentiable: bool
    ) -> DenseAttention:
        """Attention of these rows, the first ones, to the keys of the same rows."""
        given = rows.of(self.heads), self.key_weight, value_weight, rows.of(kv), *self._tables(rows)
        return DenseAttention(*given, self.interleaved, sm_scale, differentiable=differentiable)

    def _tables(self, rows: Queries) -> tuple[Tensor, Tensor]:
        shape = *self.heads.shape[:2], 1, -1
        return rows.of(self.cos.expand(shape)), rows.of(self.sin.expand(shape))


def all_keys(heads: Tensor, kv: Tensor) -> Tensor:
    """Ids of all T keys for each query [B, S, 1, T], expanded from one row in memory. At least one slot: the operators
    take no empty rows."""
    (batch, seq), keys = heads.shape[:2], kv.shape[1]
    return torch.arange(max(1, keys), device=kv.device, dtype=torch.int32).expand(batch, seq, 1, -1)
