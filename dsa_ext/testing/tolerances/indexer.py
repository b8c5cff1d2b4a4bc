"""Error bounds of the indexer's operators.

Logits are sums over heads of weight * relu(q.k). Where rounding may change the sign of q.k, a whole term of a gradient
may be present or missing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.reference.indexer import SMALLEST_MASS, inside, listed_rows, runs
from dsa_ext.testing.tolerances.attention import noise_of_lse, spread
from dsa_ext.testing.tolerances.limits import (
    DENORMAL,
    FP8_SIMILARITY,
    FP32_ELEMENTWISE,
    FP32_RESOLUTION,
    FP32_SIMILARITY,
    SUM_OF_FP8_PRODUCTS,
    SUM_OF_PRODUCTS,
    TINY,
    Expected,
    Rounded,
    gradient,
    overflows,
    rounding_error,
    wide,
)

#: Rows, one per query and head, of one matmul of the gradients.
GROUP_ROWS = 128
BOUNDS = ("starts", "ends")


def _noise_of_scores(q: Tensor, keys: Tensor, weights: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    """For q [s, Hi, Di] and keys [n, Di] or [s, n, Di]: bounds of the |error| of the weighted sums [s, n], and where
    those may overflow."""
    products = q.abs() @ keys.abs().mT  # [s, Hi, n]
    w = weights.abs()[:, None]
    sums = (w @ products)[:, 0]
    noise = resolution * sums + (w @ (products > 0).double())[:, 0] * TINY
    return noise, overflows(sums) | overflows(products).any(1)


def _inside(args: dict[str, Any], run: slice) -> Tensor:
    starts, ends = (args[name][run] for name in BOUNDS)
    return inside(starts, ends, len(args["k"]))


def _terms(q: Tensor) -> float:
    """The factor 1 / sqrt(n) by which the rounding errors of a logit's n products average out."""
    return float(max(1, q.shape[1] * q.shape[2]) ** -0.5)


def indexer_logits(args: dict[str, Any]) -> list[Expected]:
    fp8 = args["q"].dtype == torch.float8_e4m3fn
    args = wide(args)
    clean = args.pop("clean")
    del args["deterministic"]  # for the gradients alone
    value = reference.indexer_logits(**args)
    q, k, weights, k_scale = (args[name] for name in ("q", "k", "weights", "k_scale"))
    noise, free = torch.zeros_like(value), torch.zeros_like(value, dtype=torch.bool)
    resolution = SUM_OF_FP8_PRODUCTS if fp8 else SUM_OF_PRODUCTS
    for run in runs(len(q), q.shape[1] * len(k)):
        visible = _inside(args, run)
        noise[run], free[run] = _noise_of_scores(q[run], k, weights[run], resolution)
        if k_scale is not None:
            noise[run] = noise[run] * k_scale.abs() + TINY
            free[run] |= overflows(value[run])
        free[run] &= visible
        if not clean:
            free[run] |= ~visible
        noise[run] = noise[run].masked_fill(~visible, 0)
    loose = None if k_scale is None else k_scale.isinf().expand_as(value)  # a sum that rounds to 0 may have any sign
    return [
        Expected(
            "logits",
            value,
            bound=noise + FP32_ELEMENTWISE * value.abs() + TINY,
            noise=noise * _terms(q) + TINY,
            similarity=FP8_SIMILARITY if fp8 else FP32_SIMILARITY,
            free=free,
            loose=loose,
        )
    ]


