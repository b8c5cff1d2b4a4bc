"""The tolerances where numbers are large, cancel, are equal or are not finite."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_ext  # noqa: F401
from dsa_ext import reference
from dsa_ext.reference.indexer import SMALLEST_MASS
from dsa_ext.reference.sparse_mla import visible_slots
from dsa_ext.testing.calls import ORDINARY, Args, with_forward
from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.tolerances import check, forward_errors, similarity_error
from dsa_ext.testing.tolerances.limits import SUM_OF_PRODUCTS


def attention(**changes: Any) -> Args:
    return {**ORDINARY["sparse_mla_fwd"](heads=4, seq=3, s_kv=40, topk=24), **changes}


def forward(args: Args) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    return out, lse


@pytest.mark.parametrize("size", [1e-40, 1e-20, 1e3, 2e4, 1e9, 1e15])
def test_the_best_key_takes_all_the_weight(size: float) -> None:
    """fp32 resolves such scores only coarsely, but their distances are larger."""
    args = attention()
    args |= {name: (args[name].double() * size).bfloat16() for name in ("q", "kv")}
    out, lse = forward(args)
    check("sparse_mla_fwd", (out, lse), args)
    if size > 1:
        with pytest.raises(AssertionError, match="out"):
            check("sparse_mla_fwd", (out.roll(1, 1), lse), args)
        with pytest.raises(AssertionError, match="lse"):
            check("sparse_mla_fwd", (out, lse * 1.001), args)
        with pytest.raises(AssertionError, match="out"):
            check("sparse_mla_fwd", (out.float().mul(1.1).bfloat16(), lse), args)


def test_scores_that_fp32_does_not_resolve() -> None:
    """Scores that differ only by rounding: any average of the values passes, but nothing larger, and no NaN."""
    args = attention()
    args["kv"] = (args["kv"][:, :1] * 1e9).expand_as(args["kv"]).clone()
    args["q"] = args["q"] * 1e9
    args["kv"][..., 512:] += 1e6 * torch.randn(1, 40, 1, 64).bfloat16()
    out, lse = forward(args)
    check("sparse_mla_fwd", (out, lse), args)
    for wrong in (24 * out, out * math.nan):
        with pytest.raises(AssertionError, match="out"):
            check("sparse_mla_fwd", (wrong, lse), args)


def test_scores_beyond_fp32_free_their_own_rows_alone() -> None:
    args = attention()
    args["q"][:, 1] = 3e38
    out, lse = forward(args)
    for tensor in (out, lse):
        tensor[:, 1] = math.nan
    check("sparse_mla_fwd", (out, lse), args)
    out[:, 0] = math.nan
    with pytest.raises(AssertionError, match="out"):
        check("sparse_mla_fwd", (out, lse), args)


@pytest.mark.parametrize("where", ["q", "kv"])
def test_a_nan_score_is_not_an_empty_row(where: str) -> None:
    args = attention()
    args["indices"][0, 1] = -1
    args["indices"][0, 1, 0, 5] = 7
    args["indices"][0, 2] = -1  # an empty row
    args[where] = args[where].clone()
    args[where][0, 1 if where == "q" else 7] = math.nan
    out, lse = forward(args)
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan().all()
    assert (lse[0, 2] == -math.inf).all()
    check("sparse_mla_fwd", (out, lse), args)
    for wrong_out, wrong_lse in ((0.0, math.nan), (math.nan, -math.inf), (0.0, -math.inf)):
        wrong = out.clone(), lse.clone()
        wrong[0][0, 1], wrong[1][0, 1] = wrong_out, wrong_lse
        with pytest.raises(AssertionError, match="elements with the wrong one of finite"):
            check("sparse_mla_fwd", wrong, args)
    wrong = out.clone(), lse.clone()
    wrong[1][0, 2] = math.nan
    with pytest.raises(AssertionError, match="lse"):
        check("sparse_mla_fwd", wrong, args)


@pytest.mark.parametrize("op", ["block_sparse_attn_fwd", "coarse_attn_fwd"])
def test_a_nan_score_is_not_an_empty_row_of_blocks(op: str) -> None:
    args = ORDINARY[op]()
    args["q"][0, 0, 3] = math.nan
    if op == "block_sparse_attn_fwd":
        args["q2k_num"].fill_(3)
        args["kv_block_size"].fill_(64)
        args["q2k_index"].zero_()
    out, lse, *scores = getattr(torch.ops.dsa, op)(**args)
    assert out[0, 0, 3].isnan().all()
    assert lse[0, 0, 3].isnan()
    assert out.isnan().sum() == 64
    check(op, (out, lse, *scores), args)
    with pytest.raises(AssertionError, match="lse"):
        check(op, (out, lse.nan_to_num(-math.inf), *scores), args)


def test_padded_slots_of_a_nan_row_have_no_probability() -> None:
    args = with_forward("attn_dist", attention())
    args["indices"][..., ::3] = -1
    args["lse"][0, 1, 2] = math.nan
    dist = torch.ops.dsa.attn_dist(**args)
    visible = visible_slots(args["indices"], 40, False, 0, 1, None)
    assert torch.equal(dist.isnan().squeeze(2)[0, 1], visible[0, 1, 0])
    check("attn_dist", dist, args)
    with pytest.raises(AssertionError):
        check("attn_dist", dist.nan_to_num(0.5), args)


def test_a_query_with_one_key_has_no_gradient_but_noise() -> None:
    args = attention()
    args["indices"][..., 1:] = -1
    args["dout"] = torch.randn(1, 3, 4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    args = with_forward("sparse_mla_bwd", args)
    dq, dkv, *others = torch.ops.dsa.sparse_mla_bwd(**args)
    check("sparse_mla_bwd", (dq, dkv, *others), args)
    noise = 1e-6 * args["kv"][:, args["indices"][0, :, 0, 0].long()]
    check("sparse_mla_bwd", (dq + noise, dkv, *others), args)
    with pytest.raises(AssertionError, match="dq"):
        check("sparse_mla_bwd", (torch.full_like(dq, 1e-2), dkv, *others), args)


def test_a_term_whose_score_is_near_zero_may_be_there_or_not() -> None:
    args = ORDINARY["indexer_logits_bwd"]()
    args["q"][3, 2, 1::2] = args["q"][3, 2, ::2]
    args["k"][5, 1::2] = -args["k"][5, ::2]  # cancels exactly, but not with every order of rounding
    args["ends"].fill_(70)
    dq, dk, dweights = torch.ops.dsa.indexer_logits_bwd(**args)
    term = args["dlogits"][3, 5] * args["weights"][3, 2] * args["k"][5].float()
    assert float(term.abs().max()) > 0
    both = dq.clone()
    both[3, 2] += term.bfloat16()
    check("indexer_logits_bwd", (both, dk, dweights), args)
    other = dq.clone()
    other[4, 2] += term.bfloat16() * 8
    with pytest.raises(AssertionError, match="dq"):
        check("indexer_logits_bwd", (other, dk, dweights), args)


def dense_loss_of(error_of_logits: float) -> tuple[Args, tuple[Tensor, ...]]:
    """Arguments of indexer_dense_loss with three keys, and its results in float64, rounded once. One key is large, and
    its logits are sums of large terms that cancel. The logits get an error, a multiple of the bound of fp32 sums."""
    args = ORDINARY["indexer_dense_loss"](seq=40, s_kv=40, heads=64)
    args |= {"k": args["k"][:3].clone(), "main_kv": args["main_kv"][:3], "q_start": 3}
    args["k"][1] *= 1e3
    q, k, weights = (args[name].double() for name in ("q", "k", "weights"))
    terms = weights * (q @ k[1]).relu()
    at = terms.abs().argmax(1, keepdim=True)
    factor = 1 - terms.sum(1, keepdim=True) / terms.gather(1, at)
    args["weights"] = (weights * torch.ones_like(weights).scatter(1, at, factor)).float()
    args = with_forward("indexer_dense_loss", args)

    a = {name: value.double() if isinstance(value, Tensor) else value for name, value in args.items()}
    bounds = {"starts": torch.zeros(40, dtype=torch.int32), "ends": torch.full((40,), 3, dtype=torch.int32)}
    index = {"q": a["q"], "k": a["k"], "weights": a["weights"], **bounds}
    noise = SUM_OF_PRODUCTS * (a["weights"].abs()[:, None] @ (a["q"].abs() @ a["k"].abs().mT))[:, 0]
    assert noise[:, 1].median() > 1e-2
    assert (noise[:, ::2] < 1e-4).all()
    ids = torch.arange(3, dtype=torch.int32).expand(1, 40, 1, 3)
    p = reference.attn_dist(a["main_q"][None], a["main_kv"][None, :, None], ids, a["lse"][None], causal=False)
    logits = reference.indexer_logits(**index) + error_of_logits * noise
    loss, dlogits = reference.indexer_loss(logits, p[0, :, 0])
    dq, dk, dweights = reference.indexer_logits_bwd(dlogits, **index)
    return args, (loss.sum().float(), dq.bfloat16(), dk.bfloat16(), dweights.float())


@pytest.mark.parametrize("sign", [-1, 1])
def test_one_uncertain_score_makes_all_probabilities_of_its_row_uncertain(sign: int) -> None:
    """The log-sum-exp has its error, and with it the gradients of queries and heads that do not see that key."""
    for error in (0.0, 0.9 * sign):
        args, results = dense_loss_of(error)
        check("indexer_dense_loss", results, args)
    args, results = dense_loss_of(1.5 * sign)
    with pytest.raises(AssertionError, match="dq: largest error"):
        check("indexer_dense_loss", results, args)


def test_denormal_masses_have_the_resolution_of_denormal_numbers() -> None:
    mass, scale = torch.tensor([[3e-43], [4e-44]]), 1 / SMALLEST_MASS
    for error, right in ((0.9, True), (3.0, False)):
        loss = (mass.double() + error * 2.0**-149) * scale * (mass.double() * scale).log()
        with nullcontext() if right else pytest.raises(AssertionError, match="loss: largest error"):
            check("indexer_loss", (loss[:, 0].float(), 0 * mass), {"scores": 0 * mass, "p": mass})


@pytest.mark.parametrize("op", ["indexer_scores_bwd", "indexer_logits_bwd"])
@pytest.mark.parametrize("where", ["k", "q", "weights"])
def test_nan_may_reach_a_group_of_queries_and_no_other(op: str, where: str) -> None:
    """A group is 16 queries of 8 heads; only query 3 sees key 5."""
    args = ORDINARY[op](seq=40)
    if op == "indexer_logits_bwd":
        starts, ends = torch.full((40,), 10, dtype=torch.int32), torch.full((40,), 30, dtype=torch.int32)
        starts[3] = 5
        args |= {"starts": starts, "ends": ends}
    else:
        args["indices"] = torch.randint(10, 30, (40, 30), generator=torch.Generator().manual_seed(0)).int()
        args["indices"][3] = 5
    args[where] = args[where].clone()
    args[where][{"k": 5, "q": 3, "weights": 3}[where]] = math.nan
    dq, dk, dweights = getattr(torch.ops.dsa, op)(**args)
    check(op, (dq, dk, dweights), args)

    def spread(queries: slice, keys: slice) -> tuple[Tensor, ...]:
        results = dq.clone(), dk.clone(), dweights.clone()
        for result, rows in zip(results, (queries, keys, queries), strict=True):
            result[rows] = math.nan
        return results

    none = slice(0, 0)
    check(op, spread(slice(0, 16), none) if where == "k" else spread(none, slice(10, 30)), args)
    beyond = [spread(none, slice(40, 41)), spread(slice(16, 17), none)]
    beyond.append(spread(none, slice(10, 30)) if where == "k" else spread(slice(0, 16), none))
    for wrong in beyond:
        with pytest.raises(AssertionError, match="elements with the wrong one of finite"):
            check(op, wrong, args)


@pytest.mark.parametrize("op", ["sparse_mla_bwd", "block_sparse_attn_bwd"])
@pytest.mark.parametrize("size", [2.0**23, 2.0**30, 1e15])
def test_gradients_of_large_scores_are_finite(op: str, size: float) -> None:
    """Although fp32 does not resolve exp(score - lse)."""
    args = ORDINARY[op]()
    args["q"] = (args["q"].double() * size).bfloat16()
    args = with_forward(op, {name: value for name, value in args.items() if name not in ("out", "lse")})
    assert args["lse"].abs().amax() > size
    results = getattr(torch.ops.dsa, op)(**args)
    assert all(result.isfinite().all() for result in results)
    check(op, results, args)
    for i in range(2):
        if not results[i].any():  # how sums of scores are rounded depends on the machine: all exp(score - lse) may be 0
            continue
        wrong = [result.clone() for result in results]
        wrong[i].view(-1)[int(wrong[i].abs().argmax())] = math.inf
        with pytest.raises(AssertionError, match="elements with the wrong one of finite"):
            check(op, tuple(wrong), args)


def test_lse_of_nan_and_infinity_may_be_either() -> None:
    args = attention()
    args["indices"][0, :, 0] = torch.arange(24, dtype=torch.int32)
    args["q"], args["kv"] = args["q"].abs(), args["kv"].clone()
    args["kv"][0, 3] = math.inf
    out, lse = forward(args)
    assert (lse == math.inf).all()
    check("sparse_mla_fwd", (out, lse), args)
    with pytest.raises(AssertionError, match="lse"):
        check("sparse_mla_fwd", (out, lse * math.nan), args)
    args["kv"][0, 4] = math.nan
    for either in (math.inf, math.nan):
        check("sparse_mla_fwd", (out, torch.full_like(lse, either)), args)


@pytest.mark.parametrize("lse", [-90.0, 90.0, 1e9])
def test_shares_of_sinks_beyond_fp32(lse: float) -> None:
    """A row with almost all of its weight on the sink, and one whose lse fp32 resolves only coarsely."""
    args = attention()
    args["kv"] = args["kv"][:, :1].expand(-1, 40, -1, -1) * 30
    score = (args["q"].double() @ args["kv"][0, 0, 0].double()).amax() * 576**-0.5
    args["q"] = (args["q"].double() * (lse / score)).bfloat16()
    args["attn_sink"] = torch.linspace(-3, 3, 4)
    out, lse_ = forward(args)
    flushed = out.masked_fill(out.abs() < torch.finfo(torch.float32).tiny, 0)
    check("sparse_mla_fwd", (flushed, lse_), args)
    with pytest.raises(AssertionError, match="out"):
        check("sparse_mla_fwd", (out + 0.1 * out.abs().amax(), lse_), args)


@pytest.mark.parametrize("rows", [1, 40])
def test_one_row_of_a_gradient_may_be_rounded_as_one(rows: int) -> None:
    """All terms of one key's gradient may have the same rounding error of 2^-8; the gradients of many keys may not."""
    args = ORDINARY["indexer_scores_bwd"](seq=rows, s_kv=600, slots=300)
    ids = 2 * torch.arange(300)
    args["indices"] = torch.where((ids == 0) | (rows > 1), ids, -1).int().expand(rows, 300).contiguous()
    dq, dk, dweights = torch.ops.dsa.indexer_scores_bwd(**args)
    off = (dk.float() * (1 + 2.0**-8)).bfloat16()
    assert similarity_error(off, dk) > 7e-6
    if rows == 1:
        check("indexer_scores_bwd", (dq, off, dweights), args)
    else:
        with pytest.raises(AssertionError, match="dk: similarity"):
            check("indexer_scores_bwd", (dq, off, dweights), args)


