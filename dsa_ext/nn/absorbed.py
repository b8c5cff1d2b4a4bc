"""Sparse attention of heads that are given without absorption: queries [B, S, H, nope + rope], before RoPE.

The attention kernels read queries of latent + rope columns, three times as many at the sizes of DeepSeek-V3.2. So
absorbed_attention makes these for some thousand queries at a time, forward and backward, and keeps none.

torch.compile decides itself what to keep, so it gets the plain formulas, and so do the transforms of torch.func.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import linear

from dsa_ext import functional
from dsa_ext.nn.heads import multiply, multiply_heads, weight_gradient
from dsa_ext.nn.indexer import IndexerTensors, scores_of_keys
from dsa_ext.nn.rotary import rotated, write_rotated
from dsa_ext.ops._library import as_autocast, is_transformed, not_differentiable_again

#: Most bytes of absorbed queries at a time; 7281 queries of 128 heads in bf16.
_BYTES = 2**30


class Absorbed(NamedTuple):
    out: Tensor  # values of the heads [B, S, H, v], or their projection [B, S, columns]
    lse: Tensor  # [B, S, H], without gradient
    distribution: Tensor | None  # attn_dist [B, S, K], without gradient
    loss: Tensor | None  # of `learner`, the mean over queries


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
    learner: IndexerTensors | None = None,
    deferred: bool = False,
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
        learner: tensors of an indexer that learns to predict these weights.
        deferred: whether the learner's loss is computed in the backward, which has the weights anyway, if attention and
            indexer both learn. Until then it is 0.
    """
    heads, kv, out_weight = (as_autocast(t) for t in (heads, kv, out_weight))
    if learner is not None:
        learner = IndexerTensors(as_autocast(learner.q), as_autocast(learner.k), learner.weights)
    weights = key_weight.to(heads.dtype), value_weight.to(heads.dtype)
    slots: dict[str, Any] = {"sm_scale": sm_scale, "deterministic": deterministic}
    if is_compiling() or is_transformed():
        q = absorbed_queries(heads, weights[0], rope)
        latent, lse = functional.sparse_mla(
            q, kv, ids, d_v=weights[1].shape[2], return_lse=True, starts=starts, ends=ends, **slots
        )
        p = loss = None
        if distribution or learner is not None:
            scaled: dict[str, Any] = {"sm_scale": sm_scale, "starts": starts, "ends": ends}
            p = functional.attn_dist(q.detach(), kv.detach(), ids, lse.detach(), **scaled)[:, :, 0]
        if learner is not None and p is not None:
            loss = _indexer_loss(learner, ids, p, deterministic, "mean")
        values = multiply_heads(latent, weights[1].mT)
        out = values if out_weight is None else linear(values.flatten(2), out_weight)
        return Absorbed(out, lse.detach(), p if distribution else None, loss)
    given = heads, *weights, kv, out_weight
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    defers = deferred and learner is not None and keep and any(t.requires_grad for t in learner)
    index = learner if defers else (None,) * 3
    asks = distribution or (learner is not None and not defers)
    out, lse, p, loss = _AbsorbedAttention.apply(*given, *index, ids, *rope, starts, ends, asks, keep, slots)  # type: ignore[no-untyped-call, misc]
    if learner is not None and not defers:
        loss = _indexer_loss(learner, ids, p, deterministic, "mean")
    return Absorbed(out, lse, p if distribution else None, loss)


class _Queries(NamedTuple):
    """Queries that are worked on together: of some whole sequences, or a part of one."""

    batch: slice
    rows: slice

    def of(self, tensor: Tensor) -> Tensor:
        """Their part of a tensor [B, S, ...]."""
        return tensor[self.batch, self.rows]

    def visible(self, starts: Tensor | None, ends: Tensor | None) -> dict[str, Any]:
        """What functional.sparse_mla needs to know which keys they see."""
        if starts is None and ends is None:
            return {"q_start": self.rows.start}
        bounds = {"starts": starts, "ends": ends}
        return {name: None if bound is None else self.of(bound) for name, bound in bounds.items()}


def _all_queries(heads: Tensor) -> _Queries:
    return _Queries(slice(0, heads.shape[0]), slice(0, heads.shape[1]))


