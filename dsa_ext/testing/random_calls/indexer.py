"""Random calls of the indexer's operators."""

import torch
from torch import Tensor

from dsa_ext import functional
from dsa_ext.reference.indexer import inside
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, nasty_rows
from dsa_ext.testing.random_calls.call import (
    Args,
    Call,
    Results,
    gradients,
    leaf,
    run_operator,
    select,
)
from dsa_ext.testing.random_calls.draw import Draw
from dsa_ext.testing.tolerances import check

_HEADS, _DIMS = (8, 16, 32, 64), (64, 128)
_SCORING = ("q", "k", "weights", "starts", "ends", "k_scale")
#: Number of keys from which indexer_topk processes a few queries at a time.
_MANY_KEYS = 2**20
#: Most columns for which nasty_rows, which makes all its rows for each call, is used.
_NASTY_COLUMNS = 2**15


def _sizes(draw: Draw, keys: int = 2**17) -> tuple[int, int, int, int]:
    """Heads, columns, queries, and keys, all of which a query may see."""
    heads, dim = draw.choice(_HEADS), draw.choice(_DIMS)
    return heads, dim, *draw.within(heads * 2, draw.length(2048), draw.length(keys))  # type: ignore[return-value]


def _topk_sizes(draw: Draw) -> tuple[int, int, int, int]:
    if draw.device.type == "cuda" and draw.chance(0.005):
        draw.notes.append("many keys")
        return 8, 64, draw.choice((130, 65, 33, 1)), _MANY_KEYS + draw.choice((1, 52_000, 100_003))
    return _sizes(draw)


def _scoring(draw: Draw, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Args:
    """q, k, weights, bounds and k_scale: the arguments of indexer_logits."""
    heads, dim, seq, s_kv = sizes
    q, k = draw.floats(seq, heads, dim, dtype=torch.float32, name="q"), draw.floats(s_kv, dim, dtype=torch.float32)
    weights = draw.floats(seq, heads, dtype=torch.float32, name="weights") * (heads * dim) ** -0.5
    k_scale = None
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        q_scale, k_scale = (x.abs().amax(-1).clamp(min=1e-30) / largest for x in (q, k))
        q, k = (q / q_scale[..., None]).clamp(-largest, largest), (k / k_scale[:, None]).clamp(-largest, largest)
        weights = weights * q_scale
    ks, ke = (draw.view(bound, "free") for bound in draw.bounds(seq, s_kv))
    visible = inside(ks, ke, s_kv)
    unseen = ~visible.any(0)
    if k_scale is not None:
        k_scale = draw.view(torch.where(unseen, torch.nan, k_scale), "free", repeat=False)
    return {
        "q": draw.keys(q.to(dtype), ~visible.any(1)) if draw.chance(0.1) else draw.view(q.to(dtype)),
        "k": draw.keys(k.to(dtype), unseen),
        "weights": draw.view(weights),
        "starts": ks,
        "ends": ke,
        "k_scale": k_scale,
    }


def indexer_logits(draw: Draw) -> Args:
    args = _scoring(draw, _sizes(draw), draw.choice((torch.bfloat16, torch.float8_e4m3fn)))
    return {**args, "clean": draw.chance(0.7)}


def indexer_logits_call(draw: Draw) -> Call:
    """With clean=False the logits outside of the bounds are not specified: they are replaced by -inf."""

    def run(a: Args) -> Results:
        (logits,) = run_operator("indexer_logits", a)
        outside = ~inside(a["starts"], a["ends"], a["k"].shape[0])
        return (logits if a["clean"] else logits.masked_fill(outside, -torch.inf),)

    args = indexer_logits(draw)
    return Call("indexer_logits", args, run, lambda r, a: check("indexer_logits", r, a), (), draw.notes)


def topk_select(draw: Draw) -> Args:
    topk = draw.size(4096)
    rows, columns = draw.within(4, draw.length(4096), draw.length(2**18))
    if draw.device.type == "cuda" and draw.chance(0.005):
        rows, columns = draw.choice((130, 3, 1)), _MANY_KEYS + draw.choice((1, 52_000, 100_003))
        draw.notes.append("many columns")
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16))
    if columns > _NASTY_COLUMNS or draw.chance(0.3):
        logits = draw.floats(rows, columns, dtype=dtype, name="logits")
    else:
        kinds = list(nasty_rows(columns, draw.random.randrange(2**31), draw.device).values())
        logits = torch.stack(kinds)[draw.integers(0, len(kinds), rows).long()].to(dtype)
        draw.notes.append("nasty rows")
    starts, ends = (draw.view(bound, "free") for bound in draw.bounds(rows, columns))
    args = {"logits": draw.view(logits, "dense"), "starts": starts, "ends": ends, "topk": topk}
    return args | _page_table(draw, rows, columns) if draw.chance(0.3) else args


