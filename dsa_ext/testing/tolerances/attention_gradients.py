"""Error bounds of the gradients of attention. See attention.py for those of scores and probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.reference import block_sparse, numerics, sparse_mla
from dsa_ext.testing.tolerances.attention import (
    Scores,
    attn_dist,
    scale_of,
    scores_of,
    spread,
    visible_slots,
    wide_with_lse,
)
from dsa_ext.testing.tolerances.limits import (
    FP32_RESOLUTION,
    HUGE,
    SIMILARITY,
    SUM_OF_PRODUCTS,
    TINY,
    Expected,
    Rounded,
    gradient,
    overflows,
    rounding_error,
)


@dataclass
class ScoreGradients:
    """P and dS [.., n, K] and the bounds of their errors, given each row's dout, lse and delta (subtracted from dP)."""

    p: Tensor
    p_noise: Tensor
    p_made: Tensor  # what the rounding of p to bf16 adds to it
    ds: Tensor
    ds_noise: Tensor
    ds_made: Tensor
    free: Tensor  # [.., n]


def score_gradients(
    s: Scores, values: Tensor, dout: Tensor, dout_noise: Tensor, delta: Tensor, delta_noise: Tensor, lse: Tensor,
    scale: float, scale_comes_last: bool,
) -> ScoreGradients:  # fmt: skip
    """`scale_comes_last`: the scale is multiplied after dS has been rounded to bf16."""
    lse, delta, delta_noise = (t[..., None] for t in (lse, delta, delta_noise))
    log_p = s.scores - lse.masked_fill(lse == -torch.inf, 0)
    log_p = log_p.masked_fill(lse == -torch.inf, -torch.inf)
    p = log_p.exp()
    p_noise = spread(log_p, s.noise + 2 * FP32_RESOLUTION * lse.abs().nan_to_num(0, 0, 0)) + TINY * (p > 0)
    # A large lse includes a margin, with which no p is much more than sqrt(2).
    p_noise = torch.where((lse.abs() > numerics.LARGE_LSE) & (p <= 1), p_noise.clamp(max=2), p_noise)
    dp, products = dout @ values.mT, dout.abs() @ values.abs().mT
    change = dp - delta
    weights = p + p_noise
    noise = (
        weights * (SUM_OF_PRODUCTS * products + dout_noise @ values.abs().nan_to_num(0, 0, 0).mT + delta_noise)
        + p_noise * change.abs()
    )
    # The gradient is exactly 0 where the probability is exactly 0.
    ds, noise = (torch.where(log_p == -torch.inf, 0, t) for t in (p * change, noise))
    over = overflows(products, delta, ds, ds * scale, weights * products) | (log_p.isfinite() & ~(weights <= HUGE))
    visible = s.scores > -torch.inf
    free = s.free | (over & (visible | s.scores.isnan())).any(-1)
    noise = abs(scale) * (noise + TINY * (p > 0)) + TINY * (p > 0)
    ds_made = rounding_error(ds) * scale if scale_comes_last else rounding_error(ds * scale)
    return ScoreGradients(p, p_noise, rounding_error(p), ds * scale, noise, ds_made, free)


def sums_gradient(
    name: str,
    value: Tensor,
    sums: Sequence[Tensor],
    free: Tensor,
    scale: float,
    rounded: Rounded,
    row_squares: Tensor | float = 0.0,
) -> Expected:
    """The expected gradient. `sums` are the sums of the terms' noise, of their squares, of what rounding adds to them,
    and of their magnitudes. All include the scale, which the kernels multiply last."""
    noise, squares, made, total = sums
    over = overflows(total, total / min(1.0, max(abs(scale), 1e-300)))
    return gradient(
        name, value, noise + SUM_OF_PRODUCTS * total, squares, made, free | over, rounded.count, row_squares
    )


def usable_scale_of(args: dict[str, Any]) -> float:
    """The scale. 0 is replaced by a negligible number, by which sums can be divided to see if they overflow before."""
    return scale_of(args) or 1e-300


