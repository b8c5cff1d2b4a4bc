"""The judge of results: what it must let pass, and what it must not."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_ext  # noqa: F401
from dsa_ext.reference.sparse_mla import visible_slots
from dsa_ext.testing.calls import FP8, ORDINARY, Args, with_forward
from dsa_ext.testing.tolerances import OPS, check, errors, expectations, similarity_error
from dsa_ext.testing.tolerances.limits import BF16_SIMILARITY, effective_count, similarity_limit

#: Sizes for which every result has enough elements to judge its similarity.
SIZES: dict[str, dict[str, Any]] = {
    "sparse_mla_bwd": {"heads": 128},
    "indexer_logits_bwd": {"seq": 40, "heads": 64},
    "indexer_scores_bwd": {"seq": 40, "heads": 64},
    "indexer_loss": {"rows": 90},
    "indexer_dense_loss": {"seq": 80, "s_kv": 100},
    "mhc_pre_fwd": {"tokens": 70},
    "mhc_pre_bwd": {"tokens": 70},
    "mhc_post_bwd": {"tokens": 70},
}
EXACT = {"topk_select", "indexer_topk", "block_select", "act_quant"}
#: Results of few numbers, whose similarity is not judged; dh_res is what nearly cancels.
FEW = {"d_sink", "loss", "dalpha", "dbias", "lse", "dh_res"}


def call(op: str) -> tuple[Args, list[Tensor]]:
    args = ORDINARY[op](**SIZES.get(op, {}))
    if op == "sparse_mla_bwd":
        args = with_forward(op, {**args, "attn_sink": torch.linspace(-3, 3, args["q"].shape[2])})
    results = getattr(torch.ops.dsa, op)(**args)
    return args, [results] if isinstance(results, Tensor) else list(results)


every_op = pytest.mark.parametrize("op", ORDINARY)


def test_every_operator_is_judged() -> None:
    names = {name.removeprefix("dsa::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("dsa::")}
    public = {name for name in names if not name.startswith("_") and "." not in name}
    assert public == set(OPS) == set(ORDINARY)


@every_op
def test_fp32_results_pass_and_similarity_is_judged(op: str) -> None:
    """The CPU computes in fp32 and rounds to bf16, so that half of each limit is more than enough of the similarity."""
    args, results = call(op)
    found = check(op, tuple(results), args)
    assert max(found.values()) <= 1
    similarity = {name.split(":")[0]: value for name, value in found.items() if "similarity" in name}
    assert all(value <= 0.5 for value in similarity.values())
    if op not in EXACT:
        judged = {measure.result for measure in errors(op, tuple(results), args).measures}
        assert judged - similarity.keys() <= FEW


@every_op
def test_bounds_of_ordinary_calls_are_narrow(op: str) -> None:
    """No element that anything would do for, and none whose bound is more than a part of its row's largest."""
    if op in EXACT:
        return
    args, results = call(op)
    for expected in expectations(op, args):
        name, value = expected.name, expected.value
        assert expected.free is None or not expected.free.any(), name
        if name == "dh_res" or not value.numel():
            continue
        largest = value.abs().masked_fill(~value.isfinite(), 0)
        largest = largest.amax(-1, keepdim=True) if value.dim() else largest
        narrow = expected.bound <= (0.1 if results[0].dtype == torch.bfloat16 or name[0] == "d" else 0.01) * largest
        passes = narrow | ~value.isfinite() | (largest <= 1e-3 * largest.amax())
        # A term of the indexer's gradients is open where its score is near 0, which is rare.
        assert passes.double().mean() > 0.995 if op.startswith("indexer") else passes.all(), name


