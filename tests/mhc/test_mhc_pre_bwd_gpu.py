"""The kernels of mhc_pre_bwd against the reference in float64."""

from typing import Any

import pytest
import torch
from mhc_gpu_inputs import SHAPES, make_pre
from torch import Tensor

from dsa_ext.testing import tolerances

pytestmark = pytest.mark.gpu

NAMES = [argument.name for argument in torch.ops.dsa.mhc_pre_bwd.default._schema.arguments]
#: With more tiles for each CTA than it has places for.
LONG = [((1, 700), 4, 7168), ((1, 2100), 2, 7168)]


def make_pre_bwd(tokens: tuple[int, int], streams: int, columns: int, gamma: bool = True) -> dict[str, Any]:
    args = make_pre(tokens, streams, columns, gamma)
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = torch.ops.dsa.mhc_pre_fwd(**args)
    upstream = [torch.randn(t.shape, device="cuda").to(t.dtype) for t in (h_in, h_post, h_res)]
    kept = (args["x"], args["phi"], args["alpha"], args["gamma"], h_post, inv_rms, h_mix, h_pre)
    return dict(zip(NAMES, (*upstream, *kept), strict=False))


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize(("tokens", "streams", "columns"), [*SHAPES, *LONG], ids=str)
def test_pre_gradients(tokens: tuple[int, int], streams: int, columns: int, gamma: bool) -> None:
    given = make_pre_bwd(tokens, streams, columns, gamma)
    got = torch.ops.dsa.mhc_pre_bwd(**given)
    tolerances.check("mhc_pre_bwd", got, given)
    for a, b in zip(got, torch.ops.dsa.mhc_pre_bwd(**given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("streams", [2, 4])
def test_several_calls_at_once(streams: int) -> None:
    """CTAs wait for each other, whatever runs beside them."""
    given = [make_pre_bwd((1, tokens), streams, 4096) for tokens in (640, 1000, 1500)]
    expected = [torch.ops.dsa.mhc_pre_bwd(**each) for each in given]
    queues = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, ...]]] = [[] for _ in given]
    for _ in range(10):
        for queue, each, kept in zip(queues, given, results, strict=True):
            with torch.cuda.stream(queue):
                kept.append(torch.ops.dsa.mhc_pre_bwd(**each))
    torch.cuda.synchronize()
    for kept, right in zip(results, expected, strict=True):
        assert all(torch.equal(a, b) for got in kept for a, b in zip(got, right, strict=True))


@pytest.mark.parametrize(("streams", "tokens"), [(2, 2500), (4, 1500)])
def test_few_free_sms(streams: int, tokens: int) -> None:
    """Another kernel keeps so many SMs that CTAs with the same tokens cannot run at once. One that has waited for long
    makes what it needs itself, with the same bits."""
    spinning = pytest.importorskip("spinning", reason="needs triton")
    given = make_pre_bwd((1, tokens), streams, 8192)
    expected = torch.ops.dsa.mhc_pre_bwd(**given)
    # What would wait for the other kernel: cudaMalloc, and the first launch of a kernel.
    torch.ops.dsa.mhc_pre_bwd(**given)
    spinning.spin(1, 10)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    other, ended = torch.cuda.Stream(), torch.cuda.Event()
    free = 20
    with torch.cuda.stream(other):
        spinning.spin(torch.cuda.get_device_properties().multi_processor_count - free, 8_000_000)
        ended.record()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # until the other kernel has its SMs
    begin.record()
    got = torch.ops.dsa.mhc_pre_bwd(**given)
    end.record()
    end.synchronize()
    assert not ended.query(), "the other kernel should have lasted longer"
    assert begin.elapsed_time(end) > 5  # ms, for which it has waited
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["x", "dh_in", "dh_post", "dh_res", "h_post", "inv_rms", "h_mix", "h_pre"])
@pytest.mark.parametrize("streams", [2, 4])
def test_nan_of_all_ones(name: str, streams: int) -> None:
    """The NaN with all bits set means "not there yet" among the CTAs: as an input it must not stop them. It reaches the
    gradient of its own token and no other."""
    given = make_pre_bwd((1, 50), streams, 256)
    clean, *_ = torch.ops.dsa.mhc_pre_bwd(**given)
    poisoned = given[name].clone()
    poisoned[0, 20:21].view(torch.uint8).fill_(255)
    assert poisoned[0, 20].isnan().all()
    assert not poisoned[0, 21].isnan().any()
    dx, *_ = torch.ops.dsa.mhc_pre_bwd(**given | {name: poisoned})
    assert dx[0, 20].isnan().all()
    others = torch.arange(50, device="cuda") != 20
    assert torch.equal(dx[0, others], clean[0, others])


@pytest.mark.parametrize("name", ["phi", "alpha", "gamma"])
def test_nan_of_all_ones_in_parameters(name: str) -> None:
    given = make_pre_bwd((1, 50), 4, 256)
    given[name].view(torch.int32).fill_(-1)
    dx, *_ = torch.ops.dsa.mhc_pre_bwd(**given)
    assert dx.isnan().all()