def _expected_dist(args: dict[str, Any], returned: bool) -> Expected:
    """The weights that sparse_mla_bwd returns: like those of attn_dist, of terms that may be rounded to bf16."""
    if not returned:
        nothing = args["q"].new_empty(0, dtype=torch.float64)
        return Expected("dist", nothing, nothing, nothing, None)
    others = {"dout", "out", "dlse", "attn_sink", "d_v", "deterministic"}
    kept = {name: value for name, value in args.items() if name not in others}
    (p,) = attn_dist({**kept, "normalize": False, "per_head_block": True})
    return replace(p, name="dist", bound=p.bound + p.value.abs() * 2.0**-8, similarity=SIMILARITY, roundings=1)


def sparse_mla_bwd(args: dict[str, Any]) -> list[Expected]:
    args = dict(args)
    dist = _expected_dist(args, args.pop("return_dist"))
    args = wide_with_lse(args)
    rows_are_rounded = args.pop("deterministic")
    d_v = args.pop("d_v")
    q, kv, indices, dout, out, lse = (args[name] for name in ("q", "kv", "indices", "dout", "out", "lse"))
    sink, dlse, scale, visible = args["attn_sink"], args["dlse"], usable_scale_of(args), visible_slots(args)
    dq, dkv, d_sink, _ = reference.sparse_mla_bwd(**args)

    share = sparse_mla.share_after_sink(lse, sink)
    share_noise = share * (1 - share) * FP32_RESOLUTION * (16 + 4 * lse.abs().nan_to_num(0, 0, 0))
    products, delta = (dout * out).abs().sum(-1), (dout * out).sum(-1)
    # fp32 rounds small shares to 0.
    vanishing = 0.0 if sink is None else TINY
    delta_noise = share * SUM_OF_PRODUCTS * products + (share_noise + vanishing) * delta.abs()
    delta_of_scores = share * delta
    if dlse is not None:
        delta_of_scores = delta_of_scores - dlse
        delta_noise = delta_noise + FP32_RESOLUTION * dlse.abs()
    upstream, upstream_noise = share[..., None] * dout, vanishing * dout.abs().nan_to_num(0, 0, 0)

    dq_noise, dq_squares, dq_made, dq_total = (torch.zeros_like(dq) for _ in range(4))
    free = torch.zeros_like(lse, dtype=torch.bool)
    rounded = {name: Rounded(q.device) for name in ("dq", "dkv")}
    batch, s_kv, groups, dim = kv.shape
    keys_of = (batch * (s_kv + 1) * groups, dim)
    dkv_noise, dkv_squares, dkv_made, dkv_total, dkv_rows, dkv_free, dkv_terms = (
        q.new_zeros(keys_of) for _ in range(7)
    )
    for chunk in sparse_mla.query_chunks(q, kv, indices, visible):
        run, heads_of = chunk.queries, chunk.q.shape[2:4]
        do, do_noise, delta_c, noise_c, lse_c = (
            t[:, run].unflatten(2, heads_of) for t in (upstream, upstream_noise, delta_of_scores, delta_noise, lse)
        )
        s = scores_of(chunk.q, chunk.keys, chunk.visible, scale)
        g = score_gradients(s, chunk.keys[..., :d_v], do, do_noise, delta_c, noise_c, lse_c, scale, False)
        keys, queries, doa = chunk.keys.abs(), chunk.q.abs(), do.abs()
        dq_noise[:, run] = (g.ds_noise @ keys).flatten(2, 3)
        dq_squares[:, run] = (g.ds.square() @ keys.square()).flatten(2, 3)
        dq_made[:, run] = (g.ds_made @ chunk.keys).flatten(2, 3)
        dq_total[:, run] = (g.ds.abs() @ keys).flatten(2, 3)
        rounded["dq"].add(g.ds, g.ds.square() * keys.square().sum(-1)[..., None, :])
        rounded["dkv"].add(g.ds, g.ds.square() * queries.square().sum(-1, keepdim=True))
        rounded["dkv"].add(g.p, g.p.square() * doa.square().sum(-1, keepdim=True))
        free[:, run] = g.free.flatten(2, 3)
        rows = chunk.rows.flatten()

        def onto_keys(
            total: Tensor, score_terms: Tensor, p_terms: Tensor, queries: Tensor, do: Tensor, power: int = 1
        ) -> None:
            part = score_terms.mT @ queries
            part[..., :d_v] += p_terms.mT @ do
            part **= power
            total.index_add_(0, rows, part.flatten(0, 3))  # noqa: B023

        onto_keys(dkv_noise, g.ds_noise, g.p_noise, queries, doa)
        onto_keys(dkv_noise, torch.zeros_like(g.p), (g.p > 0).double(), queries, do_noise)
        onto_keys(dkv_squares, g.ds.square(), g.p.square(), queries.square(), doa.square())
        onto_keys(dkv_made, g.ds_made, g.p_made, chunk.q, do)
        onto_keys(dkv_total, g.ds.abs(), g.p, queries, doa)
        if rows_are_rounded:
            onto_keys(dkv_rows, g.ds, g.p, chunk.q, do, power=2)
        terms = chunk.visible[..., 0, :].double() * chunk.q.shape[3]
        dkv_terms.index_add_(0, rows, terms.flatten()[:, None].expand(-1, dim))
        # A row that has visible keys but no finite score may be treated as empty or not.
        unsure = g.free | ((lse_c == -torch.inf) & chunk.visible.any(-1))
        dkv_free.index_add_(
            0, rows, (unsure.any(-1)[..., None] & chunk.visible[..., 0, :]).double().flatten()[:, None].expand(-1, dim)
        )

    def by_key(t: Tensor) -> Tensor:
        return t.view(batch, s_kv + 1, groups, dim)[:, :s_kv]

    dkv_noise, dkv_squares, dkv_made, dkv_total, dkv_rows, dkv_free, dkv_terms = map(
        by_key, (dkv_noise, dkv_squares, dkv_made, dkv_total, dkv_rows, dkv_free, dkv_terms)
    )
    # Sums that are accumulated in memory may flush subnormal numbers to 0 at each term.
    dkv_noise = dkv_noise + TINY * dkv_terms
    expected = [
        sums_gradient("dq", dq, (dq_noise, dq_squares, dq_made, dq_total), free[..., None], scale, rounded["dq"]),
        sums_gradient(
            "dkv", dkv, (dkv_noise, dkv_squares, dkv_made, dkv_total), dkv_free > 0, scale, rounded["dkv"], dkv_rows
        ),
    ]
    if sink is None:
        return [*expected, Expected("d_sink", d_sink, d_sink, d_sink, None), dist]
    # 1 - share has the rounding error of share.
    noise = ((1 - share) * SUM_OF_PRODUCTS * products + (share_noise + FP32_RESOLUTION) * delta.abs()).sum((0, 1))
    total = ((1 - share) * products).sum((0, 1))
    noise = noise + SUM_OF_PRODUCTS * total
    nothing = torch.zeros_like(noise)
    return [*expected, gradient("d_sink", d_sink, noise, nothing, nothing, overflows(total)), dist]


