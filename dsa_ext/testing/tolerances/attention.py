"""Error bounds of the attention operators.

A score q.k * scale is computed in fp32. Its error is up to SUM_OF_PRODUCTS times the sum of the products' magnitudes.
Its probability has a relative error of up to exp(error) - 1. That is negligible for ordinary magnitudes, and unbounded
for large ones, unless the score of one key is so far above the others that it takes all the weight in any case. So each
probability has its own bound, and the bound of each result is computed from those.

Shapes: n queries read the same K keys [.., K, D]; the leading dimensions are those of the reference's chunks.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.reference import block_sparse, decode, numerics, sparse_mla
from dsa_ext.testing.tolerances.limits import (
    BF16_ROUNDING,
    ELEMENTWISE,
    FP32_ELEMENTWISE,
    FP32_RESOLUTION,
    FP32_SIMILARITY,
    HUGE,
    LSE_ABSOLUTE,
    LSE_RELATIVE,
    SUM_OF_PRODUCTS,
    TINY,
    Expected,
    Rounded,
    overflows,
    units_of_lse,
    wide,
)


@dataclass
class Scores:
    """Scores [.., n, K] in float64 and the bounds of their error in fp32; -inf where a key is not visible."""

    scores: Tensor
    noise: Tensor  # bound of the |error| of each score
    resolution: Tensor  # [.., n]: error of lse because partial sums are truncated
    free: Tensor  # [.., n]: whether a score of the row may overflow


def scores_of(q: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Scores:
    scores = (q @ keys.mT * scale).masked_fill(~visible, -torch.inf)
    products = (q.abs() @ keys.abs().mT).masked_fill(~visible, 0)
    free = overflows(products * max(1.0, 2 * abs(scale))).any(-1)
    largest = q.abs().amax(-1)[..., None] * keys.abs().amax(-1)[..., None, :]
    units = units_of_lse((largest * q.shape[-1] / products).nan_to_num(0, 0, 0))
    products = products.masked_fill(scores == -torch.inf, 0)  # probability 0 in any case, also of an infinite key
    return Scores(
        scores=scores,
        noise=(abs(scale) * (SUM_OF_PRODUCTS * products + TINY)).masked_fill(scores == -torch.inf, 0),
        resolution=abs(scale) * (FP32_RESOLUTION * _largest(units * products) + TINY),
        free=free,
    )


def _largest(x: Tensor) -> Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def spread(log_p: Tensor, noise: Tensor) -> Tensor:
    """Bound of the |error| of p = exp(log_p) if log_p is off by up to `noise`: p * (exp(noise) - 1), possibly inf."""
    log_of_growth = torch.where(noise > 30, noise, noise.clamp(max=30).expm1().log())
    return torch.exp(log_p + log_of_growth).masked_fill(log_p == -torch.inf, 0)


def noise_of_lse(log_p: Tensor, noise: Tensor | float) -> Tensor:
    """Bound of the |error| of lse [.., 1] if each score is off by up to `noise`, from the logarithms of p [.., K]."""
    up, down = (log_p + noise).logsumexp(-1, keepdim=True), (log_p - noise).logsumexp(-1, keepdim=True)
    is_empty = (log_p == -torch.inf).all(-1, keepdim=True)
    return torch.maximum(up, -down).clamp(min=0).masked_fill(is_empty, 0)


@dataclass
class Softmax:
    p: Tensor  # [.., n, K]
    noise: Tensor  # bound of the |error| of each p
    lse: Tensor  # [.., n], 0 where it is not finite
    lse_limit: Tensor  # [.., n]
    free: Tensor  # [.., n]
    unsure: Tensor  # [.., n]: whether the row has scores of both NaN and +inf, so that lse may be either


def softmax_of(q: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Softmax:
    s = scores_of(q, keys, visible, scale)
    lse = s.scores.logsumexp(-1, keepdim=True)
    log_p = s.scores - lse.masked_fill(lse == -torch.inf, 0)
    alone = spread(log_p, s.noise + noise_of_lse(log_p, s.noise))
    # Probabilities sum to 1, so the largest is off by at most the sum of the others' errors: 0 if it is 1.
    noise = alone.clamp(max=1)
    if alone.shape[-1]:
        top = torch.nn.functional.one_hot(alone.nan_to_num(0).argmax(-1), alone.shape[-1]).bool()
        others = alone.masked_fill(top, 0).sum(-1, keepdim=True)
        noise = torch.where(top, noise.minimum(others), noise).masked_fill(log_p == -torch.inf, 0)
    finite_lse = lse[..., 0].masked_fill(~lse[..., 0].isfinite(), 0)
    limit = (LSE_RELATIVE * finite_lse.abs()).clamp(min=LSE_ABSOLUTE) + s.resolution
    unsure = s.scores.isnan().any(-1) & (s.scores == torch.inf).any(-1)
    return Softmax(p=log_p.exp(), noise=noise, lse=finite_lse, lse_limit=limit, free=s.free, unsure=unsure)


#: Largest exp(score - running maximum) in the forward kernels: the running maximum may lag by up to 8 powers of 2.
_LAG = 2.0**8


def add_probabilities(rounded: Rounded, p: Tensor, values: Tensor) -> None:
    """Adds the probabilities that bf16 rounding changes. They are rounded to fp32 first, since equal probabilities may
    differ in the last bits of float64 from row to row."""
    p = p.float().double()
    is_rounded = (p.bfloat16() - p).abs() > BF16_ROUNDING / 16 * p
    rounded.add(p, (p.square() * values.square().sum(-1)[..., None, :]).where(is_rounded, 0))


def output(value: Tensor, parts: "Parts", rounded: Rounded) -> Expected:
    """The bf16 output sum_i p_i v_i. The bound is capped: whatever p is, no element exceeds the largest value."""
    bound = ELEMENTWISE * parts.magnitude + parts.noise
    return Expected(
        "out",
        value,
        bound=bound.minimum(2 * (1 + ELEMENTWISE) * parts.largest) + TINY,
        noise=parts.noise + TINY,
        roundings=2,
        count=rounded.count if rounded.squares.any() else torch.inf,
        free=parts.free[..., None] | overflows(parts.total),
        loose=parts.vanishing[..., None],
    )


def lse_of(value: Tensor, parts: "Parts") -> Expected:
    limit = parts.lse_limit
    return Expected("lse", value, bound=limit, noise=limit, similarity=None, free=parts.free, loose=parts.unsure)


@dataclass
class Parts:
    """What the error bounds are computed from, for every element of the output [.., D] and every row [..]."""

    magnitude: Tensor  # sum_i p_i |v_i|
    noise: Tensor  # sum_i (bound of the |error| of p_i) |v_i|
    largest: Tensor  # max_i |v_i|
    total: Tensor  # sum_i |v_i|
    lse_limit: Tensor
    free: Tensor
    unsure: Tensor  # whether lse may be NaN or +inf
    vanishing: Tensor  # whether fp32 rounds p of some visible key to 0

    @staticmethod
    def empty(shape: torch.Size, rows: torch.Size, like: Tensor) -> "Parts":
        magnitude, noise, largest, total = (like.new_zeros(shape) for _ in range(4))
        free, unsure, vanishing = (like.new_zeros(rows, dtype=torch.bool) for _ in range(3))
        return Parts(magnitude, noise, largest, total, like.new_zeros(rows), free, unsure, vanishing)

    @staticmethod
    def of(s: Softmax, values: Tensor, visible: Tensor) -> "Parts":
        """From values [.., K, D], which are zeros in slots that are not visible."""
        values = values.abs()
        total = values.sum(-2, keepdim=True)
        largest = values.amax(-2, keepdim=True) if values.shape[-2] else total
        shape = (*s.p.shape[:-1], values.shape[-1])
        return Parts(
            magnitude=s.p @ values,
            noise=s.noise @ values + TINY * total,
            largest=largest.expand(shape),
            total=total.expand(shape),
            lse_limit=s.lse_limit,
            free=s.free,
            unsure=s.unsure,
            vanishing=(visible & (s.p < HUGE**-1)).any(-1),
        )

    def put(self, place: Any, other: "Parts", form: Any) -> None:
        """Writes the tensors of `other`, reshaped by `form`, to `place` of the tensors here."""
        for name, tensor in vars(self).items():
            tensor[place] = form(getattr(other, name))


def scale_of(args: dict[str, Any]) -> float:
    return float(args["q"].shape[-1] ** -0.5 if args["sm_scale"] is None else args["sm_scale"])


# ---- sparse MLA

_POSITIONS = ("causal", "q_start", "positions_per_key", "topk_length", "starts", "ends")


def visible_slots(args: dict[str, Any]) -> Tensor:
    return sparse_mla.visible_slots(args["indices"], args["kv"].shape[1], *(args[name] for name in _POSITIONS))


def sparse_mla_fwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    del args["deterministic"]  # for the gradients alone
    q, kv, indices, d_v, sink = (args[name] for name in ("q", "kv", "indices", "d_v", "attn_sink"))
    scale = scale_of(args)
    out, lse = reference.sparse_mla_fwd(**args)
    parts, rounded = Parts.empty(out.shape, lse.shape, out), Rounded(q.device)
    for chunk in sparse_mla.query_chunks(q, kv, indices, visible_slots(args)):
        s = softmax_of(chunk.q, chunk.keys, chunk.visible, scale)
        chunk_parts = Parts.of(s, chunk.keys[..., :d_v], chunk.visible)
        add_probabilities(rounded, s.p, chunk.keys[..., :d_v])
        parts.put((slice(None), chunk.queries), chunk_parts, lambda t: t.flatten(2, 3))
    if sink is not None:
        share = sparse_mla.share_after_sink(lse, sink)
        apart = (lse - sink).nan_to_num(0, 0, 0)
        unsure = parts.lse_limit + FP32_RESOLUTION * apart.abs()
        least, most = (apart - unsure).sigmoid(), (apart + unsure).sigmoid()
        # In fp32 a quotient by a large denominator may round to 0. It multiplies a sum of K terms of up to _LAG each.
        noise = torch.maximum(share - least, most - share).masked_fill(~(lse - sink).isfinite(), 0)
        noise = noise + TINY * _LAG * max(1, indices.shape[3])
        parts.noise = parts.noise * (share + noise)[..., None] + parts.magnitude * noise[..., None]
        parts.magnitude = parts.magnitude * share[..., None]
    return [output(out, parts, rounded), lse_of(lse, parts)]


def sparse_mla_max_fwd(args: dict[str, Any]) -> list[Expected]:
    out, lse = sparse_mla_fwd({name: value for name, value in args.items() if name != "inf_if_empty"})
    args = wide(args)
    value, limit = torch.empty_like(lse.value), torch.empty_like(lse.value)
    for chunk in sparse_mla.query_chunks(args["q"], args["kv"], args["indices"], visible_slots(args)):
        s = scores_of(chunk.q, chunk.keys, chunk.visible, scale_of(args))
        value[:, chunk.queries] = s.scores.amax(-1).flatten(2)
        limit[:, chunk.queries] = s.resolution.flatten(2)
    _inf_if_empty(lse, args)
    limit += (LSE_RELATIVE * value.abs()).clamp(min=LSE_ABSOLUTE).nan_to_num(0, 0, 0)
    top = Expected("max_logits", value, bound=limit, noise=limit, similarity=None, free=lse.free, loose=lse.loose)
    return [out, lse, top]


def _inf_if_empty(lse: Expected, args: dict[str, Any]) -> None:
    if args["inf_if_empty"]:
        lse.value = lse.value.masked_fill(lse.value == -torch.inf, torch.inf)


def sparse_mla_decode(args: dict[str, Any]) -> list[Expected]:
    """As sparse_mla_fwd with the listed keys alone. Of fp8 keys P times a scale is rounded to bf16, where it may be
    denormal, and then multiplied by numbers of e4m3: an error of up to 448 * 2^-134 < TINY for each key."""
    args = {name: value if name == "kv_cache" else wide({name: value})[name] for name, value in args.items()}
    q, indices = args["q"], args["indices"]
    used = decode.used_slots(indices, args["topk_length"])
    keys, ids = decode.listed_keys(args["kv_cache"], indices, used, torch.float64)
    call = {"q": q.flatten(0, 1)[None], "kv": keys[None, :, None], "indices": ids.flatten(0, 1)[None, :, None]}
    call |= {"sm_scale": args["sm_scale"], "d_v": args["d_v"], "causal": False, "q_start": 0, "positions_per_key": 1}
    call |= {"topk_length": None, "starts": None, "ends": None, "attn_sink": args["attn_sink"], "deterministic": False}
    out, lse = sparse_mla_fwd(call)
    _inf_if_empty(lse, args)
    if args["kv_cache"].dtype == torch.uint8:
        vanishing = TINY * max(1, indices.shape[2])
        out = replace(out, bound=out.bound + vanishing, noise=out.noise + vanishing)
    return [_of_tokens(expected, q.shape[:2]) for expected in (out, lse)]


def _of_tokens(expected: Expected, shape: torch.Size) -> Expected:
    """The same with the leading dimensions [1, B * N] of all tensors as [B, N]."""
    tensors = {name: t[0].unflatten(0, shape) for name, t in vars(expected).items() if isinstance(t, Tensor)}
    return replace(expected, **tensors)


def wide_with_lse(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments in float64, an fp32 `lse` with the margin that the operators add to it."""
    lse, args = args["lse"], wide(args)
    return args if lse.dtype == torch.float64 else {**args, "lse": numerics.with_margin(args["lse"])}


