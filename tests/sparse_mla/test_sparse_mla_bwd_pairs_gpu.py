"""sparse_mla_bwd of more than 64 heads, whose blocks of heads are pairs of CTAs."""

import pytest
import torch
from bwd_gpu import DEVICE, FWD, OP, both_modes, check, normal

from dsa_ext.testing.inputs import make_inputs
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
