"""Sparse attention of heads that are given without absorption: queries [B, S, H, nope + rope], before RoPE.

The attention kernels read queries of latent + rope columns, three times as many at the sizes of DeepSeek-V3.2. So
these are made for some thousand queries at a time, forward and backward, and are never kept.

torch.compile decides itself what to keep, so it gets the plain formulas, and so do the transforms of torch.func.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import linear

from dsa_ext import functional
from dsa_ext.nn.heads import multiply, multiply_heads, weight_gradient
from dsa_ext.nn.rotary import rotated, write_rotated
from dsa_ext.ops._library import is_transformed, not_differentiable_again

#: Most bytes of absorbed queries at a time; 7281 queries of 128 heads in bf16.
_BYTES = 2**30


class Absorbed(NamedTuple):
    out: Tensor  # values of the heads [B, S, H, v], or their projection [B, S, columns]
    lse: Tensor  # [B, S, H], without gradient
    distribution: Tensor | None  # attn_dist [B, S, K], without gradient


class Rope(NamedTuple):
    """rope_tables [1 or B, S, 1, rope / 2], and the layout of the columns that are rotated."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


def absorbed_queries(heads: Tensor, key_weight: Tensor, rope: Rope) -> Tensor:
    """Queries of the absorbed form, heads projected to the latent's columns: [B, S, H, latent + rope].

    Args:
        heads: [B, S, H, nope + rope].
        key_weight: [H, nope, latent], for the first `nope` columns of each head.
        rope: for the last `rope` columns.
    """
    key_weight = key_weight.to(heads.dtype)
    if not (torch.is_grad_enabled() or is_compiling() or is_transformed()):
        return _Absorption(heads.contiguous(), key_weight, *rope).queries(_all_queries(heads))
    nope, turning = heads.split([key_weight.shape[1], heads.shape[-1] - key_weight.shape[1]], dim=-1)
    return torch.cat([multiply_heads(nope, key_weight), rotated(turning, *rope)], dim=-1)


def absorbed_attention(
    heads: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    kv: Tensor,
    ids: Tensor,
    rope: Rope,
    *,
    sm_scale: float,
    out_weight: Tensor | None = None,
    deterministic: bool = False,
    distribution: bool = False,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
) -> Absorbed:
    """Attention of each head to listed keys, in the absorbed form.

    Args:
        heads: queries [B, S, H, nope + rope].
        key_weight: [H, nope, latent].
        value_weight: [H, v, latent].
        kv: keys [B, T, 1, latent + rope].
        ids: [B, S, 1, K].
        rope: for the queries.
        out_weight: projects the values of all heads [columns, H * v]. They are then not kept either.
        sm_scale, deterministic, starts, ends: see functional.sparse_mla. Causal without `starts` and `ends`.
        distribution: whether to return the attention weights too, summed over heads.
    """
    # Under autocast weights may be wider.
    weights = key_weight.to(heads.dtype), value_weight.to(heads.dtype)
    out_weight = None if out_weight is None else out_weight.to(heads.dtype)
    slots: dict[str, Any] = {"sm_scale": sm_scale, "deterministic": deterministic}
    if is_compiling() or is_transformed():
        q = absorbed_queries(heads, weights[0], rope)
        latent, lse = functional.sparse_mla(
            q, kv, ids, d_v=weights[1].shape[2], return_lse=True, starts=starts, ends=ends, **slots
        )
        p = None
        if distribution:
            scaled: dict[str, Any] = {"sm_scale": sm_scale, "starts": starts, "ends": ends}
            p = functional.attn_dist(q.detach(), kv.detach(), ids, lse.detach(), **scaled)[:, :, 0]
        values = multiply_heads(latent, weights[1].mT)
        out = values if out_weight is None else linear(values.flatten(2), out_weight)
        return Absorbed(out, lse.detach(), p)
    result = _AbsorbedAttention.apply(heads, *weights, kv, out_weight, ids, *rope, starts, ends, distribution, slots)  # type: ignore[no-untyped-call]
    return Absorbed(*result)


