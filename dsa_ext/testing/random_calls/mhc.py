"""Random calls of the hyper-connection operators."""

import torch

from dsa_ext import functional
from dsa_ext.testing.random_calls.call import Args, Call, Results, gradients, leaf, run_operator, select
from dsa_ext.testing.random_calls.draw import Draw
from dsa_ext.testing.tolerances import check

_PARAMETERS = ("x", "phi", "alpha", "bias", "gamma")
_GATES = ("h_post", "inv_rms", "h_mix", "h_pre")


def _sizes(draw: Draw) -> tuple[int, int, int, int]:
    """Batch, tokens, streams, columns."""
    streams = draw.choice((2, 4))
    batch = draw.choice((1, 1, 2, 3))
    seq, count = draw.within(128 * batch * streams * 8, draw.length(4096), draw.size(64))
    return batch, seq, streams, 128 * count


def _pre(draw: Draw) -> Args:
    batch, seq, streams, columns = _sizes(draw)
    mixed, flat = streams * streams + 2 * streams, streams * columns
    x = draw.floats(batch, seq, streams, columns, name="x")
    phi = draw.normal(mixed, flat) * flat**-0.5 * draw.choice((1.0, 1.0, 0.01, 8.0))
    alpha, bias = draw.normal(3) * draw.choice((0.01, 1.0, 5.0)), draw.normal(mixed) * draw.choice((1.0, 5.0))
    gamma = draw.view(1 + draw.normal(flat) / 4, "free") if draw.chance(0.6) else None
    x, phi, alpha, bias = (draw.view(t, "free") for t in (x, phi, alpha, bias))
    # With eps = 0 a token of zeros is divided by 0.
    least = float(x.float().square().mean((2, 3)).min()) if x.numel() else 0.0
    eps = draw.choice((1e-6, 1e-6, 1e-3, 0.25, 0.0 if least > 1e-3 else 1e-6))
    return {"x": x, "phi": phi, "alpha": alpha, "bias": bias, "gamma": gamma, "eps": eps}


def _upstream(draw: Draw, args: Args) -> Args:
    batch, seq, streams, columns = args["x"].shape
    dh_post = draw.gradient(batch, seq, streams, dtype=torch.float32)
    dh_res = draw.gradient(batch, seq, streams, streams, dtype=torch.float32)
    gradients = {"dh_in": draw.gradient(batch, seq, columns), "dh_post": dh_post, "dh_res": dh_res}
    return {name: draw.view(gradient, "free") for name, gradient in gradients.items()}


def mhc_pre_fwd(draw: Draw) -> Args:
    return _pre(draw)


def mhc_pre_bwd(draw: Draw) -> Args:
    args = _pre(draw)
    _, h_post, _, *others = run_operator("mhc_pre_fwd", args)
    del args["bias"]
    gates = zip(_GATES, (h_post, *others), strict=True)
    return {**args, **_upstream(draw, args), **{name: draw.view(t, "free", repeat=False) for name, t in gates}}


def functional_mhc_pre(draw: Draw) -> Call:
    args = _pre(draw)
    args |= _upstream(draw, args)

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in _PARAMETERS if a[name] is not None]
        x, phi, alpha, bias, *gamma = leaves
        results = functional.mhc_pre(x, phi, alpha, bias, gamma[0] if gamma else None, a["eps"])
        upstream = [a["dh_in"], a["dh_post"], a["dh_res"]]
        return *(t.detach() for t in results), *gradients(list(results), upstream, leaves)

    def judge(results: Results, a: Args) -> None:
        parameters = select(a, *_PARAMETERS, "eps")
        forward = run_operator("mhc_pre_fwd", parameters)  # with the results that the function does not return
        check("mhc_pre_fwd", (*results[:3], *forward[3:]), parameters)
        grads = results[3:] if a["gamma"] is not None else (*results[3:], results[1].new_empty(0))
        gates = dict(zip(_GATES, (results[1], *forward[3:]), strict=True))
        check(
            "mhc_pre_bwd",
            grads,
            {**select(a, "x", "phi", "alpha", "gamma", "eps", "dh_in", "dh_post", "dh_res"), **gates},
        )

    return Call("functional.mhc_pre", args, run, judge, (), draw.notes)


def mhc_post_fwd(draw: Draw) -> Args:
    batch, seq, streams, columns = _sizes(draw)
    x, y = draw.floats(batch, seq, streams, columns, name="x"), draw.floats(batch, seq, columns, name="y")
    h_post = 2 * draw.uniform(batch, seq, streams)
    h_res = draw.normal(batch, seq, streams, streams) * draw.choice((1.0, 1.0, 0.1, 10.0, 60.0))
    x, y, h_post, h_res = (draw.view(t, "free") for t in (x, y, h_post, h_res))
    return {"x": x, "y": y, "h_post": h_post, "h_res": h_res, "iterations": draw.choice((20, 20, 1, 2, 5, 100))}


def mhc_post_bwd(draw: Draw) -> Args:
    args = mhc_post_fwd(draw)
    return {**args, "dout": draw.view(draw.gradient(*args["x"].shape), "free")}


def functional_mhc_post(draw: Draw) -> Call:
    args = mhc_post_bwd(draw)

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in ("x", "y", "h_post", "h_res")]
        x, y, h_post, h_res = leaves
        out = functional.mhc_post(x, y, h_post, h_res, a["iterations"])
        return out.detach(), *gradients([out], [a["dout"]], leaves)

    def judge(results: Results, a: Args) -> None:
        check("mhc_post_fwd", results[:1], select(a, "x", "y", "h_post", "h_res", "iterations"))
        check("mhc_post_bwd", results[1:], a)

    return Call("functional.mhc_post", args, run, judge, (), draw.notes)
