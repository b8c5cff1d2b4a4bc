"""Random calls of the sparse MLA operators."""

import torch
from torch import Tensor

from dsa_ext import functional, reference
from dsa_ext.reference import decode
from dsa_ext.reference.numerics import names_one_of
from dsa_ext.reference.sparse_mla import visible_slots
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, poison_cache
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

_OPTIONS = ("sm_scale", "causal", "q_start", "positions_per_key", "topk_length", "starts", "ends")
_FORWARD = ("q", "kv", "indices", *_OPTIONS, "d_v", "attn_sink")
#: Units of work, of 64 columns each, of one product q.k, which has 512 or 576 columns.
_COLUMNS = 8


def _inputs(draw: Draw) -> Args:
    """q, kv, indices and the options that all three operators have."""
    d_qk, groups, batch = draw.choice((576, 512)), draw.choice((1, 1, 1, 2, 3, 8)), draw.choice((1, 1, 1, 2, 3))
    group_heads = draw.size(128)
    heads = groups * group_heads
    seq, topk = draw.within(_COLUMNS * batch * groups * max(16, group_heads), draw.length(2048), draw.size(4096))
    (s_kv,) = draw.within(128 * batch * groups, draw.length(2**17))
    batch = 0 if draw.chance(0.01) else batch

    topk_length = None
    if draw.chance(0.4):
        topk_length = draw.integers(-3, topk + 3, batch, seq)
        if draw.chance(0.2):
            topk_length[:, ::2] = draw.choice((INT32_MIN, INT32_MAX, 0))
        topk_length = draw.view(topk_length, "free")
    options: Args = {
        "sm_scale": draw.scale(),
        "causal": draw.chance(0.6),
        "q_start": draw.choice((0, 0, max(0, s_kv - seq), 5, 100_000, 2**31 - 1, 2**40)),
        "positions_per_key": draw.choice((1, 1, 1, 1, 2, 4, 128, 2**40)),
        "topk_length": topk_length,
        "starts": None,
        "ends": None,
    }
    if draw.chance(0.3):
        options |= {"q_start": 0, "positions_per_key": 1, **draw.bounds_of_rows(s_kv, batch, seq)}
    indices = draw.view(draw.ids(batch, seq, groups, topk, keys=s_kv), "dense")
    q, kv = draw.floats(batch, seq, heads, d_qk, name="q"), draw.floats(batch, s_kv, groups, d_qk, name="kv")
    q = draw.to_edge(q, kv, _scale(options, d_qk))

    visible = visible_slots(indices, s_kv, *(options[name] for name in _OPTIONS[1:]))
    no_keys = ~visible.any(3).repeat_interleave(group_heads, 2)  # [B, S, H]
    q = draw.keys(q, no_keys) if draw.chance(0.1) else draw.view(q)
    return {"q": q, "kv": draw.keys(kv, ~_listed(indices, visible, s_kv)), "indices": indices, **options}


def _scale(args: Args, d_qk: int) -> float:
    return d_qk**-0.5 if args["sm_scale"] is None else float(args["sm_scale"])


def _listed(indices: Tensor, visible: Tensor, s_kv: int) -> Tensor:
    """Mask [B, S_kv, G] of the keys that some query sees."""
    batch, _, groups, _ = indices.shape
    listed = torch.zeros(batch, groups, s_kv + 1, dtype=torch.bool, device=indices.device)
    rows = torch.where(visible, indices, s_kv).transpose(1, 2).flatten(2).long()
    return listed.scatter_(2, rows, True)[..., :s_kv].transpose(1, 2)


def _with_sink(draw: Draw, args: Args) -> Args:
    heads, sink = args["q"].shape[2], None
    if draw.chance(0.4):
        sink = draw.normal(heads) * draw.choice((1.0, 10.0, 300.0))
        for special in (torch.inf, -torch.inf):
            if draw.chance(0.15):
                sink[draw.uniform(heads) < 0.3] = special
        sink = draw.view(sink, "free")
    return {**args, "d_v": 512, "attn_sink": sink}


def sparse_mla_fwd(draw: Draw) -> Args:
    return _with_sink(draw, _inputs(draw))


def sparse_mla_max_fwd(draw: Draw) -> Args:
    return {**sparse_mla_fwd(draw), "inf_if_empty": draw.chance(0.5)}


def sparse_mla_bwd(draw: Draw) -> Args:
    args = _with_sink(draw, _inputs(draw))
    out, lse = run_operator("sparse_mla_fwd", args)
    dout = draw.view(draw.gradient(*out.shape), "free")
    dlse = draw.view(draw.gradient(*lse.shape, dtype=torch.float32), "free") if draw.chance(0.4) else None
    out, lse = (draw.view(t, "free", repeat=False) for t in (out, lse))
    modes = {"return_dist": draw.chance(0.3), "deterministic": draw.chance(0.5)}
    return {**args, "dout": dout, "out": out, "lse": lse, "dlse": dlse, **modes}