class _Queries(NamedTuple):
    """Queries that are worked on together: of all sequences, or a part of one."""

    batch: slice
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Their part of a tensor [B, S, ...]."""
        return tensor[self.batch, self.rows]

    def visible(self, starts: Tensor | None, ends: Tensor | None) -> dict[str, Any]:
        """What functional.sparse_mla needs to know which keys they see."""
        if starts is None or ends is None:
            return {"q_start": self.rows.start}
        return {"starts": self.of(starts), "ends": self.of(ends)}


def _all_queries(heads: Tensor) -> _Queries:
    return _Queries(slice(0, heads.shape[0]), slice(0, heads.shape[1]))


def _parts(heads: Tensor, columns: int) -> Iterator[_Queries]:
    """All queries, or equal parts of sequences whose absorbed form of so many columns has at most _BYTES."""
    batch, seq, n_heads = heads.shape[:3]
    most = max(1, _BYTES // (n_heads * columns * heads.element_size()))
    if batch * seq <= most:
        yield _all_queries(heads)
        return
    rows = -(-seq // -(-seq // most))
    for b in range(batch):
        for begin in range(0, seq, rows):
            yield _Queries(slice(b, b + 1), slice(begin, min(seq, begin + rows)))


class _Absorption:
    """Absorbs the queries of some rows, and returns gradients from there."""

    def __init__(self, heads: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
        self.heads, self.key_weight, self.cos, self.sin = heads, key_weight, cos, sin
        self.interleaved = interleaved
        _, self.nope, self.latent = key_weight.shape

    @property
    def columns(self) -> int:
        return self.latent + self.heads.shape[-1] - self.nope

    def queries(self, rows: _Queries) -> Tensor:
        heads = rows.of(self.heads)
        q = heads.new_empty(*heads.shape[:-1], self.columns)
        multiply(q.flatten(0, 1)[..., : self.latent], heads.flatten(0, 1)[..., : self.nope], self.key_weight)
        write_rotated(q[..., self.latent :], heads[..., self.nope :], *self._tables(rows), self.interleaved)
        return q

    def write_gradient(self, dheads: Tensor, dq: Tensor, rows: _Queries) -> None:
        """Writes the gradient of the heads of these rows to `dheads`."""
        out = rows.of(dheads)
        multiply(out.flatten(0, 1)[..., : self.nope], dq.flatten(0, 1)[..., : self.latent], self.key_weight.mT)
        cos, sin = self._tables(rows)
        write_rotated(out[..., self.nope :], dq[..., self.latent :], cos, -sin, interleaved_out=self.interleaved)

    def weight_gradient(self, dq: Tensor, rows: _Queries) -> Tensor:
        heads = rows.of(self.heads).flatten(0, 1)
        return weight_gradient(heads[..., : self.nope], dq.flatten(0, 1)[..., : self.latent])

    def _tables(self, rows: _Queries) -> tuple[Tensor, Tensor]:
        shape = *self.heads.shape[:2], 1, -1
        return rows.of(self.cos.expand(shape)), rows.of(self.sin.expand(shape))


class _AbsorbedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        kv: Tensor,
        out_weight: Tensor | None,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        starts: Tensor | None,
        ends: Tensor | None,
        distribution: bool,
        slots: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        heads = heads.contiguous()
        absorption = _Absorption(heads, key_weight, cos, sin, interleaved)
        shape = heads.shape[:2]
        columns = value_weight.shape[:2] if out_weight is None else out_weight.shape[:1]
        out = heads.new_empty(*shape, *columns)
        latents, lses, ps = [], [], []
        for rows in _parts(heads, absorption.columns):
            q, keys, listed = absorption.queries(rows), kv[rows.batch], rows.of(ids)
            visible = rows.visible(starts, ends)
            latent, lse = functional.sparse_mla(
                q, keys, listed, d_v=value_weight.shape[2], return_lse=True, **visible, **slots
            )
            if out_weight is None:
                multiply(rows.of(out).flatten(0, 1), latent.flatten(0, 1), value_weight.mT)
            else:
                values = _values(latent, value_weight)
                torch.mm(values.flatten(1), out_weight.mT, out=rows.of(out).flatten(0, 1))
            if distribution:
                ps.append(functional.attn_dist(q, keys, listed, lse, sm_scale=slots["sm_scale"], **visible)[:, :, 0])
            latents.append(latent)
            lses.append(lse)
        ctx.save_for_backward(
            heads, key_weight, value_weight, kv, out_weight, ids, cos, sin, starts, ends, *latents, *lses
        )
        ctx.interleaved, ctx.slots = interleaved, slots
        lse, p = _joined(lses, shape), _joined(ps, shape) if distribution else None
        ctx.mark_non_differentiable(*(t for t in (lse, p) if t is not None))
        return out, lse, p

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # checkpointing gives them once
        with torch.no_grad():
            gradients = _gradients(ctx, dout, *saved)
        gradients = not_differentiable_again("sparse_mla_bwd", gradients, dout, *saved)
        return *gradients, *(None,) * 8


def _gradients(
    ctx: Any,
    dout: Tensor,
    heads: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    kv: Tensor,
    out_weight: Tensor | None,
    ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    *results: Tensor,
) -> tuple[Tensor | None, ...]:
    """Of the heads, the weights of keys and of values, the keys, and the weight of the output.

    `results`: outputs in the latent of all parts, then their lse.
    """
    latents, lses = results[: len(results) // 2], results[len(results) // 2 :]
    absorption = _Absorption(heads, key_weight, cos, sin, ctx.interleaved)
    parts = list(_parts(heads, absorption.columns))
    dheads = torch.empty_like(heads)
    weights = key_weight, value_weight, kv, out_weight
    dkey_weight, dvalue_weight, dkv, dout_weight = (_Sum(t, len(parts)) for t in weights)
    for rows, latent, lse in zip(parts, latents, lses, strict=True):
        q, dvalues = absorption.queries(rows), rows.of(dout).flatten(0, 1)
        if out_weight is not None:
            if ctx.needs_input_grad[4]:
                dout_weight.add(dvalues.mT @ _values(latent, value_weight).flatten(1))
            dvalues = (dvalues @ out_weight).unflatten(1, (heads.shape[2], -1))
        dlatent = torch.empty_like(latent)
        multiply(dlatent.flatten(0, 1), dvalues, value_weight)
        if ctx.needs_input_grad[2]:
            dvalue_weight.add(weight_gradient(dvalues, latent.flatten(0, 1)))
        dq, dkeys, _ = torch.ops.dsa.sparse_mla_bwd(
            dlatent, q, kv[rows.batch], latent, lse, rows.of(ids),
            d_v=value_weight.shape[2], **rows.visible(starts, ends), **ctx.slots,
        )  # fmt: skip
        del q, dlatent
        dkv.add(dkeys, rows.batch)
        absorption.write_gradient(dheads, dq, rows)
        if ctx.needs_input_grad[1]:
            dkey_weight.add(absorption.weight_gradient(dq, rows))
    return dheads, *(gradient.result() for gradient in (dkey_weight, dvalue_weight, dkv, dout_weight))


def _values(latent: Tensor, value_weight: Tensor) -> Tensor:
    """The values of heads [tokens, H, v]."""
    values = latent.new_empty(latent.shape[0] * latent.shape[1], *value_weight.shape[:2])
    multiply(values, latent.flatten(0, 1), value_weight.mT)
    return values


class _Sum:
    """A gradient like `like` that is a sum, in fp32 if it has several parts; None of None, and if nothing is added."""

    def __init__(self, like: Tensor | None, parts: int) -> None:
        self.sum: Tensor | None = None
        if like is None:
            return
        self.dtype = like.dtype
        if parts > 1:
            self.sum = like.new_zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))

    def add(self, part: Tensor, batch: slice = slice(None)) -> None:
        if self.sum is None:
            self.sum = part
        else:
            self.sum[batch] += part

    def result(self) -> Tensor | None:
        return None if self.sum is None else self.sum.to(self.dtype)


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The parts of all queries as one tensor [B, S, ...]."""
    return parts[0] if len(parts) == 1 else torch.cat([part[0] for part in parts]).view(*shape, *parts[0].shape[2:])
