"""The kernel of mhc_pre_fwd against the reference in float64, and its other promises."""

import pytest
import torch
from mhc_gpu_inputs import SHAPES, make_pre

from dsa_ext.testing import tolerances

pytestmark = pytest.mark.gpu

PRE = ("h_in", "h_post", "h_res", "inv_rms", "h_mix", "h_pre")


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize(("tokens", "streams", "columns"), SHAPES, ids=str)
def test_pre(tokens: tuple[int, int], streams: int, columns: int, gamma: bool) -> None:
    args = make_pre(tokens, streams, columns, gamma)
    got = torch.ops.dsa.mhc_pre_fwd(**args)
    tolerances.check("mhc_pre_fwd", got, args)
    for a, b in zip(got, torch.ops.dsa.mhc_pre_fwd(**args), strict=True):
        assert torch.equal(a, b)


def test_nan_stays_in_its_token() -> None:
    args = make_pre((1, 40), 4, 1280)
    expected = torch.ops.dsa.mhc_pre_fwd(**args)
    args["x"][0, 7, 2, 5] = torch.nan
    for name, a, b in zip(PRE, torch.ops.dsa.mhc_pre_fwd(**args), expected, strict=True):
        others = torch.arange(40, device="cuda") != 7
        assert torch.equal(a[:, others], b[:, others]), name
        if name != "h_in":
            assert a[:, 7].isnan().any(), name


def test_layouts() -> None:
    args = make_pre((3, 20), 4, 256)
    expected = torch.ops.dsa.mhc_pre_fwd(**args)
    views = {
        "x": args["x"].transpose(0, 1).contiguous().transpose(0, 1),
        "phi": args["phi"].mT.contiguous().mT,
        "bias": torch.stack([args["bias"]] * 2, 1)[:, 0],
    }
    for a, b in zip(torch.ops.dsa.mhc_pre_fwd(**(args | views)), expected, strict=True):
        assert torch.equal(a, b)
    one = args["x"][:, :, :1].expand(-1, -1, 4, -1)
    for a, b in zip(
        torch.ops.dsa.mhc_pre_fwd(**(args | {"x": one})),
        torch.ops.dsa.mhc_pre_fwd(**(args | {"x": one.contiguous()})),
        strict=True,
    ):
        assert torch.equal(a, b)
