"""sparse_mha_dist without a GPU: its reference against attn_dist; the operator's errors."""

from typing import Any

import pytest
import torch
from callers import assert_error, native
from test_sparse_mha_fwd import HEADS, OPTIONS, make_inputs, within

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.calls import ORDINARY


@pytest.mark.parametrize("options", OPTIONS)
def test_it_equals_attn_dist(options: dict[str, Any]) -> None:
    """With a group of one head each, whose weights are added up."""
    (q, k, k_rope, v), ids = make_inputs()
    _, lse = dsa_ext.sparse_mha(q, k, k_rope, v, ids, return_lse=True, **options)
    got = dsa_ext.sparse_mha_dist(q, k, k_rope, ids, lse, **options)
    keys = torch.cat([k, k_rope[:, :, None].expand(-1, -1, HEADS, -1)], -1)
    scale = {"sm_scale": 192**-0.5, **options}
    listed = within(ids[:, :, None].expand(-1, -1, HEADS, -1), scale.pop("window", None), options)
    each = reference.attn_dist(q, keys, listed, lse, **scale)
    torch.testing.assert_close(got, each.sum(2))
    assert not got.requires_grad


def test_a_repeated_id_has_its_weight_twice() -> None:
    (q, k, k_rope, v), ids = make_inputs()
    _, lse = dsa_ext.sparse_mha(q, k, k_rope, v, ids, return_lse=True)
    dist = dsa_ext.sparse_mha_dist(q, k, k_rope, ids, lse)
    twice = dsa_ext.sparse_mha_dist(q, k, k_rope, torch.cat([ids, ids], -1), lse)
    assert torch.equal(twice, torch.cat([dist, dist], -1))


def test_errors() -> None:
    args = ORDINARY["sparse_mha_dist"]()
    for change, message in (
        ({"lse": args["lse"][:, :3]}, "lse must be float32 [B=1, S=5, H=3], got float32 [1, 3, 3]"),
        ({"k": args["k"].float()}, "k must be bfloat16 [B, S_kv, H, Dnope], got float32 [1, 40, 3, 128]"),
    ):
        for call in (torch.ops.dsa.sparse_mha_dist, lambda **changed: native("sparse_mha_dist", **changed)):
            assert_error(call, "sparse_mha_dist", args | change, message)