def test_arguments_that_no_operator_has() -> None:
    with pytest.raises(ValueError, match=r"sparse_mla_fwd has no arguments \['scale'\]"):
        check("sparse_mla_fwd", forward(attention()), attention(scale=1.0))


def test_shares_that_a_sink_makes_vanish_may_be_0() -> None:
    """fp32 flushes 1 / (1 + exp(sink - lse)) to 0 below its smallest normal number, before it is multiplied."""
    args = ORDINARY["sparse_mla_fwd"]()
    heads = args["q"].shape[2]
    _, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    args["attn_sink"] = torch.full((heads,), float(lse[lse.isfinite()].max()) + 88)
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    check("sparse_mla_fwd", (torch.zeros_like(out), lse), args)
    args |= {"out": torch.zeros_like(out), "lse": lse, "dout": torch.full_like(out, 30)}
    dq, dkv, *others = torch.ops.dsa.sparse_mla_bwd(**args)
    check("sparse_mla_bwd", (torch.zeros_like(dq), torch.zeros_like(dkv), *others), args)


@pytest.mark.parametrize(("distance", "may_vanish"), [(65.0, True), (50.0, False)])
def test_block_sparse_probabilities_that_may_vanish(distance: float, may_vanish: bool) -> None:
    """The kernel's maximum may lag by 40 powers of 2: moving it may multiply what is below 2^-86 by 0."""
    args = ORDINARY["block_sparse_attn_fwd"]()
    args["q2k_index"].zero_()
    args["q2k_num"].fill_(1)
    args["kv_block_size"].fill_(64)
    args["q"].zero_()[..., 0] = 8
    args["k"].zero_()[:, :, 0, 0] = distance / 8 * args["q"].shape[3] ** 0.5
    args["v"][:, :, 0] = 0
    out, lse = torch.ops.dsa.block_sparse_attn_fwd(**args)
    check("block_sparse_attn_fwd", (out, lse), args)
    assert out.any()
    if may_vanish:
        check("block_sparse_attn_fwd", (torch.zeros_like(out), lse), args)
    else:
        with pytest.raises(AssertionError, match="out"):
            check("block_sparse_attn_fwd", (torch.zeros_like(out), lse), args)


