"""The kernels of sparse_mha_bwd: lists and gradients beyond those of test_sparse_mha_fwd_gpu.py."""

import pytest
import torch
from sparse_mha_gpu_inputs import BACKWARD, FORWARD, check_both, make, with_results
from sparse_mla_gpu_inputs import DEVICE

from dsa_ext.testing.tolerances import check

pytestmark = pytest.mark.gpu


def test_tiles_that_nobody_lists() -> None:
    """Lists that name few blocks of keys, some queries none, and long runs of blocks of queries that list nothing."""
    args = make(1, 2000, 9000, 3, 4, causal=False)
    ids = torch.full((1, 2000, 4), -1, dtype=torch.int32, device=DEVICE)
    row = torch.arange(0, 2000, 7, device=DEVICE)
    ids[0, row, 0], ids[0, row, 1] = (row * 3 % 9000).int(), 8999
    ids[0, 600:1700] = -1
    results = check_both({**args, "indices": ids})
    unlisted = torch.ones(9000, dtype=torch.bool, device=DEVICE)
    unlisted[ids[ids >= 0].long()] = False
    assert not any(gradient[:, unlisted].any() for gradient in results[3:])
    assert not results[2][:, 600:1700].any()


@pytest.mark.parametrize("heads", [1, 7, 30, 41])
def test_heads_in_several_launches(heads: int) -> None:
    """dS of 4500 queries and keys takes 22 MB a head: those of 20 heads are in one of three buffers."""
    check_both(make(1, 4500, 4500, heads, 64))


@pytest.mark.parametrize("window", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("q_start", [0, 1, 127, 128, 3000])
def test_windows(window: int, q_start: int) -> None:
    """Lists of all keys: every tile that the memory is for has a bit, and one more tile would be another head's."""
    args = make(2, 900, 2500, 3, 1, q_start=q_start, window=window)
    check_both(args | {"indices": torch.arange(2500, dtype=torch.int32, device=DEVICE).expand(2, 900, -1)})


@pytest.mark.parametrize("causal", [False, True])
def test_the_largest_q_start(causal: bool) -> None:
    """Without a window all keys are seen."""
    args = make(1, 300, 400, 2, 60, q_start=2**62, causal=causal)
    results = check_both(args)
    assert torch.equal(results[0], FORWARD(**args | {"q_start": 0, "causal": False})[0])


@pytest.mark.parametrize(("batch", "seq"), [(42, 1024), (27, 1280), (1, 8192), (3, 5000)])
def test_memory(batch: int, seq: int) -> None:
    """dS of many short sequences, whose heads are worked on together, takes no more than others."""
    args = with_results(make(batch, seq, seq, 128 if batch > 3 else 20, 1))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = BACKWARD(**args)
    used = torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in results)
    rows = batch * seq * args["q"].shape[2] * 8 + 2 * batch * (seq + 128) ** 2 // 8
    parts = batch * seq * 64 * 4 * args["q"].shape[2]
    assert used < 1.4e9 + rows + parts


def test_memory_of_a_window() -> None:
    """dS of one head would be 1.1 GB without it."""
    args = with_results(make(1, 32768, 32768, 1, 16))
    before = torch.cuda.memory_allocated()
    used = []
    for window in (None, 2048):
        torch.cuda.reset_peak_memory_stats()
        BACKWARD(**args, window=window)
        used.append(torch.cuda.max_memory_allocated() - before)
    assert used[0] > 32768**2
    assert used[1] < 32768**2 // 2


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_gradients_that_are_not_finite_stay_in_their_head(value: float) -> None:
    args = with_results(make(2, 300, 300, 4, 60))
    expected = BACKWARD(**args)
    args["dout"][0, 7, 2] = value
    got = BACKWARD(**args)
    for a, b in zip((got[0], got[1], got[3]), (expected[0], expected[1], expected[3]), strict=True):
        assert torch.equal(a[1], b[1])
        assert all(torch.equal(a[0, :, head], b[0, :, head]) for head in (0, 1, 3))
    assert got[0][0, 7, 2].isnan().any()


def test_without_dlse() -> None:
    args = with_results(make(1, 300, 300, 2, 60))
    dlse = args.pop("dlse")
    results = BACKWARD(**args)
    check("sparse_mha_bwd", results, args)
    assert all(torch.equal(a, b) for a, b in zip(results, BACKWARD(**args, dlse=torch.zeros_like(dlse)), strict=True))


def test_an_lse_of_minus_infinity() -> None:
    """Such rows take no part, even if they list keys."""
    full = with_results(make(1, 300, 300, 2, 60))
    full["lse"] = full["lse"].masked_fill(torch.arange(300, device=DEVICE)[:, None] % 5 == 1, -torch.inf)
    results = BACKWARD(**full)
    check("sparse_mha_bwd", results, full)
    assert not results[0][:, 1::5].any()
