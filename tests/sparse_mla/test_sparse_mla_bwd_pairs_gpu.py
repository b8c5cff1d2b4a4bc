"""sparse_mla_bwd of more than 64 heads, whose blocks of heads are pairs of CTAs."""

from typing import Any

import pytest
import torch
from bwd_gpu import DEVICE, FWD, OP, both_modes, check, normal
from sparse_mla_gpu_inputs import make_bounds

from dsa_ext.testing.inputs import make_inputs, spoil_indices
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import similarity_error

pytestmark = pytest.mark.gpu


@both_modes
@pytest.mark.parametrize("heads", [65, 96, 128])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_tiles_without_visible_keys(heads: int, d_qk: int, deterministic: bool) -> None:
    """At the beginning, in the middle and at the end of lists, and whole lists; keys that nobody sees are NaN."""
    i = make_inputs(2, 90, 2000, heads, 1, 500, d_qk, device=DEVICE)
    i.indices[:, ::3, :, :64] = -1
    i.indices[:, 1::3, :, 128:320] = 2000
    i.indices[:, 2::3, :, 448:] = -1
    i.indices[:, ::7] = -1
    seen = torch.zeros(2, 2001, dtype=torch.bool, device=DEVICE)  # the last one for slots without a key
    for of_batch, indices in zip(seen, i.indices.long(), strict=True):
        of_batch[indices.where((indices >= 0) & (indices < 2000), 2000).flatten()] = True
    kv = i.kv.masked_fill(~seen[:, :2000, None, None], float("nan"))
    args = {"causal": False, "with_dlse": True, "deterministic": deterministic}
    check(i.q, kv, i.indices, **args, attn_sink=torch.linspace(-2, 2, heads, device=DEVICE))
    check(i.q, kv, i.indices, **args, return_dist=True)


OPTIONS: list[dict[str, Any]] = [
    {"causal": False, "sm_scale": -0.05},
    {"q_start": 900, "positions_per_key": 3, "sm_scale": 0.2},
    {"causal": False, "topk_length": True},
    {"bounds": True, "sm_scale": 0.1},
    {"causal": False, "topk_length": True, "attn_sink": True, "return_dist": True},
]


