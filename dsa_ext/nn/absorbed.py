"""Sparse attention of heads that are given without absorption: queries [B, S, H, nope + rope], before RoPE.

The attention kernels read queries of latent + rope columns, three times as many at the sizes of DeepSeek-V3.2. So
absorbed_attention makes these for some thousand queries at a time, forward and backward, and keeps none.

The first queries of a sequence see at most a few times as many keys as they select. For them ExpandedAttention takes
less time.

torch.compile and the transforms of torch.func get the formulas of plain.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import linear

from dsa_ext import functional
from dsa_ext.nn.absorption import Absorption, Queries, Rope, parts_of
from dsa_ext.nn.expanded import NONE, Attended, Expanded, fits
from dsa_ext.nn.heads import multiply, weight_gradient
from dsa_ext.nn.indexer import IndexerTensors, loss_of_keys
from dsa_ext.nn.plain import plain_attention
from dsa_ext.ops._library import (
    as_autocast,
    is_transformed,
    not_differentiable_again,
    refuse_batched_gradients,
    without_autocast,
)

#: Most bytes of absorbed queries at a time; 7281 queries of 128 heads in bf16.
_BYTES = 2**30


class Absorbed(NamedTuple):
    out: Tensor  # values of the heads [B, S, H, v], or their projection [B, S, columns]
    lse: Tensor | None  # [B, S, H], without gradient; None with expanded queries
    distribution: Tensor | None  # attn_dist [B, S, K], without gradient
    loss: Tensor | None  # of `learner`, the mean over queries


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
    expanded: Expanded = NONE,
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
        expanded: queries whose attention is that of ExpandedAttention, unless gradients have to be deterministic. Where
            sparse_mha does not take the columns, weights are those of the absorbed form; with a deferred loss and in
            compiled calls everything is.
    """
    heads, kv, out_weight = (as_autocast(t) for t in (heads, kv, out_weight))
    if learner is not None:
        learner = IndexerTensors(as_autocast(learner.q), as_autocast(learner.k), learner.weights)
    weights = key_weight.to(heads.dtype), value_weight.to(heads.dtype)
    slots: dict[str, Any] = {"sm_scale": sm_scale, "deterministic": deterministic}
    weighs = fits(key_weight.shape[1], heads.shape[-1] - key_weight.shape[1], value_weight.shape[1])
    if deterministic or torch.are_deterministic_algorithms_enabled():
        expanded = NONE
    asks = distribution or learner is not None
    if is_compiling() or is_transformed():
        if is_transformed() or not weighs:
            expanded = NONE
        values, lse, p = plain_attention(heads, *weights, kv, ids, rope, starts, ends, expanded, asks, slots)
        out = values if out_weight is None else linear(values.flatten(2), out_weight)
        loss = None
        if learner is not None and p is not None:
            loss = loss_of_keys(learner, ids[:, :, 0], p, deterministic=deterministic)
        return Absorbed(out, lse, p if distribution else None, loss)
    given = heads, *weights, kv, out_weight
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    defers = deferred and learner is not None and keep and any(t.requires_grad for t in learner)
    index = learner if defers else (None,) * 3
    if defers:
        asks = distribution
        expanded = expanded if weighs else NONE
    out, lse, p, loss = _AbsorbedAttention.apply(*given, *index, ids, *rope, starts, ends, expanded, asks, keep, slots)  # type: ignore[no-untyped-call, misc]
    if learner is not None and not defers:
        loss = loss_of_keys(learner, ids[:, :, 0], p, deterministic=deterministic)
    return Absorbed(out, lse, p if distribution else None, loss)


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
        expanded: Expanded,
        distribution: bool,
        keep: bool,
        slots: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        heads = heads.contiguous()
        absorption = Absorption(heads, key_weight, cos, sin, interleaved)
        shape = heads.shape[:2]
        columns = value_weight.shape[:2] if out_weight is None else out_weight.shape[:1]
        out = heads.new_empty(*shape, *columns)
        latents, lses, ps = [], [], []
        attended: list[Attended] = []  # of parts in the expanded form
        # Where sparse_mha does not take the columns, weights are those of the absorbed form.
        weighs = fits(*absorption.head_columns, value_weight.shape[1])
        for part in parts_of(heads, absorption.columns, expanded, _BYTES):
            rows = part if weighs or not distribution else part._replace(keys=None)
            if rows.expanded:
                attention = absorption.expanded(rows, value_weight, kv, ids, slots["sm_scale"])
                attended.append(attention.attend())
                result = attended[-1].values
                if distribution:
                    ps.append(attention.distribution(attended[-1]))
                del attention
            else:
                q, keys, listed = absorption.queries(rows), kv[rows.batch], rows.of(ids)
                visible = rows.visible(starts, ends)
                result, lse = functional.sparse_mla(
                    q, keys, listed, d_v=value_weight.shape[2], return_lse=True, **visible, **slots
                )
                if distribution:
                    p = functional.attn_dist(q, keys, listed, lse, sm_scale=slots["sm_scale"], **visible)
                    ps.append(p[:, :, 0])
                del q
            to = rows.of(out).flatten(0, 1)
            if out_weight is None:
                _write_values(to, rows, result, value_weight)
            else:
                to.addmm_(_values([rows], [result], value_weight).flatten(1), out_weight.mT, beta=0)
            if not part.expanded:
                lses.append(lse)
                if keep:
                    latents.append(result)
            del result
        index = index_q, index_k, index_weights
        # All values, then the lse of all, which the parts of scaled_dot_product_attention do not have.
        known = [t for field in zip(*attended, strict=True) for t in field if t is not None] if keep else []
        given = heads, key_weight, value_weight, kv, out_weight, *index, ids, cos, sin, starts, ends
        ctx.save_for_backward(*given, *latents, *lses, *known)
        ctx.interleaved, ctx.expanded, ctx.known, ctx.slots = interleaved, expanded, len(known), slots
        of_all = _joined(lses, shape) if expanded.rows == 0 else None, _joined(ps, shape) if distribution else None
        ctx.mark_non_differentiable(*(t for t in of_all if t is not None))
        ctx.set_materialize_grads(False)
        loss = None if index_weights is None else index_weights.new_zeros(())
        # The backward writes the value there.
        ctx.loss = None if loss is None else loss.detach()
        ctx.version = None if loss is None else loss._version
        return out, *of_all, loss

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # checkpointing gives them once
        dloss = others[-1]
        refuse_batched_gradients("SparseMLA", dout, dloss)
        with torch.no_grad(), without_autocast(saved[0]):
            gradients = _gradients(ctx, dout, dloss, saved)
        given = [t for t in (dout, dloss) if t is not None]
        gradients = not_differentiable_again("sparse_mla_bwd", gradients, *given, *saved)
        return *gradients, *(None,) * 10