def _page_table(draw: Draw, rows: int, columns: int) -> Args:
    page_size, sequences = draw.choice((64, 64, 1, 53, 576)), rows if draw.chance(0.5) else max(1, draw.size(9))
    pages = -(-columns // page_size) // draw.choice((1, 1, 2))
    low, high = draw.choice(((0, 2**24), (-2, 9), (INT32_MIN, INT32_MAX)))
    table = draw.view(draw.integers(low, high, sequences, pages), "free")
    draw.notes.append("page table")
    to_sequence = None if rows == sequences else draw.view(draw.integers(-1, sequences + 1, rows), "free")
    return {"page_table": table, "page_size": page_size, "row_to_sequence": to_sequence}


def indexer_topk(draw: Draw) -> Args:
    sizes = _topk_sizes(draw)
    topk = draw.choice((50, 2047, 1, 333)) if sizes[3] > _MANY_KEYS else draw.size(4096)
    return {**_scoring(draw, sizes, draw.choice((torch.bfloat16, torch.float8_e4m3fn))), "topk": topk}


def _differentiable(draw: Draw) -> Args:
    """_scoring in bf16. The gradients' kernels take weights of any strides."""
    args = _scoring(draw, _sizes(draw, 2**15), torch.bfloat16)
    del args["k_scale"]
    return args


def _dlogits(draw: Draw, args: Args) -> Tensor:
    seq, s_kv = args["q"].shape[0], args["k"].shape[0]
    dlogits = draw.gradient(seq, s_kv, dtype=torch.float32)
    if draw.chance(0.4):
        visible = inside(args["starts"], args["ends"], s_kv)
        return draw.view(dlogits.masked_fill(~visible, torch.nan), "free", repeat=False)
    return draw.view(dlogits, "free")


def indexer_logits_bwd(draw: Draw) -> Args:
    args = _differentiable(draw)
    args["weights"] = draw.view(args["weights"], "free")
    return {**args, "dlogits": _dlogits(draw, args), "deterministic": draw.chance(0.5)}


def _listed(draw: Draw) -> Args:
    """Arguments of indexer_scores."""
    heads, dim = draw.choice(_HEADS), draw.choice(_DIMS)
    slots = 0 if draw.chance(0.01) else draw.size(4096)
    seq, slots = draw.within(2 * heads, draw.length(2048), slots)
    (s_kv,) = draw.within(64, draw.length(2**17))
    q, k = draw.floats(seq, heads, dim, name="q"), draw.floats(s_kv, dim, name="k")
    weights = draw.floats(seq, heads, dtype=torch.float32, name="weights") * (heads * dim) ** -0.5
    indices = draw.view(draw.ids(seq, slots, keys=s_kv), "dense")
    listed = torch.zeros(s_kv + 1, dtype=torch.bool, device=q.device)
    listed[torch.where((indices >= 0) & (indices < s_kv), indices, s_kv).flatten().long()] = True
    return {
        "q": draw.view(q),
        "k": draw.keys(k, ~listed[:s_kv]),
        "weights": draw.view(weights, "free"),
        "indices": indices,
    }


def indexer_scores(draw: Draw) -> Args:
    return _listed(draw)


def _dscores(draw: Draw, args: Args) -> Tensor:
    indices = args["indices"]
    dscores = draw.gradient(*indices.shape, dtype=torch.float32)
    if draw.chance(0.4):
        padding = (indices < 0) | (indices >= args["k"].shape[0])
        return draw.view(dscores.masked_fill(padding, torch.nan), "free", repeat=False)
    return draw.view(dscores, "free")


def indexer_scores_bwd(draw: Draw) -> Args:
    args = _listed(draw)
    return {**args, "dscores": _dscores(draw, args), "deterministic": draw.chance(0.5)}


def indexer_loss(draw: Draw) -> Args:
    rows, slots = draw.within(16, draw.length(2048), 0 if draw.chance(0.01) else draw.size(2**15))
    scores = draw.floats(rows, slots, dtype=torch.float32, name="scores")
    if draw.chance(0.6):
        scores = scores.masked_fill(draw.uniform(rows, slots) < draw.choice((0.1, 0.9)), -torch.inf)
    p = draw.uniform(rows, slots) ** draw.choice((1, 8)) * draw.choice((1.0, 1.0, 64.0, 1e-12))
    if draw.chance(0.4):
        p = p * (draw.uniform(rows, 1) < 0.8) * (draw.uniform(rows, slots) < 0.7)
    valid = draw.view(draw.uniform(rows, slots) < 0.8, "dense") if draw.chance(0.5) else None
    return {
        "scores": draw.view(scores, "dense"),
        "p": draw.view(p, "dense"),
        "valid": valid,
        "row_weights": draw.view(draw.normal(rows), "free") if draw.chance(0.4) else None,
    }


def indexer_dense_loss(draw: Draw) -> Args:
    heads, dim = draw.choice(_HEADS), draw.choice(_DIMS)
    main_heads, d_qk = draw.size(128), draw.choice((576, 512))
    seq, s_kv = draw.within(2 * heads + 16 * main_heads, draw.length(512), draw.length(2048))
    q, k = draw.view(draw.floats(seq, heads, dim, name="q")), draw.view(draw.floats(s_kv, dim, name="k"))
    weights = draw.view(draw.floats(seq, heads, dtype=torch.float32, name="weights") * (heads * dim) ** -0.5)
    main_q, main_kv = draw.view(draw.normal(seq, main_heads, d_qk).bfloat16()), draw.normal(s_kv, d_qk).bfloat16()
    options: Args = {"sm_scale": draw.scale(), "causal": draw.chance(0.7), "starts": None, "ends": None}
    options["q_start"] = draw.choice((0, 0, max(0, s_kv - seq), 100_000))
    if draw.chance(0.3):
        options |= {"q_start": 0, **draw.bounds_of_rows(s_kv, seq)}
    ids = torch.arange(s_kv, device=q.device).int().expand(1, seq, 1, s_kv)
    lse = torch.full((seq, main_heads), -torch.inf, device=q.device)
    if s_kv:
        rows = {name: options[name] if options[name] is None else options[name][None] for name in ("starts", "ends")}
        main = {"q": main_q[None], "kv": main_kv[None, :, None], "indices": ids}
        lse = run_operator("sparse_mla_fwd", main | options | rows)[1][0]
    return {
        "q": q,
        "k": k,
        "weights": weights,
        "main_q": main_q,
        "main_kv": draw.view(main_kv, repeat=False),
        "lse": draw.view(lse, "free", repeat=False),
        "row_weights": draw.view(draw.uniform(seq), "free") if draw.chance(0.4) else None,
        **options,
        "gradients": draw.chance(0.7),
    }


def indexer_dense_loss_call(draw: Draw) -> Call:
    args = {**indexer_dense_loss(draw), "deterministic": draw.chance(0.5)}
    unordered = () if args["deterministic"] else (2,)

    def run(a: Args) -> Results:
        return run_operator("indexer_dense_loss", a)

    return Call("indexer_dense_loss", args, run, lambda r, a: check("indexer_dense_loss", r, a), unordered, draw.notes)


def functional_indexer_logits(draw: Draw) -> Call:
    args = _differentiable(draw)
    args["dlogits"] = _dlogits(draw, args)
    deterministic = draw.chance(0.4)

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in ("q", "k", "weights")]
        q, k, weights = leaves
        logits = functional.indexer_logits(q, k, weights, a["starts"], a["ends"], deterministic=deterministic)
        return logits.detach(), *gradients([logits], [a["dlogits"]], leaves)

    def judge(results: Results, a: Args) -> None:
        check("indexer_logits", results[:1], select(a, *_SCORING))
        check("indexer_logits_bwd", results[1:], a | {"deterministic": deterministic})

    return Call("functional.indexer_logits", args, run, judge, () if deterministic else (2,), draw.notes)