def attn_dist(draw: Draw) -> Args:
    args = _inputs(draw)
    _, lse = run_operator("sparse_mla_fwd", args)
    if draw.chance(0.3):  # a denominator that includes more than the listed keys
        lse = torch.logaddexp(lse, draw.normal(*lse.shape) * draw.choice((1.0, 20.0)))
    if draw.chance(0.1):
        lse = lse.masked_fill(draw.uniform(*lse.shape) < 0.3, -torch.inf)
    kind = draw.choice(({}, {}, {"normalize": True}, {"per_head_block": True}))
    return {**args, "lse": draw.view(lse, "free", repeat=False), **kind}


def pack_kv_fp8(draw: Draw) -> Args:
    leading = [draw.length(300) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
    leading = draw.within(_COLUMNS, *leading)
    kv = draw.floats(*leading, draw.choice((576, 512)), name="kv")
    if draw.chance(0.15):
        for special in (torch.nan, torch.inf, -torch.inf):
            kv = kv.masked_fill(draw.uniform(*kv.shape) < 0.002, special)
        draw.notes.append("specials")
    return {"kv": draw.view(kv, "free")}


def sparse_mla_decode(draw: Draw) -> Args:
    d_qk, heads = draw.choice((576, 512)), draw.size(128)
    tokens, page = draw.choice((1, 1, 2, 3, 6)), draw.choice((1, 2, 53, 61, 64, 64, 69, 576))
    batch, topk = draw.within(_COLUMNS * tokens * max(16, heads), draw.length(321), draw.size(4096))
    (blocks,) = draw.within(64 * page, draw.length(2**14))
    topk_length = None
    if draw.chance(0.4):
        topk_length = draw.integers(-3, topk + 3, batch, tokens)
        if draw.chance(0.2):
            topk_length[:, ::2] = draw.choice((INT32_MIN, INT32_MAX, 0))
        topk_length = draw.view(topk_length, "free")
    indices = draw.view(draw.ids(batch, tokens, topk, keys=blocks * page), "dense")
    q, kv = draw.floats(batch, tokens, heads, d_qk, name="q"), draw.floats(blocks, page, 1, d_qk, name="kv")
    scale = draw.scale()
    q = draw.to_edge(q, kv, d_qk**-0.5 if scale is None else scale)
    packed = draw.chance(0.7)
    cache = reference.pack_kv_fp8(kv) if packed else kv
    if draw.chance(0.5):
        draw.notes.append("NaN where unused")
        used = decode.used_slots(indices, topk_length) & names_one_of(indices, blocks * page)
        cache = poison_cache(cache, indices[used])
        cache = draw.view(cache, repeat=False)
    else:
        cache = draw.view(cache)
    args = {"q": draw.view(q), "kv_cache": cache, "indices": indices, "sm_scale": scale, "topk_length": topk_length}
    flags = {name: draw.chance(0.3) for name in ("batch_invariant", "inf_if_empty")}
    return {**_with_sink(draw, args), **flags}


def functional_sparse_mla(draw: Draw) -> Call:
    args = _with_sink(draw, _inputs(draw))
    batch, seq, heads, _ = args["q"].shape
    which, deterministic = draw.choice(("out", "out", "both", "lse")), draw.chance(0.4)
    dout = None if which == "lse" else draw.view(draw.gradient(batch, seq, heads, 512), "free")
    dlse = None if which == "out" else draw.view(draw.gradient(batch, seq, heads, dtype=torch.float32), "free")
    args |= {"dout": dout, "dlse": dlse}

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in ("q", "kv", "attn_sink") if a[name] is not None]
        q, kv, *sink = leaves
        options = {**select(a, *_OPTIONS), "attn_sink": sink[0] if sink else None, "deterministic": deterministic}
        out, lse = functional.sparse_mla(q, kv, a["indices"], **options, return_lse=True)
        return out.detach(), lse.detach(), *gradients([out, lse], [a["dout"], a["dlse"]], leaves)

    def judge(results: Results, a: Args) -> None:
        out, lse, dq, dkv, *d_sink = results
        check("sparse_mla_fwd", (out, lse), select(a, *_FORWARD))
        dout = torch.zeros_like(out) if a["dout"] is None else a["dout"]
        d_sink = d_sink or [lse.new_empty(0)]
        saved = {"dout": dout, "out": out, "lse": lse, "deterministic": deterministic}
        check("sparse_mla_bwd", (dq, dkv, *d_sink, lse.new_empty(0)), a | saved)

    return Call("functional.sparse_mla", args, run, judge, () if deterministic else (3,), draw.notes)
