"""The attention weights that the kernels of sparse_mla_bwd return."""

import pytest
import torch
from bwd_gpu import DEVICE, FWD, OP, both_modes, check, normal

from dsa_ext.testing.inputs import make_inputs

pytestmark = pytest.mark.gpu


@both_modes
@pytest.mark.parametrize(
    ("seq", "s_kv", "heads"), [(300, 3000, 128), (3, 40000, 64), (140, 30000, 100), (600, 9000, 16)]
)
def test_dist(seq: int, s_kv: int, heads: int, deterministic: bool) -> None:
    """Queries that are split by keys, that begin with different tiles, and whose lists are merged; repeatable."""
    i = make_inputs(1, seq, s_kv, heads, 1, 700, device=DEVICE)
    i.indices[:, :: max(1, seq // 5), :, 64:256] = -1
    indices = i.indices.sort(-1).values if heads == 16 else i.indices
    check(i.q, i.kv, indices, causal=False, deterministic=deterministic, return_dist=True)
    out, lse = FWD(i.q, i.kv, indices, causal=False)
    calls = [
        OP(normal(out), i.q, i.kv, out, lse, indices, causal=False, deterministic=deterministic, return_dist=True)
        for _ in range(3)
    ]
    assert all(torch.equal(call[3], calls[0][3]) for call in calls)


def test_dist_of_a_deterministic_call_in_several_launches() -> None:
    i = make_inputs(1, 1500, 3000, 64, 1, 700, device=DEVICE)
    check(i.q, i.kv, i.indices, causal=False, deterministic=True, return_dist=True)


@both_modes
def test_dist_of_groups_of_heads(deterministic: bool) -> None:
    i = make_inputs(2, 100, 4000, 256, 2, 130, device=DEVICE)
    check(i.q, i.kv, i.indices, deterministic=deterministic, return_dist=True, q_start=500)