def test_equal_probabilities_have_one_rounding() -> None:
    """Each of 120 equal keys has the probability 1 / 120, which bf16 rounds up by 0.34 %."""
    q, k = torch.zeros(1, 2, 64, 128).bfloat16(), torch.randn(1, 1, 120, 128).bfloat16()
    v = torch.randn(1, 1, 1, 128, generator=torch.Generator().manual_seed(0)).bfloat16().expand(1, 1, 120, 128)
    args = {"q": q, "k": k, "v": v.contiguous(), "sm_scale": 1e-30}
    out, *rest = torch.ops.dsa.coarse_attn_fwd(**args)
    p = torch.tensor(1 / 120)
    rounded = (out.double() * float(p.bfloat16() / p)).to(out.dtype)
    assert similarity_error(rounded, out) > 7e-6
    check("coarse_attn_fwd", (rounded, *rest), args)
    with pytest.raises(AssertionError, match="similarity"):
        check("coarse_attn_fwd", ((out.double() * 1.012).to(out.dtype), *rest), args)


def test_equal_queries_have_one_rounding() -> None:
    """The gradient of a score is rounded to bf16 once for all heads; with equal queries the errors do not cancel."""
    args = ORDINARY["indexer_scores_bwd"](seq=40, heads=64, dim=128, s_kv=3000)
    args["q"] = args["q"][:1, :1].abs().expand_as(args["q"])
    args["k"] = args["k"].abs()
    args["weights"] = torch.ones_like(args["weights"])
    exact = torch.ops.dsa.indexer_scores_bwd(**args)
    args_of_kernel = args | {"dscores": args["dscores"].bfloat16().float()}
    rounded = torch.ops.dsa.indexer_scores_bwd(**args_of_kernel)
    check("indexer_scores_bwd", rounded, args)
    check("indexer_scores_bwd", exact, args)
    with pytest.raises(AssertionError, match="dk"):
        check("indexer_scores_bwd", (rounded[0], rounded[1] * 1.02, rounded[2]), args)


