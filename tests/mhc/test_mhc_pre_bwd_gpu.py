"""The kernels of mhc_pre_bwd against the reference in float64."""

import pytest
import torch
from mhc_gpu_inputs import SHAPES, make_pre

from dsa_ext.testing import tolerances

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize(("tokens", "streams", "columns"), SHAPES, ids=str)
def test_pre_gradients(tokens: tuple[int, int], streams: int, columns: int, gamma: bool) -> None:
    args = make_pre(tokens, streams, columns, gamma)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = torch.ops.dsa.mhc_pre_fwd(**args)
    upstream = [torch.randn(t.shape, device="cuda").to(t.dtype) for t in (h_in, h_post, h_res)]
    kept = (args["x"], args["phi"], args["alpha"], args["gamma"], h_post, inv_rms, h_mix, h_pre)
    got = torch.ops.dsa.mhc_pre_bwd(*upstream, *kept)
    names = [argument.name for argument in torch.ops.dsa.mhc_pre_bwd.default._schema.arguments]
    tolerances.check("mhc_pre_bwd", got, dict(zip(names, (*upstream, *kept), strict=False)))
    for a, b in zip(got, torch.ops.dsa.mhc_pre_bwd(*upstream, *kept), strict=True):
        assert torch.equal(a, b)
