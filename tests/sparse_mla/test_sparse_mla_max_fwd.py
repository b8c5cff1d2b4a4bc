"""sparse_mla_max_fwd without a GPU: the largest scores, and lse of rows without keys."""

import math
from typing import Any

import pytest
import torch
from sparse_mla_cases import D_V, OPTIONS, make_small
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.tolerances import check


def largest_scores(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float | None = None, **slots: Any) -> Tensor:
    slots = {"causal": True, "q_start": 0, "positions_per_key": 1, "topk_length": None} | slots
    slots.pop("attn_sink", None)
    visible = reference.visible_slots(indices, kv.shape[1], **slots)
    result = q.new_full(q.shape[:3], -math.inf)
    scale, share = q.shape[3] ** -0.5 if sm_scale is None else sm_scale, q.shape[2] // kv.shape[2]
    for b, s, g, i in visible.nonzero().tolist():
        heads = slice(g * share, (g + 1) * share)
        scores = q[b, s, heads] @ kv[b, indices[b, s, g, i], g] * scale
        result[b, s, heads] = torch.maximum(result[b, s, heads], scores)
    return result


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_matches_loops(name: str, groups: int) -> None:
    q, kv, indices = make_small(batch=2, seq=6, groups=groups)
    out, lse, largest = reference.sparse_mla_max_fwd(q, kv, indices, d_v=D_V, **OPTIONS[name])
    torch.testing.assert_close(largest, largest_scores(q, kv, indices, **OPTIONS[name]), rtol=1e-12, atol=1e-13)
    expected = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, **OPTIONS[name])
    assert all(torch.equal(a, b) for a, b in zip((out, lse), expected, strict=True))


@pytest.mark.parametrize("inf_if_empty", [False, True])
def test_rows_without_keys(inf_if_empty: bool) -> None:
    inputs = make_inputs(seq=4, s_kv=20, heads=3, topk=6)
    inputs.indices[0, 1] = -1
    args = {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, "causal": False, "inf_if_empty": inf_if_empty}
    out, lse, largest = torch.ops.dsa.sparse_mla_max_fwd(**args)
    assert (out[0, 1] == 0).all()
    assert (lse[0, 1] == (math.inf if inf_if_empty else -math.inf)).all()
    assert (largest[0, 1] == -math.inf).all()
    assert lse[0, [0, 2, 3]].isfinite().all()
    check("sparse_mla_max_fwd", (out, lse, largest), args)
    for wrong in ((out, -lse, largest), (out, lse, largest + 0.01)):
        with pytest.raises(AssertionError):
            check("sparse_mla_max_fwd", wrong, args)


def test_nan_reaches_its_row_alone() -> None:
    inputs = make_inputs(seq=3, s_kv=20, heads=2, topk=6)
    inputs.indices[:] = torch.arange(18, dtype=torch.int32).view(1, 3, 1, 6)
    inputs.kv[0, 7] = math.nan
    _, largest = dsa_ext.sparse_mla(inputs.q, inputs.kv, inputs.indices, causal=False, return_max_logits=True)
    assert largest[0, 1].isnan().all()
    assert largest[0, [0, 2]].isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
def test_results_of_the_function(packed: bool) -> None:
    inputs = make_inputs(seq=5, s_kv=20, heads=3, topk=6)
    args = (inputs.q, inputs.kv, inputs.indices)
    args = tuple(t[0] for t in args) if packed else args
    out, lse, largest = dsa_ext.sparse_mla(*args, causal=False, return_lse=True, return_max_logits=True)
    assert largest.shape == lse.shape == args[0].shape[:-1]
    two = dsa_ext.sparse_mla(*args, causal=False, return_max_logits=True)
    assert torch.equal(two[0], out)
    assert torch.equal(two[1], largest)
    assert torch.equal(dsa_ext.sparse_mla(*args, causal=False), out)


def test_gradients() -> None:
    """Those of sparse_mla_fwd; none flows from the largest score. A row without keys has none, whatever its lse."""
    inputs = make_inputs(seq=4, s_kv=16, heads=4, topk=8, dtype=torch.float64)
    q, kv, indices = inputs.q, inputs.kv, inputs.indices
    indices[0, 2] = -1
    leaves = q.requires_grad_(), kv.requires_grad_()
    weights = torch.randn(q.shape[:3], dtype=q.dtype)
    sink = torch.linspace(-1, 1, q.shape[2], dtype=q.dtype)
    sink[0] = math.inf
    expected_out, expected_lse = torch.ops.dsa.sparse_mla_fwd(q, kv, indices, causal=False, attn_sink=sink)
    loss = expected_out.sum() + (expected_lse * weights)[expected_lse.isfinite()].sum()
    expected = torch.autograd.grad(loss, leaves)
    for inf_if_empty in (False, True):
        out, lse, largest = torch.ops.dsa.sparse_mla_max_fwd(
            q, kv, indices, causal=False, attn_sink=sink, inf_if_empty=inf_if_empty
        )
        assert not largest.requires_grad
        got = torch.autograd.grad(out.sum() + (lse * weights)[lse.isfinite()].sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