def block_sparse_attn_bwd(args: dict[str, Any]) -> list[Expected]:
    args = wide_with_lse(args)
    q, k, v, dout, out, lse = (args[name] for name in ("q", "k", "v", "dout", "out", "lse"))
    dlse, scale = args["dlse"], usable_scale_of(args)
    count, kv_blocks, block = block_sparse.blocks(q.shape[2]), block_sparse.blocks(k.shape[2]), block_sparse.BLOCK
    dq, dk, dv = reference.block_sparse_attn_bwd(**args)

    seen = lse != -torch.inf
    delta = (dout * out).sum(-1)
    delta_noise = SUM_OF_PRODUCTS * (dout * out).abs().sum(-1)
    if dlse is not None:
        delta, delta_noise = delta - dlse, delta_noise + FP32_RESOLUTION * dlse.abs()

    def rows_of(t: Tensor) -> Tensor:
        """[B, H, Nq] as [B, H, Mq, 64], with 0 for rows that see no key."""
        cut: Tensor = block_sparse.cut(t.where(seen, 0)[..., None], count)[..., 0]
        return cut

    takes_part = rows_of(torch.ones_like(lse)) > 0
    empty = block_sparse.cut((~seen).double()[..., None], count)[..., 0] > 0
    delta, delta_noise = rows_of(delta), rows_of(delta_noise)
    row_lse = rows_of(lse).masked_fill(~takes_part, -torch.inf)
    upstream = block_sparse.cut(dout.where(seen[..., None], 0), count)

    q_shape, k_shape = (*q.shape[:2], count, block, q.shape[3]), (*k.shape[:2], kv_blocks + 1, block, k.shape[3])
    dq_noise, dq_squares, dq_made, dq_total = (q.new_zeros(q_shape) for _ in range(4))
    kinds = ("noise", "squares", "made", "total")
    sums = {name: q.new_zeros(k_shape) for name in ("free", *(f"{g} {kind}" for g in ("dk", "dv") for kind in kinds))}
    free = torch.zeros(q_shape[:-1], dtype=torch.bool, device=q.device)
    rounded = {name: Rounded(q.device) for name in ("dq", "dk", "dv")}
    lists = (args[name] for name in ("q2k_index", "q2k_num", "kv_block_size"))
    for chunk in block_sparse.block_chunks(q, k, v, *lists):
        run = (slice(None), slice(None), chunk.queries)
        do = upstream[run]
        s = scores_of(chunk.q, chunk.keys, chunk.visible, scale)
        g = score_gradients(
            s, chunk.values, do, torch.zeros_like(do), delta[run], delta_noise[run], row_lse[run], scale, True
        )
        keys, queries, doa = chunk.keys.abs(), chunk.q.abs(), do.abs()
        dq_noise[run], dq_total[run] = g.ds_noise @ keys, g.ds.abs() @ keys
        dq_squares[run], dq_made[run] = g.ds.square() @ keys.square(), g.ds_made @ chunk.keys
        rounded["dq"].add(g.ds, g.ds.square() * keys.square().sum(-1)[..., None, :])
        rounded["dk"].add(g.ds, g.ds.square() * queries.square().sum(-1, keepdim=True))
        rounded["dv"].add(g.p, g.p.square() * doa.square().sum(-1, keepdim=True))
        free[run] = g.free
        unsure = (g.free | (empty[run] & chunk.visible.any(-1))).any(-1)[..., None] & chunk.visible[..., 0, :]
        for name, part in (
            ("dk noise", g.ds_noise.mT @ queries),
            ("dk squares", g.ds.square().mT @ queries.square()),
            ("dk made", g.ds_made.mT @ chunk.q),
            ("dk total", g.ds.abs().mT @ queries),
            ("dv noise", g.p_noise.mT @ doa),
            ("dv squares", g.p.square().mT @ doa.square()),
            ("dv made", g.p_made.mT @ do),
            ("dv total", g.p.mT @ doa),
            ("free", unsure[..., None].double().expand(*unsure.shape, q.shape[3])),
        ):
            sums[name].flatten(0, 2).index_add_(0, chunk.rows.flatten(), part.reshape(-1, block, q.shape[3]))

    def by_key(name: str) -> Tensor:
        key_sums: Tensor = sums[name].flatten(2, 3)[:, :, : k.shape[2]]
        return key_sums

    def by_query(t: Tensor) -> Tensor:
        return t.flatten(2, 3)[:, :, : q.shape[2]]

    *parts, over = (by_query(t) for t in (dq_noise, dq_squares, dq_made, dq_total, free[..., None]))
    expected = [sums_gradient("dq", dq, parts, over, scale, rounded["dq"])]
    for name, value in (("dk", dk), ("dv", dv)):
        parts = [by_key(f"{name} {kind}") for kind in kinds]
        expected.append(sums_gradient(name, value, parts, by_key("free") > 0, scale, rounded[name]))
    return expected