def planted(result: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The result with an error of each kind."""
    flat = result.double()
    flat = flat.masked_fill(~flat.isfinite(), 0)
    at = int(flat.abs().argmax())

    def changed(value: float) -> Tensor:
        copy = (
            result.float().contiguous() if result.dtype == FP8 else result.clone(memory_format=torch.contiguous_format)
        )
        copy.view(-1)[at] = value
        return copy.to(result.dtype)

    if not result.is_floating_point():
        yield "one element", changed(float(flat.view(-1)[at]) - 1)
        return
    yield "one element", changed(float(flat.view(-1)[at]) * 0.75)
    for value in (math.nan, math.inf, -math.inf):
        yield f"a {value}", changed(value)
    yield "sign", (-result.float()).to(result.dtype)
    if result.dim() > 1 and result.shape[-2] > 1:
        yield "rows in another order", result.roll(1, -2) if result.dtype != FP8 else result.float().roll(1, -2).to(FP8)
    if result.dim() > 1:
        row = result.float().clone().contiguous()
        row.view(-1, row.shape[-1])[at // row.shape[-1]] = 0
        yield "a row of zeros", row.to(result.dtype)


@every_op
def test_planted_errors(op: str) -> None:
    args, results = call(op)
    for i, result in enumerate(results):
        if not result.numel() or result.shape == (1,):
            continue
        for name, wrong in planted(result):
            if torch.equal(wrong.float().nan_to_num(9), result.float().nan_to_num(9)):
                continue
            found = errors(op, (*results[:i], wrong, *results[i + 1 :]), args)
            assert any(measure.fraction > 1 for measure in found.measures), f"result {i}: {name} passed"


@every_op
def test_one_percent_is_too_much(op: str) -> None:
    """But for the sums of few numbers, gradients whose elements may be off by 4 % of their row's largest."""
    args, results = call(op)
    names = list(dict.fromkeys(measure.result for measure in errors(op, tuple(results), args).measures))
    for i, (name, result) in enumerate(zip(names, results, strict=False)):
        if op in EXACT or not result.numel() or name in ("d_sink", "dh_res"):
            continue
        with pytest.raises(AssertionError, match=f"{name}: "):
            check(op, (*results[:i], (result.float() * 1.01).to(result.dtype), *results[i + 1 :]), args)


EMPTY = [
    *((op, {size: 0}) for op in ("sparse_mla_fwd", "sparse_mla_bwd", "attn_dist") for size in ("seq", "s_kv", "heads")),
    *((op, {size: 0}) for op in ("block_sparse_attn_fwd", "block_sparse_attn_bwd") for size in ("n_q", "n_kv")),
    *(("coarse_attn_fwd", {size: 0}) for size in ("n_q", "n_kv")),
    *(
        (op, {size: 0})
        for op in ORDINARY
        if op.startswith(("indexer_logits", "indexer_sc"))
        for size in ("seq", "s_kv")
    ),
    *((op, {"slots": 0}) for op in ("indexer_scores", "indexer_scores_bwd", "indexer_loss")),
    *(("indexer_topk", {size: 0}) for size in ("seq", "s_kv")),
    ("indexer_dense_loss", {"seq": 0}),
    ("indexer_loss", {"rows": 0}),
    *(("topk_select", {size: 0}) for size in ("rows", "columns")),
    *(("fp8_gemm", {size: 0}) for size in ("rows", "width", "columns")),
    *((op, {"tokens": 0}) for op in ORDINARY if op.startswith("mhc")),
]


@pytest.mark.parametrize(("op", "sizes"), EMPTY, ids=str)
def test_empty_tensors(op: str, sizes: dict[str, int]) -> None:
    args = ORDINARY[op](**sizes)
    check(op, getattr(torch.ops.dsa, op)(**args), args)


def attention(**changes: Any) -> Args:
    return {**ORDINARY["sparse_mla_fwd"](heads=4, seq=3, s_kv=40, topk=24), **changes}


def forward(args: Args) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    return out, lse


@pytest.mark.parametrize("size", [1e-40, 1e-20, 1e3, 2e4, 1e9, 1e15])
def test_the_best_key_takes_all_the_weight(size: float) -> None:
    """Scores of which fp32 does not resolve many units, but which lie further apart than that."""
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
    """Equal but for their rounding: any average will do, nothing larger than the largest value, and no NaN."""
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
    dq, dkv, d_sink = torch.ops.dsa.sparse_mla_bwd(**args)
    check("sparse_mla_bwd", (dq, dkv, d_sink), args)
    noise = 1e-6 * args["kv"][:, args["indices"][0, :, 0, 0].long()]
    check("sparse_mla_bwd", (dq + noise, dkv, d_sink), args)
    with pytest.raises(AssertionError, match="dq"):
        check("sparse_mla_bwd", (torch.full_like(dq, 1e-2), dkv, d_sink), args)


def test_a_term_whose_score_is_near_zero_may_be_there_or_not() -> None:
    args = ORDINARY["indexer_logits_bwd"]()
    args["q"][3, 2, 1::2] = args["q"][3, 2, ::2]
    args["k"][5, 1::2] = -args["k"][5, ::2]  # cancels exactly, but not with every rounding
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


@pytest.mark.parametrize("op", ["indexer_scores_bwd", "indexer_logits_bwd"])
@pytest.mark.parametrize("where", ["k", "q", "weights"])
def test_nan_may_reach_a_group_of_queries_and_no_other(op: str, where: str) -> None:
    """Groups are of 16 queries of 8 heads; query 3 is the first that sees key 5, the only one that sees it is 3."""
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
    """Though fp32 does not resolve what exp(score - lse) is."""
    args = ORDINARY[op]()
    args["q"] = (args["q"].double() * size).bfloat16()
    args = with_forward(op, {name: value for name, value in args.items() if name not in ("out", "lse")})
    assert args["lse"].abs().amax() > size
    results = getattr(torch.ops.dsa, op)(**args)
    assert all(result.isfinite().all() for result in results)
    check(op, results, args)
    for i in range(2):
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
    """Of a row that has nothing but a sink, nearly, and of one whose lse is not known to a few times."""
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


def test_similarity_of_few_numbers() -> None:
    """Roundings of so few numbers may all be the largest that there are; those of many may not."""
    assert similarity_limit(5e-6, BF16_SIMILARITY, 1) == 2.0**-16 / 2
    assert similarity_limit(7e-6, 3 * BF16_SIMILARITY, 300) == 7e-6
    assert 7e-6 < similarity_limit(7e-6, 3 * BF16_SIMILARITY, 30) < 2e-5
    assert similarity_limit(7e-6, 3 * BF16_SIMILARITY, 1) == (3 * 2.0**-8) ** 2 / 2
    assert effective_count(torch.tensor([3.0, 3.0, 0.0])) == 2
    assert effective_count(torch.tensor([1e300, 1.0], dtype=torch.float64)) == 1
    assert effective_count(torch.zeros(4)) == 0


@pytest.mark.parametrize("rows", [1, 40])
def test_one_row_of_a_gradient_may_be_rounded_as_one(rows: int) -> None:
    """All terms of a key's gradient are products of one rounded number: off by 2^-8 of it, but not for many keys."""
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


def test_forms_of_results() -> None:
    args = ORDINARY["sparse_mla_fwd"]()
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    check("sparse_mla_fwd", (out, lse), args)
    with pytest.raises(AssertionError, match=r"results of sparse_mla_fwd must be bfloat16 .*, got float32"):
        check("sparse_mla_fwd", (out.float(), lse), args)
    with pytest.raises(AssertionError, match=r"results of sparse_mla_fwd must be"):
        check("sparse_mla_fwd", out, args)
    with pytest.raises(ValueError, match="no operator 'sparse_mla'; there are sparse_mla_fwd"):
        check("sparse_mla", out, args)
    with pytest.raises(ValueError, match=r"sparse_mla_fwd needs the arguments \['kv'\]"):
        check("sparse_mla_fwd", (out, lse), {name: t for name, t in args.items() if name != "kv"})


def test_similarity_error() -> None:
    x = torch.linspace(-3, 5, 100, dtype=torch.float64)
    assert similarity_error(x, x) == 0
    assert similarity_error(x, -x) == pytest.approx(2)
    assert similarity_error(x * 1.01, x) == pytest.approx(0.01**2 / (1 + 1.01**2))
    assert similarity_error(torch.zeros(3), torch.zeros(3)) == 0


def test_arguments_that_no_operator_has() -> None:
    with pytest.raises(ValueError, match=r"sparse_mla_fwd has no arguments \['scale'\]"):
        check("sparse_mla_fwd", forward(attention()), attention(scale=1.0))


def test_shares_that_a_sink_makes_vanish_may_be_0() -> None:
    """fp32 rounds 1 / (1 + exp(sink - lse)) to 0 below its smallest normal number, whatever it is multiplied with."""
    args = ORDINARY["sparse_mla_fwd"]()
    heads = args["q"].shape[2]
    _, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    args["attn_sink"] = torch.full((heads,), float(lse[lse.isfinite()].max()) + 88)
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    check("sparse_mla_fwd", (torch.zeros_like(out), lse), args)
    args |= {"out": torch.zeros_like(out), "lse": lse, "dout": torch.full_like(out, 30)}
    dq, dkv, d_sink = torch.ops.dsa.sparse_mla_bwd(**args)
    check("sparse_mla_bwd", (torch.zeros_like(dq), torch.zeros_like(dkv), d_sink), args)


def test_equal_probabilities_have_one_rounding() -> None:
    """Of 120 equal keys each has 1 / 120, which bf16 rounds up by 0.34 %."""
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
    """What arrives at a score is rounded to bf16 once for all heads: those of equal queries do not average out."""
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
    """Queries far smaller than their keys' differences share dP, and with it what rounding adds."""
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