def indexer_scores(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    del args["deterministic"]  # for the gradients alone
    value = reference.indexer_scores(**args)
    q, weights = args["q"], args["weights"]
    padded, rows, named = listed_rows(args["k"], args["indices"])
    noise, free = torch.zeros_like(value), torch.zeros_like(value, dtype=torch.bool)
    for run in runs(len(q), rows.shape[1] * (q.shape[1] + q.shape[2])):
        noise[run], free[run] = _noise_of_scores(q[run], padded[rows[run]], weights[run], SUM_OF_PRODUCTS)
    bound = (noise + FP32_ELEMENTWISE * value.abs()).masked_fill(~named, 0) + TINY
    return [
        Expected(
            "scores",
            value,
            bound=bound,
            noise=noise.masked_fill(~named, 0) * _terms(q) + TINY,
            similarity=FP32_SIMILARITY,
            free=free & named,
        )
    ]


class _GradientSums:
    """Error bounds of dq, dk and dweights, accumulated over runs of queries."""

    def __init__(self, q: Tensor, keys: int, weights: Tensor, rows_are_rounded: bool) -> None:
        self.rows_are_rounded = rows_are_rounded
        kinds = ("noise", "squares", "made", "total")
        self.dq = {kind: torch.zeros_like(q) for kind in kinds}
        self.dk = {kind: q.new_zeros(keys, q.shape[2]) for kind in (*kinds, "rows")}
        self.dweights = {kind: torch.zeros_like(weights) for kind in kinds}
        self.free = {"dq": torch.zeros_like(q, dtype=torch.bool), "dk": q.new_zeros(keys, 1)}
        self.free["dweights"] = torch.zeros_like(weights, dtype=torch.bool)
        self.rounded = {name: Rounded(q.device) for name in ("dq", "dk", "dweights")}

    def add(
        self, run: slice, q: Tensor, keys: Tensor, weights: Tensor, upstream: Tensor, upstream_noise: Tensor,
        visible: Tensor, rows: Tensor | None,
    ) -> None:  # fmt: skip
        """q [s, Hi, Di]; keys [n, Di], or [s, n, Di] which are the `rows` [s, n] of dk; upstream gradient [s, n]."""
        hidden = ~visible[:, None]
        g, g_noise = (t.masked_fill(~visible, 0)[:, None] for t in (upstream, upstream_noise))
        w = weights[:, :, None]
        scores, products = q @ keys.mT, q.abs() @ keys.abs().mT  # [s, Hi, n]
        # A score of -inf is certain; one that overflows may have any sign.
        products = products.masked_fill(hidden | (scores == -torch.inf), 0)
        over = overflows(products)
        off = SUM_OF_PRODUCTS * products + TINY
        relu = scores.relu().masked_fill(hidden, 0)
        off = off.masked_fill(hidden | scores.isinf(), 0)
        unsure = ~hidden & ((scores.abs() <= off) | over)
        absent = hidden | ((scores <= 0) & ~unsure)
        g = g.masked_fill(absent, 0)
        self.dweights["noise"][run] = (g.abs() * off + (g_noise * (relu + off)).masked_fill(absent, 0)).sum(-1)
        self.dweights["squares"][run] = (g * relu).square().sum(-1)
        self.dweights["made"][run] = (rounding_error(g) * relu).sum(-1)
        self.dweights["total"][run] = (g.abs() * products).sum(-1)
        # `term`: terms that are present; `open_`: magnitudes of terms that may be present or missing.
        term = (g * w).masked_fill(hidden | (scores <= 0), 0)
        open_ = (g * w).abs().masked_fill(~unsure, 0)
        w = w.abs().nan_to_num(0, 0, 0)
        noise = open_ + (g_noise * w).masked_fill(absent, 0) + (TINY * (1 + w)).masked_fill(hidden, 0)
        # Weights may be multiplied before or after the sums. Rounding the upstream gradient to bf16 may give infinity.
        seen = g.abs().masked_fill(scores <= 0, 0)
        large = overflows(seen, term) | (unsure & ~g.isfinite())
        self.free["dq"][run] = large.any(-1, keepdim=True) | overflows(seen @ keys.abs())
        self.free["dweights"][run] = (over | large).any(-1)
        # A number that is not finite only reaches the queries and keys that see it.
        q, keys = (t.masked_fill(~t.isfinite(), 0) for t in (q, keys))
        g_squares, key_squares = seen.square(), keys.square().sum(-1)
        key_squares = key_squares if rows is None else key_squares[:, None]
        self.rounded["dq"].add(g, g_squares * key_squares * weights[:, :, None].square())
        self.rounded["dk"].add(term, term.square() * q.square().sum(-1, keepdim=True))
        self.rounded["dweights"].add(g, g_squares * relu.square())
        # The upstream gradient is rounded; for dk its product with the weight is rounded once more.
        positive = (scores > 0) & ~hidden
        dq_term_error = rounding_error(g) * weights[:, :, None] * positive
        dk_term_error = dq_term_error + rounding_error((term + dq_term_error).where(positive, 0))
        for kind, query_terms, key_terms, keys_, queries in (
            ("noise", noise, noise, keys.abs(), q.abs()),
            ("squares", term.square(), term.square(), keys.square(), q.square()),
            ("made", dq_term_error, dk_term_error, keys, q),
            ("total", term.abs(), term.abs(), keys.abs(), q.abs()),
        ):
            self.dq[kind][run] = query_terms @ keys_
            if rows is None:
                self.dk[kind] += key_terms.flatten(0, 1).mT @ queries.flatten(0, 1)
            else:
                self.dk[kind].index_add_(0, rows.flatten(), (key_terms.mT @ queries).flatten(0, 1))
        if self.rows_are_rounded:  # the kernels round rows of groups of a few queries; here of each query
            self._add_rows(term, q, rows)
        # Sums that are accumulated in memory may flush subnormal numbers to 0 at each term.
        for total, terms in ((self.dk["noise"], TINY * visible.double()), (self.free["dk"], large.any(1).double())):
            if rows is None:
                total += terms.sum(0)[:, None]
            else:
                total.index_add_(0, rows.flatten(), terms.flatten()[:, None].expand(-1, total.shape[1]))

    def _add_rows(self, terms: Tensor, q: Tensor, rows: Tensor | None) -> None:
        for i in range(len(q)):
            squares = (terms[i].mT @ q[i]).square()
            if rows is None:
                self.dk["rows"] += squares
            else:
                self.dk["rows"].index_add_(0, rows[i], squares)

    def expected(self, dq: Tensor, dk: Tensor, dweights: Tensor, unsure: "_Unsure") -> list[Expected]:
        result = []
        for name, value, sums in (("dq", dq, self.dq), ("dk", dk, self.dk), ("dweights", dweights, self.dweights)):
            total = sums["total"][: len(value)]
            noise = sums["noise"][: len(value)] + SUM_OF_PRODUCTS * total
            count = self.rounded[name].count
            free = overflows(total) | (self.free[name][: len(value)] > 0)
            free = free | (unsure.keys if name == "dk" else unsure.queries.view(-1, *(1,) * (value.dim() - 1)))
            squares, made = (sums[kind][: len(value)] for kind in ("squares", "made"))
            rows = sums["rows"][: len(value)] if "rows" in sums else 0.0
            result.append(gradient(name, value, noise, squares, made, free, count, rows))
        return result


class _Unsure:
    """Which gradients may be NaN because one matmul covers a group of queries and all keys that some of them see.

    These are the gradients of a query that does not see a non-finite key which another query of its group sees, and the
    gradients of a key that a non-finite query does not see but another query of its group does.
    """

    def __init__(self, q: Tensor, k: Tensor, weights: Tensor) -> None:
        self.group = GROUP_ROWS // q.shape[1]
        self.bad_queries = ~q.isfinite().all((1, 2)) | ~weights.isfinite().all(1)
        self.bad_keys = ~k.isfinite().all(1)
        self.queries = torch.zeros_like(self.bad_queries)
        self.keys = torch.zeros(len(k), 1, dtype=torch.bool, device=k.device)

    def any(self) -> bool:
        return bool(self.bad_queries.any() | self.bad_keys.any())

    def add(self, run: slice, visible: Tensor) -> None:
        """`visible` [s, S_kv]: the keys that each query of a whole group sees."""
        seen = visible.any(0)
        self.queries[run] = (seen & self.bad_keys & ~visible).any(1)
        self.keys[:, 0] |= (seen & ~visible)[self.bad_queries[run] & visible.any(1)].any(0)

    def add_groups(self, visible: Callable[[slice], Tensor]) -> None:
        if self.any():
            for begin in range(0, len(self.queries), self.group):
                run = slice(begin, begin + self.group)
                self.add(run, visible(run))


def indexer_logits_bwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    rows_are_rounded = args.pop("deterministic")
    return _dense_gradients(args, torch.zeros_like(args["dlogits"]), rows_are_rounded)


def _dense_gradients(args: dict[str, Any], noise_of_dlogits: Tensor, rows_are_rounded: bool) -> list[Expected]:
    grads = reference.indexer_logits_bwd(**args)
    q, k, weights, dlogits = (args[name] for name in ("q", "k", "weights", "dlogits"))
    sums = _GradientSums(q, len(k), weights, rows_are_rounded)
    for run in runs(len(q), q.shape[1] * (len(k) + q.shape[2])):
        visible = _inside(args, run)
        own_q = q[run].masked_fill(~visible.any(1)[:, None, None], 0)
        keys = k.masked_fill(~visible.any(0)[:, None], 0)
        sums.add(run, own_q, keys, weights[run], dlogits[run], noise_of_dlogits[run], visible, None)
    unsure = _Unsure(q, k, weights)
    unsure.add_groups(lambda run: _inside(args, run))
    return sums.expected(*grads, unsure)


def indexer_scores_bwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    rows_are_rounded = args.pop("deterministic")
    grads = reference.indexer_scores_bwd(**args)
    q, k, weights, dscores = (args[name] for name in ("q", "k", "weights", "dscores"))
    padded, rows, named = listed_rows(k, args["indices"])
    sums = _GradientSums(q, len(padded), weights, rows_are_rounded)
    nothing = torch.zeros_like(dscores)
    for run in runs(len(q), rows.shape[1] * (q.shape[1] + q.shape[2])):
        own_q = q[run].masked_fill(~named[run].any(1)[:, None, None], 0)
        sums.add(run, own_q, padded[rows[run]], weights[run], dscores[run], nothing[run], named[run], rows[run])
    unsure = _Unsure(q, k, weights)
    listed = q.new_zeros(unsure.group, len(padded), dtype=torch.bool)
    unsure.add_groups(lambda run: listed.zero_()[: len(rows[run])].scatter_(1, rows[run], True)[:, : len(k)])
    return sums.expected(*grads, unsure)


def _loss(
    scores: Tensor, p: Tensor, valid: Tensor | None, row_weights: Tensor | None, score_noise: Tensor | float,
    p_noise: Tensor | float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss [R] and dscores [R, K], each with the bounds of its |error|, and where they may overflow [R]."""
    loss, dscores = reference.indexer_loss(scores, p, valid, row_weights)
    counts = scores != -torch.inf
    if valid is not None:
        counts = counts & valid
    scores = scores.masked_fill(~counts, -torch.inf)
    log_q = torch.where(counts.any(-1, keepdim=True), scores, 0).log_softmax(-1)
    mass = p.masked_fill(~counts, 0)
    total = mass.sum(-1, keepdim=True)
    target = mass / total.clamp(min=SMALLEST_MASS)
    largest = scores.masked_fill(~counts, 0).abs().amax(-1, keepdim=True) if scores.shape[-1] else total
    # log_softmax: score - largest score - logarithm of a sum. The sum has the errors of all scores of the row: if one
    # score is uncertain, as fp32 sums of large terms that cancel are, so are the probabilities of all keys.
    off = 8 * FP32_RESOLUTION * (1 + largest.nan_to_num(0, 0, 0)) + score_noise + noise_of_lse(log_q, score_noise)
    off = off.expand_as(log_q)
    # The masses may be multiplied by logarithms before they are divided by their sum. They are below the resolution of
    # fp32 then, if they are denormal.
    p_noise = p_noise + DENORMAL
    target_off = FP32_ELEMENTWISE * target + (p_noise + target * _sum(p_noise)) / total.clamp(min=SMALLEST_MASS) + TINY
    q_off = (spread(log_q, off).clamp(max=1) + FP32_ELEMENTWISE * log_q.exp()) * target.sum(-1, keepdim=True)
    q_off = q_off + log_q.exp() * 4 * FP32_RESOLUTION
    magnitude = torch.where(target > 0, target * (target.log().abs() + log_q.abs()), 0)
    loss_off = (
        FP32_ELEMENTWISE * loss.abs() * (1 if row_weights is None else 0)
        + SUM_OF_PRODUCTS * magnitude.sum(-1)
        + (target * off + target_off * (1 + target.clamp(min=1e-300).log().abs() + log_q.abs().nan_to_num(0, 0, 0)))
        .masked_fill(~counts, 0)
        .sum(-1)
    )
    dscores_off = (q_off + target_off).masked_fill(~counts, 0)
    # The masses p may be divided by their sum before or after they are multiplied.
    products = (mass * scores.masked_fill(~counts, 0).abs()).sum(-1)
    free = overflows(largest[..., 0], total[..., 0], products) if scores.shape[-1] else torch.zeros_like(loss).bool()
    if row_weights is not None:
        loss_off = loss_off * row_weights.abs() + FP32_ELEMENTWISE * loss.abs()
        dscores_off = dscores_off * row_weights.abs()[:, None]
        free = free | overflows(row_weights)
    return loss, loss_off + TINY, dscores, dscores_off, free


def _sum(noise: Tensor | float) -> Tensor | float:
    return noise.sum(-1, keepdim=True) if isinstance(noise, Tensor) else noise


def indexer_loss(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    loss, loss_off, dscores, dscores_off, free = _loss(**args, score_noise=0.0, p_noise=0.0)
    valid = args["scores"] != -torch.inf
    if args["valid"] is not None:
        valid &= args["valid"]
    rounded = torch.where(valid, dscores_off + TINY, 0)
    everything = torch.ones_like(dscores, dtype=torch.bool)
    return [
        Expected("loss", loss, loss_off, loss_off, FP32_SIMILARITY, free, everything.any(-1)),
        Expected("dscores", dscores, rounded, rounded, FP32_SIMILARITY, free[:, None] & valid, loose=everything),
    ]


def indexer_dense_loss(args: dict[str, Any]) -> list[Expected]:
    """Composed of the other operators' bounds, over all keys; dq, dk and dweights are empty without `gradients`."""
    from dsa_ext.testing.tolerances import attention

    gradients = args["gradients"]
    args = attention.wide_with_lse(args)
    q, k, weights = (args[name] for name in ("q", "k", "weights"))
    seq, s_kv = len(q), len(k)
    starts, ends = args["starts"], args["ends"]
    if starts is None:
        position = args["q_start"] + torch.arange(seq, device=q.device)
        ends = ((position + 1).clamp(max=s_kv) if args["causal"] else torch.full_like(position, s_kv)).int()
        starts = torch.zeros_like(ends)
    index = {"q": q, "k": k, "weights": weights, "starts": starts, "ends": ends}
    if s_kv == 0:
        zero = q.new_zeros(())
        grads = [zero.expand(t.shape) if gradients else t.new_empty(0) for t in (q, k, weights)]
        return [
            Expected(name, value, value, value, None)
            for name, value in zip(("loss", "dq", "dk", "dweights"), (zero, *grads), strict=True)
        ]
    (logits,) = indexer_logits({**index, "k_scale": None, "clean": True, "deterministic": False})
    ids = torch.arange(s_kv, device=q.device, dtype=torch.int32).expand(1, seq, 1, s_kv)
    (p,) = attention.attn_dist(
        {
            "q": args["main_q"][None], "kv": args["main_kv"][None, :, None], "indices": ids,
            "lse": args["lse"][None], "sm_scale": args["sm_scale"], "causal": False, "q_start": 0,
            "positions_per_key": 1, "topk_length": None, "starts": starts[None], "ends": ends[None],
            "normalize": False, "per_head_block": False,
        }
    )  # fmt: skip
    logits_off = logits.bound.masked_fill(logits.value == -torch.inf, 0)
    losses, off, dlogits, dlogits_off, free = _loss(
        logits.value, p.value[0, :, 0], None, args["row_weights"], logits_off, p.bound[0, :, 0]
    )
    anything = bool(free.any()) or any(bool(t.free.any()) for t in (logits, p) if t.free is not None)
    overflow = torch.full((), anything, device=q.device)
    loss, loss_off = losses.sum(), off.sum() + SUM_OF_PRODUCTS * losses.abs().sum()
    expected = [Expected("loss", loss, loss_off, loss_off, None, overflow, torch.ones_like(overflow))]
    if not gradients:
        return [*expected, *(Expected(n, q.new_empty(0), q.new_empty(0), q.new_empty(0), None) for n in _NAMES)]
    # torch.use_deterministic_algorithms may have set `deterministic`: assume it did.
    rest = _dense_gradients({**index, "dlogits": dlogits}, dlogits_off, rows_are_rounded=True)
    for grad in rest:
        grad.free = overflow | (grad.free if grad.free is not None else overflow)
    return [*expected, *rest]


_NAMES = ("dq", "dk", "dweights")
