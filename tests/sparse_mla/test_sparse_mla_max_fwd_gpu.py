"""The kernel of sparse_mla_max_fwd: out and lse of sparse_mla_fwd, bit by bit, and the largest scores."""

import itertools
import math

import pytest
import torch
from sparse_mla_gpu_inputs import DEVICE, Case, make_case, make_gpu, make_grid, run_cases

from dsa_ext.testing.tolerances import bits, check

pytestmark = pytest.mark.gpu

AXES = {
    "d_qk": [576, 512],
    "groups_and_heads": [*((1, heads) for heads in (1, 8, 16, 17, 32, 33, 64, 65, 128)), (2, 34), (4, 512)],
    "topk": [1, 63, 64, 65, 100, 2048],
    "seq": [1, 2, 33, 257],
    "s_kv": [0, 1, 64, 1000, 8192],
    "batch": [1, 2],
    "position": [(False, 0, 1), (True, 0, 1), (True, 5000, 4)],
    "lengths": [False, True],
    "bounds": [False, True],
    "sink": [False, True],
    "sm_scale": [None, 0.05, -0.04, 0.0, 3.0],
    "spoiled": [False, True],
}


def run_case(case: Case) -> None:
    inputs, options = make_case(case, seed=case["topk"])
    if case["sink"]:
        options["attn_sink"] = torch.linspace(-3, 3, inputs.q.shape[2], device=DEVICE)
    args = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, **options}
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    for inf_if_empty in (False, True):
        got = torch.ops.dsa.sparse_mla_max_fwd(**args, inf_if_empty=inf_if_empty)
        assert torch.equal(bits(got[0]), bits(out))
        expected = lse.masked_fill(lse == -math.inf, math.inf) if inf_if_empty else lse
        assert torch.equal(bits(got[1]), bits(expected))
    check("sparse_mla_max_fwd", got, {**args, "inf_if_empty": True})


@pytest.mark.parametrize("part", range(4))
def test_grid(part: int) -> None:
    """In every case, unselected rows contain NaN and Inf."""
    run_cases(make_grid(AXES, samples=80)[part::4], run_case)


@pytest.mark.parametrize(("heads", "seq"), [(128, 1), (64, 1), (16, 1), (128, 3), (8, 64)])
def test_few_queries(heads: int, seq: int) -> None:
    """The keys of few queries are split over many SMs; some of the parts have no key."""
    inputs = make_gpu(seq=seq, s_kv=40000, heads=heads, topk=4096)
    inputs.indices[:, :, :, 100:3000] = -1
    args = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, "causal": False, "inf_if_empty": True}
    check("sparse_mla_max_fwd", torch.ops.dsa.sparse_mla_max_fwd(**args), args)
    args["indices"] = torch.full_like(inputs.indices, -1)
    check("sparse_mla_max_fwd", torch.ops.dsa.sparse_mla_max_fwd(**args), args)


def test_falling_scores() -> None:
    """The running maximum of the kernel lags behind; the largest score does not, wherever it stands."""
    inputs = make_gpu(seq=70, s_kv=640, heads=40, topk=640)
    place = torch.arange(640, device=DEVICE, dtype=torch.int32)
    ramp = torch.linspace(-2, 2, 640, device=DEVICE).bfloat16().view(1, 640, 1, 1).expand_as(inputs.kv).contiguous()
    for order, heads in itertools.product((place, place.flip(0), place.roll(300)), (40, 16)):
        q = inputs.q[:, :, :heads].abs()
        args = {"q": q, "kv": ramp, "indices": order.expand(1, 70, 1, 640).contiguous(), "causal": False}
        check("sparse_mla_max_fwd", torch.ops.dsa.sparse_mla_max_fwd(**args), args)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("heads", [128, 16])
def test_scores_that_are_not_finite(value: float, heads: int) -> None:
    inputs = make_gpu(seq=9, s_kv=90, heads=heads, topk=10)
    inputs.indices[:] = torch.arange(90, device=DEVICE, dtype=torch.int32).view(1, 9, 1, 10)
    inputs.kv[0, 37, 0, 5] = value
    args = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, "causal": False}
    check("sparse_mla_max_fwd", torch.ops.dsa.sparse_mla_max_fwd(**args), args)