def test_equal_rows_of_scores_have_one_rounding() -> None:
    """With small keys and equal rows of dout all queries have nearly the same dS, and so the same rounding error."""
    args = ORDINARY["block_sparse_attn_bwd"](n_q=640, n_kv=64, dim=128)
    args["k"] = args["k"] * 1e-3
    args["dout"] = args["dout"][:, :, :1].expand_as(args["dout"])
    args = with_forward("block_sparse_attn_bwd", args)
    check("block_sparse_attn_bwd", torch.ops.dsa.block_sparse_attn_bwd(**args), args)


def test_a_scale_of_zero_hides_no_overflow() -> None:
    args = with_forward("block_sparse_attn_bwd", ORDINARY["block_sparse_attn_bwd"]() | {"sm_scale": 0.0})
    args["q"] = args["q"].sign() * 1e38
    dq, dk, dv = torch.ops.dsa.block_sparse_attn_bwd(**args)
    seen = (dv != 0).any(-1, keepdim=True)
    check("block_sparse_attn_bwd", (dq, dk.masked_fill(seen, torch.nan), dv), args)
    with pytest.raises(AssertionError, match="dq"):
        check("block_sparse_attn_bwd", (dq + 1, dk, dv), args)


def test_tolerances_notice_a_wrong_result() -> None:
    inputs = make_inputs()
    out, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
    for wrong in ((out * 1.01, lse), (out, lse + 1e-3), (out.roll(1, -1), lse), (out, lse.masked_fill(lse < 0, -9.0))):
        with pytest.raises(AssertionError):
            forward_errors(*wrong, inputs.q, inputs.kv, inputs.indices).check()
    empty = inputs.indices.new_full(inputs.indices.shape, -1)
    with pytest.raises(AssertionError):
        forward_errors(out, lse, inputs.q, inputs.kv, empty).check()
    assert similarity_error(out, out) == 0
    assert similarity_error(out, -out) == 2