def weights_of(s: Scores, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - lse), the bound of its error, and whether it may overflow; `lse` is [.., n, 1]."""
    log_p = (s.scores - lse).masked_fill(lse == -torch.inf, -torch.inf)
    p = log_p.exp()
    unsure = s.noise + 2 * FP32_RESOLUTION * lse.abs().nan_to_num(0, 0, 0)
    off = spread(log_p, unsure) + FP32_ELEMENTWISE * p + TINY * (p > 0)
    return p, off, s.free[..., None] | (off > HUGE) | overflows(p)


def attn_dist(args: dict[str, Any]) -> list[Expected]:
    args = wide_with_lse(args)
    q, kv, indices, lse = (args[name] for name in ("q", "kv", "indices", "lse"))
    visible, scale = visible_slots(args), scale_of(args)
    value = reference.attn_dist(**args)
    group_heads = q.shape[2] // kv.shape[2]
    step = sparse_mla.HEADS_PER_BLOCK if args["per_head_block"] else max(1, group_heads)
    blocks = value.shape[0] if args["per_head_block"] else 1
    sums = torch.zeros(blocks, *indices.shape, dtype=torch.float64, device=q.device)
    noise, free = torch.zeros_like(sums), torch.zeros_like(sums, dtype=torch.bool)
    for chunk in sparse_mla.query_chunks(q, kv, indices, visible):
        s = scores_of(chunk.q, chunk.keys, chunk.visible, scale)
        p, off, over = weights_of(s, lse[:, chunk.queries].unflatten(2, chunk.q.shape[2:4])[..., None])
        for block in range(blocks):
            heads = slice(block * step, (block + 1) * step)
            sums[block, :, chunk.queries] = p[..., heads, :].sum(3)
            noise[block, :, chunk.queries] = off[..., heads, :].sum(3)
            free[block, :, chunk.queries] = over[..., heads, :].any(3)
    free |= overflows(sums)
    # A slot that is not visible must be 0 even if others of its row overflow.
    free = free & visible
    if args["normalize"]:
        total = sums.sum(-1, keepdim=True).clamp(min=1e-10)
        noise = noise / total + sums / total**2 * noise.sum(-1, keepdim=True)
        # Each slot is divided by the sum of its row, so it may overflow if any of them does.
        free = (free | overflows(sums).any(-1, keepdim=True) | free.any(-1, keepdim=True)) & visible
    if not args["per_head_block"]:
        noise, free = noise[0], free[0]
    loose = torch.ones_like(free) if args["normalize"] else None
    return [Expected("p", value, bound=noise, noise=noise, similarity=FP32_SIMILARITY, free=free, loose=loose)]


# ---- block-sparse and coarse attention

#: Largest sum of exp(score - maximum of the first blocks) in block_sparse_attn_fwd.
_LAG_OF_BLOCKS = 2.0**41


def block_sparse_attn_fwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    q, scale = args["q"], scale_of(args)
    out, lse = reference.block_sparse_attn_fwd(**args)
    count = block_sparse.blocks(q.shape[2])
    block = block_sparse.BLOCK
    cut_shape = (*q.shape[:2], count, block)
    parts = Parts.empty(torch.Size((*cut_shape, q.shape[3])), torch.Size(cut_shape), out)
    rounded = Rounded(q.device)
    lists = (args[name] for name in ("q2k_index", "q2k_num", "kv_block_size"))
    for chunk in block_sparse.block_chunks(q, args["k"], args["v"], *lists):
        s = softmax_of(chunk.q, chunk.keys, chunk.visible, scale)
        chunk_parts = Parts.of(s, chunk.values, chunk.visible)
        # When the maximum moves, sums of up to _LAG_OF_BLOCKS are multiplied by a factor that fp32 may round to 0.
        chunk_parts.noise += s.p.where(s.p < _LAG_OF_BLOCKS * TINY, 0) @ chunk.values.abs()
        # Partial sums are relative to the maximum of the first blocks, so they may be larger than the final ones.
        if slots := chunk.rows.shape[3]:
            largest = s.p.unflatten(-1, (slots, block)).amax(-1).clamp(min=_LAG_OF_BLOCKS**-1)
            unseen = ~chunk.visible.unflatten(-1, (slots, block)).any(-1)
            chunk_parts.total = chunk_parts.total / largest.masked_fill(unseen, 1).amin(-1, keepdim=True)
        add_probabilities(rounded, s.p, chunk.values)
        parts.put((slice(None), slice(None), chunk.queries), chunk_parts, lambda t: t)
    parts = Parts(*(t.flatten(2, 3)[:, :, : q.shape[2]] for t in vars(parts).values()))
    return [output(out, parts, rounded), lse_of(lse, parts)]


def coarse_attn_fwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    q, k, v = (args[name] for name in ("q", "k", "v"))
    scale, block = scale_of(args), block_sparse.BLOCK
    out, lse, scores = reference.coarse_attn_fwd(**args)
    parts, rounded = Parts.empty(out.shape, lse.shape, out), Rounded(q.device)
    noise, free = torch.zeros_like(scores), torch.zeros_like(scores, dtype=torch.bool)
    share = q.shape[1] // max(1, k.shape[1])
    visible = torch.ones(1, k.shape[2], dtype=torch.bool, device=q.device)
    for i in range(scores.shape[2]):
        rows = slice(i * block, (i + 1) * block)
        s = softmax_of(q[:, :, rows].unflatten(1, (-1, share)), k[:, :, None], visible, scale)
        # The largest probabilities have this error too: they are exp(score - lse), of a rounded lse.
        s.noise = (s.noise + spread(s.p.log(), 2 * FP32_RESOLUTION * s.lse.abs()[..., None])).clamp(max=1)
        parts.put((slice(None), slice(None), rows), Parts.of(s, v[:, :, None], visible), lambda t: t.flatten(1, 2))
        add_probabilities(rounded, s.p, v[:, :, None])
        noise[:, :, i] = (s.noise + FP32_ELEMENTWISE * s.p + TINY).flatten(1, 2).mean(2)
        free[:, :, i] = s.free.any(-1).flatten(1, 2)[..., None]
    means = Expected("scores", scores, bound=noise, noise=noise, similarity=FP32_SIMILARITY, free=free)
    return [output(out, parts, rounded), lse_of(lse, parts), means]
