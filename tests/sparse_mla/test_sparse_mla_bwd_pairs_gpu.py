"""sparse_mla_bwd of more than 64 heads, whose blocks of heads are pairs of CTAs."""

import pytest
import torch
from bwd_gpu import DEVICE, FWD, OP, check, normal

from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import similarity_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [65, 96, 128])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_tiles_without_visible_keys(heads: int, d_qk: int) -> None:
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
    check(i.q, kv, i.indices, causal=False, with_dlse=True, attn_sink=torch.linspace(-2, 2, heads, device=DEVICE))


@pytest.mark.gpu_memory(6)
def test_several_launches() -> None:
    """2100 queries of 2048 keys each are two launches; dq is that of calls that are one, bitwise."""
    i = make_inputs(1, 2100, 4096, 128, 1, 2048, device=DEVICE)
    out, lse = FWD(i.q, i.kv, i.indices, causal=False)
    dout = normal(out)

    def gradients(rows: slice) -> tuple[torch.Tensor, ...]:
        of_rows = [t[:, rows] for t in (dout, i.q, out, lse, i.indices)]
        result: tuple[torch.Tensor, ...] = OP(*of_rows[:2], i.kv, *of_rows[2:], causal=False)
        return result

    dq, dkv, *_ = gradients(slice(None))
    parts = [gradients(rows) for rows in (slice(0, 700), slice(700, 1400), slice(1400, None))]
    assert torch.equal(dq, torch.cat([part[0] for part in parts], dim=1))
    assert similarity_error(dkv, sum(part[1].double() for part in parts)) <= 7e-6
    extra = workspace_bytes(lambda: OP(dout, i.q, i.kv, out, lse, i.indices, causal=False))
    assert extra <= 2**30 + 4096 * 576 * 4 + 2**26


def test_repeats() -> None:
    """dq is bitwise repeatable, also with neighbors that start elsewhere; dkv but for the order of its additions."""
    i = make_inputs(1, 200, 3000, 128, 1, 700, device=DEVICE)
    out, lse = FWD(i.q, i.kv, i.indices, causal=False)
    calls = [OP(normal(out), i.q, i.kv, out, lse, i.indices, causal=False) for _ in range(5)]
    assert all(torch.equal(call[0], calls[0][0]) for call in calls)
    assert all(similarity_error(call[1], calls[0][1]) <= 7e-6 for call in calls)
