"""Random calls of sparse multi-head attention."""

import torch
from torch import Tensor

from dsa_ext import functional
from dsa_ext.testing.random_calls.call import Args, Call, Results, gradients, leaf, run_operator, select
from dsa_ext.testing.random_calls.draw import Draw
from dsa_ext.testing.tolerances import check

_OPTIONS = ("sm_scale", "causal", "q_start", "starts", "ends", "window")
_FORWARD = ("q", "k", "k_rope", "v", "indices", *_OPTIONS)


def sparse_mha_fwd(draw: Draw) -> Args:
    batch, heads = draw.choice((1, 1, 1, 2, 3)), draw.size(128)
    seq, s_kv = draw.within(5 * batch * heads, draw.length(2048), draw.length(4096))
    (topk,) = draw.within(batch * max(1, seq), draw.size(4096))
    batch = 0 if draw.chance(0.01) else batch
    options: Args = {
        "sm_scale": draw.scale(),
        "causal": draw.chance(0.6),
        "q_start": draw.choice((0, 0, max(0, s_kv - seq), 5, 100_000, 2**31 - 1, 2**40)),
        "starts": None,
        "ends": None,
        "window": None,
    }
    if draw.chance(0.3):
        options |= {"q_start": 0, **draw.bounds_of_rows(s_kv, batch, seq)}
    elif options["causal"] and draw.chance(0.4):
        options["window"] = draw.choice((1, draw.size(max(1, s_kv)), 2**40, 2**62))
    q = draw.floats(batch, seq, heads, 192, name="q")
    k, v = (draw.floats(batch, s_kv, heads, 128, name=name) for name in ("k", "v"))
    k_rope = draw.floats(batch, s_kv, 64, name="k_rope")
    indices = draw.view(draw.ids(batch, seq, topk, keys=s_kv), "dense")
    return {
        **{n: draw.view(t) for n, t in (("q", q), ("k", k), ("k_rope", k_rope), ("v", v))},
        "indices": indices,
        **options,
    }


def sparse_mha_bwd(draw: Draw) -> Args:
    args = sparse_mha_fwd(draw)
    out, lse = run_operator("sparse_mha_fwd", args)
    dout = draw.view(draw.gradient(*out.shape), "free")
    dlse = draw.view(draw.gradient(*lse.shape), "free").float() if draw.chance(0.4) else None
    out, lse = (draw.view(t, "free", repeat=False) for t in (out, lse))
    return {**args, "dout": dout, "out": out, "lse": lse, "dlse": dlse}


def sparse_mha_dist(draw: Draw) -> Args:
    args = sparse_mha_fwd(draw)
    _, lse = run_operator("sparse_mha_fwd", args)
    if draw.chance(0.3):  # a denominator that includes more than the listed keys
        lse = torch.logaddexp(lse, draw.normal(*lse.shape) * draw.choice((1.0, 20.0)))
    if draw.chance(0.1):
        lse = lse.masked_fill(draw.uniform(*lse.shape) < 0.3, -torch.inf)
    return {name: value for name, value in args.items() if name != "v"} | {"lse": draw.view(lse, "free", repeat=False)}


def functional_sparse_mha(draw: Draw) -> Call:
    """Forward and gradients through autograd."""
    args = sparse_mha_bwd(draw)
    leaves = ("q", "k", "k_rope", "v")

    def run(a: Args) -> Results:
        tensors = {name: leaf(a[name]) for name in leaves}
        call = {**select(a, *_FORWARD), **tensors}
        out, lse = functional.sparse_mha(**call, return_lse=True)
        found = gradients([out, lse], [a["dout"], a["dlse"]], list(tensors.values()))
        return out.detach(), lse.detach(), *found

    def judge(results: Results, a: Args) -> None:
        if draw.judged:
            out, lse, *found = results
            check("sparse_mha_fwd", (out, lse), select(a, *_FORWARD))
            given: dict[str, Tensor | None] = {name: a[name] for name in (*_FORWARD, "dout", "dlse")}
            check("sparse_mha_bwd", tuple(found), {**given, "out": out, "lse": lse})

    return Call("functional.sparse_mha", args, run, judge, (), draw.notes)