def _parts(heads: Tensor, columns: int) -> Iterator[_Queries]:
    """All queries in parts of about equal size, whose absorbed form of so many columns has at most _BYTES."""
    batch, seq, n_heads = heads.shape[:3]
    most = max(1, _BYTES // (n_heads * columns * heads.element_size()))
    sequences = _divided(batch, max(1, most // max(1, seq)))
    for batch_part in sequences:
        for rows in _divided(seq, most):
            yield _Queries(batch_part, rows)


def _divided(length: int, most: int) -> list[slice]:
    """Slices of about equal size, of at most `most`; one if the length is 0."""
    size = -(-length // max(1, -(-length // most)))
    return [slice(begin, min(length, begin + size)) for begin in range(0, max(1, length), max(1, size))]


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
        index_q: Tensor | None,
        index_k: Tensor | None,
        index_weights: Tensor | None,
        ids: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        starts: Tensor | None,
        ends: Tensor | None,
        distribution: bool,
        keep: bool,
        slots: dict[str, Any],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
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
                values = _values([latent], value_weight).flatten(1)
                rows.of(out).flatten(0, 1).addmm_(values, out_weight.mT, beta=0)
            if distribution:
                ps.append(functional.attn_dist(q, keys, listed, lse, sm_scale=slots["sm_scale"], **visible)[:, :, 0])
            lses.append(lse)
            if keep:
                latents.append(latent)
            del q, latent
        index = index_q, index_k, index_weights
        ctx.save_for_backward(
            heads, key_weight, value_weight, kv, out_weight, *index, ids, cos, sin, starts, ends, *latents, *lses
        )
        ctx.interleaved, ctx.slots = interleaved, slots
        lse, p = _joined(lses, shape), _joined(ps, shape) if distribution else None
        ctx.mark_non_differentiable(*(t for t in (lse, p) if t is not None))
        ctx.set_materialize_grads(False)
        loss = None if index_weights is None else index_weights.new_zeros(())
        # The backward writes the value there.
        ctx.loss = None if loss is None else loss.detach()
        ctx.version = None if loss is None else loss._version
        return out, lse, p, loss

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # checkpointing gives them once
        dloss = others[-1]
        with torch.no_grad():
            gradients = _gradients(ctx, dout, dloss, saved)
        given = [t for t in (dout, dloss) if t is not None]
        gradients = not_differentiable_again("sparse_mla_bwd", gradients, *given, *saved)
        return *gradients, *(None,) * 9


def _gradients(
    ctx: Any, dout: Tensor | None, dloss: Tensor | None, saved: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """Of the heads, the weights of keys and of values, the keys, the weight of the output, and of an indexer that
    learns."""
    heads, key_weight, value_weight, kv, out_weight, *saved_index, ids, cos, sin, starts, ends = saved[:13]
    results = saved[13:]
    latents, lses = results[: len(results) // 2], results[len(results) // 2 :]  # of all parts
    absorption = _Absorption(heads, key_weight, cos, sin, ctx.interleaved)
    parts = list(_parts(heads, absorption.columns))
    dout_weight = None
    if ctx.needs_input_grad[4] and dout is not None:
        dout_weight = _out_weight_gradient(dout, parts, latents, value_weight, out_weight)
    attends = dout is not None and any(ctx.needs_input_grad[:4])
    learner = None
    if dloss is not None:
        if ctx.loss._version != ctx.version:
            raise RuntimeError(
                "SparseMLA: a deferred indexer_loss was changed in place before the backward computed it"
            )
        learner = _Learner(IndexerTensors(*saved_index), dloss, len(parts), ctx.slots["deterministic"])
    if not attends and learner is None:
        return *(None,) * 4, dout_weight, *(None,) * 3
    dheads = torch.empty_like(heads) if attends else None
    dkey_weight, dvalue_weight, dkv = (_Sum(t, len(parts)) for t in (key_weight, value_weight, kv))
    for rows, latent, lse in zip(parts, latents, lses, strict=True):
        listed, visible = rows.of(ids), rows.visible(starts, ends)
        if dheads is None:
            options = {"sm_scale": ctx.slots["sm_scale"], "per_head_block": True}
            dist = functional.attn_dist(absorption.queries(rows), kv[rows.batch], listed, lse, **visible, **options)
        else:
            assert dout is not None
            dvalues = rows.of(dout).flatten(0, 1)
            if out_weight is not None:
                dvalues = (dvalues @ out_weight).unflatten(1, (heads.shape[2], -1))
            dlatent = torch.empty_like(latent)
            multiply(dlatent.flatten(0, 1), dvalues, value_weight)
            if ctx.needs_input_grad[2]:
                dvalue_weight.add(weight_gradient(dvalues, latent.flatten(0, 1)))
            q = absorption.queries(rows)
            dq, dkeys, _, dist = torch.ops.dsa.sparse_mla_bwd(
                dlatent, q, kv[rows.batch], latent, lse, listed,
                d_v=value_weight.shape[2], return_dist=learner is not None, **visible, **ctx.slots,
            )  # fmt: skip
            del q, dlatent, dvalues
            dkv.add(dkeys, rows.batch)
            absorption.write_gradient(dheads, dq, rows)
            if ctx.needs_input_grad[1]:
                dkey_weight.add(absorption.weight_gradient(dq, rows))
            del dq, dkeys
        if learner is not None:
            learner.learn(rows, listed, dist.sum(0)[:, :, 0])
    of_attention = dheads, *(gradient.result() for gradient in (dkey_weight, dvalue_weight, dkv)), dout_weight
    if learner is None:
        return *of_attention, *(None,) * 3
    ctx.loss.data.copy_(learner.loss)  # which is no change of the version
    return *of_attention, *learner.gradients()


class _Learner:
    """The value and the gradients of an indexer's loss, from the attention's weights of one part of the queries after
    another."""

    def __init__(self, tensors: IndexerTensors, dloss: Tensor, parts: int, deterministic: bool) -> None:
        self.tensors, self.deterministic = tensors, deterministic
        self.queries = max(1, tensors.q.shape[:2].numel())
        self.factor = dloss / self.queries
        self.dq, self.dweights = torch.empty_like(tensors.q), torch.empty_like(tensors.weights)
        self.dk = _Sum(tensors.k, parts)
        self.loss = torch.zeros_like(dloss)

    def learn(self, rows: _Queries, ids: Tensor, p: Tensor) -> None:
        q, k, weights = self.tensors
        with torch.enable_grad():
            given = IndexerTensors(
                *(t.detach().requires_grad_() for t in (rows.of(q), k[rows.batch], rows.of(weights)))
            )
            loss = _indexer_loss(given, ids, p, self.deterministic, "sum")
        dq, dk, dweights = torch.autograd.grad(loss, given, self.factor)
        rows.of(self.dq).copy_(dq)
        rows.of(self.dweights).copy_(dweights)
        self.dk.add(dk, rows.batch)
        self.loss += loss.detach() / self.queries

    def gradients(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return self.dq, self.dk.result(), self.dweights


def _indexer_loss(
    tensors: IndexerTensors, ids: Tensor, p: Tensor, deterministic: bool, reduction: Literal["mean", "sum"]
) -> Tensor:
    return functional.indexer_loss(scores_of_keys(tensors, ids[:, :, 0], deterministic), p, reduction=reduction)


def _out_weight_gradient(
    dout: Tensor, parts: list[_Queries], latents: Sequence[Tensor], value_weight: Tensor, out_weight: Tensor
) -> Tensor | None:
    """Takes several parts of the queries together, as long as their values have at most _BYTES: the weight is large,
    and each part would cost an addition in fp32."""
    bytes_of_part = latents[0].nbytes // max(1, value_weight.shape[2]) * value_weight.shape[1]
    together = max(1, _BYTES // max(1, bytes_of_part))
    starts = range(0, len(parts), together)
    gradient = _Sum(out_weight, len(starts))
    for start in starts:
        some = slice(start, start + together)
        douts = [rows.of(dout).flatten(0, 1) for rows in parts[some]]
        values = _values(latents[some], value_weight).flatten(1)
        gradient.add((douts[0] if len(douts) == 1 else torch.cat(douts)).mT @ values)
    return gradient.result()


def _values(latents: Sequence[Tensor], value_weight: Tensor) -> Tensor:
    """The values of heads [tokens, H, v], of latents [B, S, H, latent] one after another."""
    tokens = [latent.shape[0] * latent.shape[1] for latent in latents]
    values = latents[0].new_empty(sum(tokens), *value_weight.shape[:2])
    for part, latent in zip(values.split(tokens), latents, strict=True):
        multiply(part, latent.flatten(0, 1), value_weight.mT)
    return values


class _Sum:
    """A gradient of the shape and dtype of `like` that is a sum, in fp32 if it has several parts; None of no parts."""

    def __init__(self, like: Tensor | None, parts: int) -> None:
        self.like, self.parts = like, parts
        self.sum: Tensor | None = None

    def add(self, part: Tensor, batch: slice = slice(None)) -> None:
        if self.parts == 1 or self.like is None:
            self.sum = part
            return
        if self.sum is None:
            self.sum = self.like.new_zeros(self.like.shape, dtype=torch.promote_types(self.like.dtype, torch.float32))
        self.sum[batch] += part

    def result(self) -> Tensor | None:
        return None if self.sum is None or self.like is None else self.sum.to(self.like.dtype)


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The parts of all queries as one tensor [B, S, ...]."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.flatten(0, 1) for part in parts]).view(*shape, *parts[0].shape[2:])
