"""The kernels of mhc_post_fwd and mhc_post_bwd against the reference in float64, and their other promises."""

import pytest
import torch
from mhc_gpu_inputs import SHAPES, make_post

import dsa_ext
from dsa_ext.testing import tolerances

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("iterations", [1, 20, 100])
@pytest.mark.parametrize(("tokens", "streams", "columns"), SHAPES, ids=str)
def test_post(tokens: tuple[int, int], streams: int, columns: int, iterations: int) -> None:
    args = make_post(tokens, streams, columns)
    got = torch.ops.dsa.mhc_post_fwd(**args, iterations=iterations)
    tolerances.check("mhc_post_fwd", got, {**args, "iterations": iterations})
    dout = torch.randn(got.shape, device="cuda").bfloat16()
    gradients = torch.ops.dsa.mhc_post_bwd(dout, **args, iterations=iterations)
    tolerances.check("mhc_post_bwd", gradients, {"dout": dout, **args, "iterations": iterations})
    for a, b in zip(gradients, torch.ops.dsa.mhc_post_bwd(dout, **args, iterations=iterations), strict=True):
        assert torch.equal(a, b)


def test_wild_weights() -> None:
    args = make_post((1, 9), 4, 256)
    args["h_res"] *= 300
    out = dsa_ext.mhc_post(**args)
    assert out.isfinite().all()
    tolerances.check("mhc_post_fwd", out, args)


def test_nan_stays_in_its_token_behind_the_layer() -> None:
    others = torch.arange(40, device="cuda") != 7
    for name, at in (("x", (2, 5)), ("y", (5,)), ("h_post", (1,)), ("h_res", (0, 3))):
        args = make_post((1, 40), 4, 1280)
        dout = torch.randn(args["x"].shape, device="cuda").bfloat16()
        results = []
        for value in (float(args[name][(0, 7, *at)]), torch.nan):
            args[name][(0, 7, *at)] = value
            results.append([torch.ops.dsa.mhc_post_fwd(**args), *torch.ops.dsa.mhc_post_bwd(dout, **args)])
        for expected, got in zip(*results, strict=True):
            assert torch.equal(got[:, others], expected[:, others])
        assert results[1][0][:, 7].isnan().any()


def test_a_token_does_not_depend_on_the_others() -> None:
    """One token has unusually large weights; the weights of its neighbors are computed in the same warp."""
    args = make_post((1, 40), 4, 256)
    dout = torch.randn(args["x"].shape, device="cuda").bfloat16()
    expected = [torch.ops.dsa.mhc_post_fwd(**args), *torch.ops.dsa.mhc_post_bwd(dout, **args)]
    args["h_res"][0, 7] *= 300
    got = [torch.ops.dsa.mhc_post_fwd(**args), *torch.ops.dsa.mhc_post_bwd(dout, **args)]
    others = torch.arange(40, device="cuda") != 7
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a[:, others], b[:, others])
    assert not torch.equal(got[0][:, 7], expected[0][:, 7])