def _gradients(
    ctx: Any, dout: Tensor | None, dloss: Tensor | None, saved: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """Of the heads, the weights of keys and of values, the keys, the weight of the output, and of an indexer that
    learns."""
    heads, key_weight, value_weight, kv, out_weight, *saved_index, ids, cos, sin, starts, ends = saved[:13]
    results, attended = saved[13 : len(saved) - ctx.known], saved[len(saved) - ctx.known :]
    latents, lses = results[: len(results) // 2], results[len(results) // 2 :]
    absorption = Absorption(heads, key_weight, cos, sin, ctx.interleaved)
    parts = list(parts_of(heads, absorption.columns, ctx.expanded, _BYTES))
    expanded, others = [rows for rows in parts if rows.expanded], [rows for rows in parts if not rows.expanded]
    attends = dout is not None and any(ctx.needs_input_grad[:4])
    learner = None
    if dloss is not None:
        if ctx.loss._version != ctx.version:
            raise RuntimeError(
                "SparseMLA: a deferred indexer_loss was changed in place before the backward computed it"
            )
        learner = _Learner(IndexerTensors(*saved_index), dloss, len(parts), ctx.slots["deterministic"])
    is_one_expanded = len(parts) == 1 and bool(expanded)  # its gradient of the heads is that of all
    dheads = torch.empty_like(heads) if attends and not is_one_expanded else None
    dkey_weight, dvalue_weight, dkv = (_Sum(t, len(parts)) for t in (key_weight, value_weight, kv))

    def dvalues_of(rows: Queries) -> Tensor:
        assert dout is not None
        dvalues = rows.of(dout).flatten(0, 1)
        return dvalues if out_weight is None else (dvalues @ out_weight).unflatten(1, (heads.shape[2], -1))

    values = []
    for i, rows in enumerate(expanded):
        known = attended[i :: len(expanded)]
        if known and not attends and learner is None:
            values.append(known[0])
            continue
        attention = absorption.expanded(rows, value_weight, kv, ids, ctx.slots["sm_scale"])
        result = Attended(*known) if known else attention.attend()
        values.append(result.values)
        if attends:
            gradients = attention.gradients(dvalues_of(rows), result)
            if dheads is None:
                dheads = gradients.take_heads()
            else:
                gradients.write_heads(rows.of(dheads))
            assert rows.keys is not None
            dkv.add(gradients.keys(), (rows.batch, rows.keys))
            if ctx.needs_input_grad[1]:
                dkey_weight.add(gradients.key_weight())
            if ctx.needs_input_grad[2]:
                dvalue_weight.add(gradients.value_weight())
            del gradients
        if learner is not None:
            learner.learn(rows, rows.of(ids), attention.distribution(result))
        del attention
    dout_weight = None
    if ctx.needs_input_grad[4] and dout is not None:
        dout_weight = _out_weight_gradient(dout, [*expanded, *others], [*values, *latents], value_weight, out_weight)
    del values
    if not attends and learner is None:
        return *(None,) * 4, dout_weight, *(None,) * 3
    for rows, latent, lse in zip(others, latents, lses, strict=True):
        listed, visible = rows.of(ids), rows.visible(starts, ends)
        if dheads is None:
            options = {"sm_scale": ctx.slots["sm_scale"], "per_head_block": True}
            dist = functional.attn_dist(absorption.queries(rows), kv[rows.batch], listed, lse, **visible, **options)
        else:
            dvalues = dvalues_of(rows)
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
            learner.learn(rows, listed, (dist[0] if len(dist) == 1 else dist.sum(0))[:, :, 0])
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

    def learn(self, rows: Queries, ids: Tensor, p: Tensor) -> None:
        q, k, weights = self.tensors
        with torch.enable_grad():
            given = IndexerTensors(
                *(t.detach().requires_grad_() for t in (rows.of(q), k[rows.batch], rows.of(weights)))
            )
            loss = loss_of_keys(given, ids[:, :, 0], p, reduction="sum", deterministic=self.deterministic)
        dq, dk, dweights = torch.autograd.grad(loss, given, self.factor)
        rows.of(self.dq).copy_(dq)
        rows.of(self.dweights).copy_(dweights)
        self.dk.add(dk, rows.batch)
        self.loss += loss.detach() / self.queries

    def gradients(self) -> tuple[Tensor, Tensor | None, Tensor]:
        return self.dq, self.dk.result(), self.dweights


def _out_weight_gradient(
    dout: Tensor, parts: list[Queries], results: Sequence[Tensor], value_weight: Tensor, out_weight: Tensor
) -> Tensor | None:
    """From the values of expanded parts and the latents of others. Takes several parts of the queries together, as long
    as their values have about _BYTES at most: the weight is large, and each part would cost an addition in fp32."""
    bytes_of_values = dout.shape[0] * dout.shape[1] * out_weight.shape[1] * out_weight.element_size()
    together = max(1, _BYTES * len(parts) // max(1, bytes_of_values))
    starts = range(0, len(parts), together)
    gradient = _Sum(out_weight, len(starts))
    for start in starts:
        some = slice(start, start + together)
        douts = [rows.of(dout).flatten(0, 1) for rows in parts[some]]
        values = _values(parts[some], results[some], value_weight).flatten(1)
        gradient.add((douts[0] if len(douts) == 1 else torch.cat(douts)).mT @ values)
    return gradient.result()


def _values(parts: list[Queries], results: Sequence[Tensor], value_weight: Tensor) -> Tensor:
    """The values of heads [tokens, H, v] of the parts one after another, from values of expanded parts [B, S, H, v] and
    latents of others [B, S, H, latent]. May be a view of a result."""
    if len(parts) == 1 and parts[0].expanded:
        return results[0].flatten(0, 1)
    tokens = [result.shape[0] * result.shape[1] for result in results]
    values = results[0].new_empty(sum(tokens), *value_weight.shape[:2])
    for rows, out, result in zip(parts, values.split(tokens), results, strict=True):
        _write_values(out, rows, result, value_weight)
    return values


def _write_values(out: Tensor, rows: Queries, result: Tensor, value_weight: Tensor) -> None:
    """Writes the values of one part."""
    if rows.expanded:
        out.copy_(result.flatten(0, 1))
    else:
        multiply(out, result.flatten(0, 1), value_weight.mT)


class _Sum:
    """A gradient of the shape and dtype of `like` that is a sum, in fp32 if it has several parts; None of no parts."""

    def __init__(self, like: Tensor | None, parts: int) -> None:
        self.like, self.parts = like, parts
        self.sum: Tensor | None = None

    def add(self, part: Tensor, where: slice | tuple[slice, slice] = slice(None)) -> None:
        if self.like is None or (self.parts == 1 and part.shape == self.like.shape):
            self.sum = part
            return
        if self.sum is None:
            self.sum = self.like.new_zeros(self.like.shape, dtype=torch.promote_types(self.like.dtype, torch.float32))
        self.sum[where] += part

    def result(self) -> Tensor | None:
        return None if self.sum is None or self.like is None else self.sum.to(self.like.dtype)


def _joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The parts of all queries as one tensor [B, S, ...]."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.flatten(0, 1) for part in parts]).view(*shape, *parts[0].shape[2:])