def functional_indexer_scores(draw: Draw) -> Call:
    args = _listed(draw)
    args["dscores"] = _dscores(draw, args)
    deterministic = draw.chance(0.4)

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in ("q", "k", "weights")]
        q, k, weights = leaves
        scores = functional.indexer_scores(q, k, weights, a["indices"], deterministic=deterministic)
        return scores.detach(), *gradients([scores], [a["dscores"]], leaves)

    def judge(results: Results, a: Args) -> None:
        check("indexer_scores", results[:1], select(a, "q", "k", "weights", "indices"))
        check("indexer_scores_bwd", results[1:], a | {"deterministic": deterministic})

    return Call("functional.indexer_scores", args, run, judge, () if deterministic else (2,), draw.notes)


def functional_indexer_loss(draw: Draw) -> Call:
    """The sum of the rows' losses: the upstream gradient of each row is 1, so the gradient is that of the operator."""
    args = indexer_loss(draw)

    def run(a: Args) -> Results:
        scores = leaf(a["scores"])
        loss = functional.indexer_loss(scores, **select(a, "p", "valid", "row_weights"), reduction="none")
        return loss.detach(), *gradients([loss.sum()], [torch.ones((), device=loss.device)], [scores])

    def judge(results: Results, a: Args) -> None:
        check("indexer_loss", results, a)

    return Call("functional.indexer_loss", args, run, judge, (), draw.notes)


def functional_indexer_dense_loss(draw: Draw) -> Call:
    args = {**indexer_dense_loss(draw), "gradients": True}
    deterministic = draw.chance(0.5)

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in ("q", "k", "weights")]
        options = select(a, "row_weights", "sm_scale", "causal", "q_start", "starts", "ends")
        options["deterministic"] = deterministic
        q, k, weights = leaves
        main = (a["main_q"], a["main_kv"], a["lse"])
        loss = functional.indexer_dense_loss(q, k, weights, *main, **options, reduction="sum")
        return loss.detach(), *gradients([loss], [torch.ones_like(loss)], leaves)

    def judge(results: Results, a: Args) -> None:
        check("indexer_dense_loss", results, a)

    return Call("functional.indexer_dense_loss", args, run, judge, () if deterministic else (2,), draw.notes)


#: Calls that replace the plain call of an operator.
CALLS = {"indexer_logits": indexer_logits_call, "indexer_dense_loss": indexer_dense_loss_call}