def test_lse_tolerance_with_many_keys_is_relative() -> None:
    inputs = make_inputs(seq=2, s_kv=2048, heads=4, topk=2048)
    out, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, causal=False)
    assert ((lse - 8).abs() < 1).all()
    forward_errors(out, lse * (1 + 2e-5), inputs.q, inputs.kv, inputs.indices, causal=False).check()
    with pytest.raises(AssertionError):
        forward_errors(out, lse * (1 + 1e-4), inputs.q, inputs.kv, inputs.indices, causal=False).check()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("scale", [None, -0.1])
def test_lse_tolerance_near_zero_is_the_resolution_of_fp32(scale: float | None, sign: int) -> None:
    """One visible key whose products with q cancel; a hidden key with large products does not widen the limit."""
    q = torch.ones(1, 1, 2, 576)
    kv = torch.ones(1, 2, 1, 576)
    kv[..., ::2] = -1
    kv[:, 1] *= 1e6
    indices = torch.tensor([0, 1], dtype=torch.int32).view(1, 1, 1, 2)
    out, lse = reference.sparse_mla_fwd(q, kv, indices, sm_scale=scale)
    assert (lse == 0).all()
    resolution = 2**-23 * 576 * (576**-0.5 if scale is None else abs(scale))
    forward_errors(out, lse + sign * (2 * resolution + 0.9e-6), q, kv, indices, sm_scale=scale).check()
    with pytest.raises(AssertionError):
        forward_errors(out, lse + sign * 3 * resolution, q, kv, indices, sm_scale=scale).check()