@both_modes
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("batch", "seq", "s_kv", "heads", "groups", "topk", "d_qk"),
    [(1, 5, 3000, 128, 1, 700, 576), (2, 70, 2000, 130, 2, 200, 576), (1, 68, 20_000, 100, 1, 450, 512)],
    ids=str,
)
def test_options(
    batch: int,
    seq: int,
    s_kv: int,
    heads: int,
    groups: int,
    topk: int,
    d_qk: int,
    options: dict[str, Any],
    deterministic: bool,
) -> None:
    """Queries that are split by keys, groups, and sorted lists; a third of the slots are no keys."""
    i = make_inputs(batch, seq, s_kv, heads, groups, topk, d_qk, device=DEVICE)
    given = dict(options)
    if given.pop("topk_length", False):
        lengths = torch.tensor([topk, 0, topk + 7, 1, topk // 2, -3], device=DEVICE, dtype=torch.int32)
        given["topk_length"] = lengths.repeat(batch * seq)[: batch * seq].view(batch, seq)
    if given.pop("bounds", False):
        given |= make_bounds(s_kv, batch, seq)
    if given.pop("attn_sink", False):
        given["attn_sink"] = torch.linspace(-2, 2, heads, device=DEVICE)
    indices = spoil_indices(i.indices, s_kv)
    dq, *_ = check(i.q, i.kv, indices, with_dlse=True, deterministic=deterministic, **given)
    assert (dq != 0).any()


@both_modes
@pytest.mark.parametrize(("seq", "s_kv", "topk"), [(3, 0, 5), (3, 100, 1), (70, 20_000, 300)])
def test_nothing_to_attend_to(seq: int, s_kv: int, topk: int, deterministic: bool) -> None:
    i = make_inputs(2, seq, s_kv, 128, 1, topk, device=DEVICE)
    none = torch.full_like(i.indices, -1)
    lengths = torch.zeros(2, seq, dtype=torch.int32, device=DEVICE)
    for indices, options in ((none, {}), (i.indices, {"topk_length": lengths})):
        dq, dkv, _ = check(i.q, i.kv, indices, causal=False, deterministic=deterministic, **options)
        assert not dq.any()
        assert not dkv.any()


@both_modes
def test_side_stream_and_graph(deterministic: bool) -> None:
    """Lists that are sorted, and waves that wait for others."""
    i = make_inputs(1, 150, 20_000, 128, 1, 500, device=DEVICE)
    out, lse = FWD(i.q, i.kv, i.indices, causal=False)
    args = (normal(out), i.q, i.kv, out, lse, i.indices)
    expected = OP(*args, causal=False, deterministic=deterministic)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = OP(*args, causal=False, deterministic=deterministic)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        captured = OP(*args, causal=False, deterministic=deterministic)
    for _ in range(3):
        graph.replay()
        for got in (aside, captured):
            assert torch.equal(got[0], expected[0])
            assert torch.equal(got[1], expected[1]) or not deterministic
            assert similarity_error(got[1], expected[1]) <= 7e-6


@pytest.mark.gpu_memory(6)
@both_modes
def test_several_launches(deterministic: bool) -> None:
    """2100 queries of 2048 keys each are two launches, deterministic ones seven; dq is that of calls of 700 queries,
    bitwise, and dist as well."""
    i = make_inputs(1, 2100, 4096, 128, 1, 2048, device=DEVICE)
    out, lse = FWD(i.q, i.kv, i.indices, causal=False)
    dout = normal(out)

    def gradients(rows: slice, return_dist: bool = True) -> tuple[torch.Tensor, ...]:
        of_rows = [t[:, rows] for t in (dout, i.q, out, lse, i.indices)]
        modes = {"deterministic": deterministic, "return_dist": return_dist}
        result: tuple[torch.Tensor, ...] = OP(*of_rows[:2], i.kv, *of_rows[2:], causal=False, **modes)
        return result

    dq, dkv, _, dist = gradients(slice(None))
    assert not deterministic or torch.equal(dkv, gradients(slice(None))[1])
    parts = [gradients(rows) for rows in (slice(0, 700), slice(700, 1400), slice(1400, None))]
    assert torch.equal(dq, torch.cat([part[0] for part in parts], dim=1))
    assert torch.equal(dist, torch.cat([part[3] for part in parts], dim=2))
    # Addends are rounded too in deterministic calls, so that both results have errors of 5e-6.
    bound = 1.2e-5 if deterministic else 7e-6
    assert similarity_error(dkv, sum(part[1].double() for part in parts)) <= bound
    extra = workspace_bytes(lambda: gradients(slice(None), return_dist=False))
    assert extra <= 2**30 + 4096 * 576 * 4 + 2**26


@both_modes
@pytest.mark.parametrize("return_dist", [False, True])
def test_repeats(deterministic: bool, return_dist: bool) -> None:
    """dq and dist are bitwise repeatable, also with neighbors that start elsewhere; dkv is in deterministic calls, and
    in others but for the order of its additions."""
    i = make_inputs(1, 200, 3000, 128, 1, 700, device=DEVICE)
    out, lse = FWD(i.q, i.kv, i.indices, causal=False)
    args = (normal(out), i.q, i.kv, out, lse, i.indices)
    modes = {"deterministic": deterministic, "return_dist": return_dist}
    calls = [OP(*args, causal=False, **modes) for _ in range(5)]
    for dq, dkv, _, dist in calls:
        assert torch.equal(dq, calls[0][0])
        assert torch.equal(dist, calls[0][3])
        assert torch.equal(dkv, calls[0][1]) or not deterministic
        assert similarity_error(dkv, calls[0][1]) <= 7e-6


@both_modes
def test_dist_changes_no_gradient(deterministic: bool) -> None:
    i = make_inputs(2, 150, 3000, 128, 1, 700, device=DEVICE)
    out, lse = FWD(i.q, i.kv, i.indices, causal=False)
    args = (normal(out), i.q, i.kv, out, lse, i.indices)
    alone, beside = (OP(*args, causal=False, deterministic=deterministic, return_dist=d) for d in (False, True))
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(alone[1], beside[1]) or not deterministic


def test_deterministic_gradients_of_long_lists() -> None:
    """The workspace holds 38 queries. So launches take half a wave of 33, each query in two parts."""
    i = make_inputs(1, 70, 30_000, 128, 1, 20_000, device=DEVICE)
    out, lse = FWD(i.q, i.kv, i.indices, causal=False)
    args = (normal(out), i.q, i.kv, out, lse, i.indices)
    stored, added = (OP(*args, causal=False, deterministic=mode, return_dist=True) for mode in (True, False))
    assert torch.equal(stored[0], added[0])
    assert torch.equal(stored[3], added[3])
    assert similarity_error(stored[1], added[1]) <= 1.2e-5
    assert workspace_bytes(lambda: OP(*args, causal=False, deterministic=True)) <= 2**30 + 30_000 * 576 * 4 + 2**26
