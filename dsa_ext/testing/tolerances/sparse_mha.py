"""Error bounds of attention of heads with keys and values of their own. See attention.py for the terms."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.reference import sparse_mha
from dsa_ext.testing.tolerances import attention
from dsa_ext.testing.tolerances.attention import Parts, scale_of, scores_of, softmax_of, wide_with_lse
from dsa_ext.testing.tolerances.attention_gradients import score_gradients, sums_gradient, usable_scale_of
from dsa_ext.testing.tolerances.limits import (
    FP32_RESOLUTION,
    FP32_SIMILARITY,
    SUM_OF_PRODUCTS,
    Expected,
    Rounded,
    overflows,
    wide,
)

_SEEN = ("causal", "q_start", "starts", "ends", "window")


def _slots(args: dict[str, Any]) -> Tensor:
    return sparse_mha.seen_slots(args["indices"], args["k"].shape[1], *(args[name] for name in _SEEN))


def _seen(args: dict[str, Any]) -> Tensor:
    return sparse_mha.seen_keys(_slots(args), args["k"].shape[1])


def _spoiled(args: dict[str, Any]) -> Tensor:
    """Whether keys or values have numbers that are not finite: they may reach all results of the head, and those of the
    columns that heads share. [B, H]."""
    finite = (args[name].isfinite().flatten(3).all(-1).all(1) for name in ("k", "v"))
    rope = args["k_rope"].isfinite().flatten(1).all(1)
    k, v = finite
    spoiled: Tensor = ~(k & v & rope[:, None])
    return spoiled


def sparse_mha_fwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    scale, seen = scale_of(args), _seen(args)
    out, lse = reference.sparse_mha_fwd(**args)
    parts, rounded = Parts.empty(out.shape, lse.shape, out), Rounded(out.device)
    q, k, k_rope, v = (args[name] for name in ("q", "k", "k_rope", "v"))
    for chunk in sparse_mha.masked_chunks(q, k, k_rope, v, seen):
        s = softmax_of(chunk.q, chunk.keys, chunk.visible, scale)
        attention.add_probabilities(rounded, s.p, chunk.values)
        chunk_parts = Parts.of(s, chunk.values, chunk.visible)
        parts.put((slice(None), chunk.queries), chunk_parts, lambda t: t.transpose(1, 2))
    lse_expected = attention.lse_of(lse, parts)
    parts.free = parts.free | _spoiled(args)[:, None]
    return [attention.output(out, parts, rounded), lse_expected]


def sparse_mha_bwd(args: dict[str, Any]) -> list[Expected]:
    args = wide_with_lse(args)
    q, k, k_rope, v, dout, out, lse, dlse = (
        args[name] for name in ("q", "k", "k_rope", "v", "dout", "out", "lse", "dlse")
    )
    scale, seen, nope = usable_scale_of(args), _seen(args), k.shape[3]
    dq, dk, dk_rope, dv = reference.sparse_mha_bwd(**args)
    delta, delta_noise = (dout * out).sum(-1), SUM_OF_PRODUCTS * (dout * out).abs().sum(-1)
    if dlse is not None:
        delta, delta_noise = delta - dlse, delta_noise + FP32_RESOLUTION * dlse.abs()

    kinds = ("noise", "squares", "made", "total")
    by_query = {kind: torch.zeros_like(dq) for kind in kinds}
    free = torch.zeros_like(lse, dtype=torch.bool)
    key_shape = (k.shape[0], k.shape[2], k.shape[1])
    by_key = {kind: q.new_zeros(*key_shape, q.shape[3]) for kind in kinds}
    by_value = {kind: q.new_zeros(*key_shape, v.shape[3]) for kind in kinds}
    key_free = torch.zeros(key_shape, dtype=torch.bool, device=q.device)
    # dS is made of rounded probabilities, and rounded: whichever has fewer distinct numbers counts.
    rounded = {name: Rounded(q.device) for name in ("dq", "dk", "dv", "p of dq", "p of dk")}
    for chunk in sparse_mha.masked_chunks(q, k, k_rope, v, seen):
        run, do, row_lse = (slice(None), chunk.queries), chunk.rows(dout), chunk.rows(lse)
        s = scores_of(chunk.q, chunk.keys, chunk.visible, scale)
        rows = chunk.rows(delta), chunk.rows(delta_noise), row_lse
        g = score_gradients(s, chunk.values, do, torch.zeros_like(do), *rows, scale, True)
        keys, queries, doa = chunk.keys.abs(), chunk.q.abs(), do.abs()
        query_squares = g.ds.square() * keys.square().sum(-1)[..., None, :]
        key_squares = g.ds.square() * queries.square().sum(-1, keepdim=True)
        for made_of, numbers in (("", g.ds), ("p of ", g.p)):
            rounded[f"{made_of}dq"].add(numbers, query_squares)
            rounded[f"{made_of}dk"].add(numbers, key_squares)
        rounded["dv"].add(g.p, g.p.square() * doa.square().sum(-1, keepdim=True))
        for kind, ds, p, (a, b, c) in (
            ("noise", g.ds_noise, g.p_noise, (keys, queries, doa)),
            ("squares", g.ds.square(), g.p.square(), (keys.square(), queries.square(), doa.square())),
            ("made", g.ds_made, g.p_made, (chunk.keys, chunk.q, do)),
            ("total", g.ds.abs(), g.p, (keys, queries, doa)),
        ):
            by_query[kind][run] = (ds @ a).transpose(1, 2)
            by_key[kind] += ds.mT @ b
            by_value[kind] += p.mT @ c
        free[run] = g.free.transpose(1, 2)
        unsure = g.free | ((row_lse == -torch.inf) & chunk.visible.any(-1))
        key_free |= (unsure[..., None] & chunk.visible).any(2)
    spoiled = _spoiled(args)
    # A query that is not finite, or has such a gradient, may reach all keys of its head.
    bad_rows = ~(q.isfinite().all(-1) & dout.isfinite().all(-1) & delta.isfinite()) & seen.any(2)[..., None]
    key_free |= (spoiled | bad_rows.any(1))[..., None]
    free |= spoiled[:, None]

    def of_keys(sums: dict[str, Tensor], columns: slice) -> list[Tensor]:
        return [sums[kind][..., columns].transpose(1, 2) for kind in kinds]

    def of_shared_columns(sums: dict[str, Tensor]) -> list[Tensor]:
        return [sums[kind][..., nope:].sum(1) for kind in kinds]

    freed = key_free.transpose(1, 2)[..., None]
    of_dq, of_dk = (min(rounded[name], rounded[f"p of {name}"], key=lambda r: r.count) for name in ("dq", "dk"))
    return [
        sums_gradient("dq", dq, list(by_query.values()), free[..., None], scale, of_dq),
        sums_gradient("dk", dk, of_keys(by_key, slice(0, nope)), freed, scale, of_dk),
        sums_gradient("dk_rope", dk_rope, of_shared_columns(by_key), freed.any(2), scale, of_dk),
        sums_gradient("dv", dv, of_keys(by_value, slice(None)), freed, scale, rounded["dv"]),
    ]


def sparse_mha_dist(args: dict[str, Any]) -> list[Expected]:
    args = wide_with_lse(args)
    q, k, k_rope, lse = (args[name] for name in ("q", "k", "k_rope", "lse"))
    scale, slots = scale_of(args), _slots(args)
    value = reference.sparse_mha_dist(**args)
    noise, free = torch.zeros_like(value), torch.zeros_like(value, dtype=torch.bool)
    for chunk in sparse_mha.masked_chunks(q, k, k_rope, None, _seen(args)):
        s = scores_of(chunk.q, chunk.keys, chunk.visible, scale)
        p, off, over = attention.weights_of(s, chunk.rows(lse)[..., None])
        own = slots[:, chunk.queries]
        noise[:, chunk.queries] = sparse_mha.of_slots(off.sum(1), own)
        over = (over | overflows(p.sum(1, keepdim=True))).any(1)
        free[:, chunk.queries] = sparse_mha.of_slots(over.double(), own) > 0
    return [Expected("dist", value, bound=noise, noise=noise, similarity=FP32_SIMILARITY, free=free)]
