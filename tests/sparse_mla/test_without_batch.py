"""sparse_mla and attn_dist without a batch: rows as indexer_topk returns them."""

from typing import Any

import pytest
import torch

import dsa_ext
from dsa_ext.testing.inputs import make_inputs


def make(groups: int) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(seq=5, s_kv=40, heads=4, groups=groups, topk=12, dtype=torch.float64)
    return inputs.q, inputs.kv, inputs.indices


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("squeezed", [False, True])
def test_same_as_a_batch_of_one(groups: int, squeezed: bool) -> None:
    q, kv, indices = (t.requires_grad_(t.is_floating_point()) for t in make(groups))
    length = torch.tensor([[0, 3, 12, 7, 12]], dtype=torch.int32)
    options: dict[str, Any] = {"q_start": 20, "sm_scale": 0.1}
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    expected = dsa_ext.sparse_mla(q, kv, indices, **options, topk_length=length, attn_sink=sink, return_lse=True)
    rows = [q[0], kv[0], indices[0]]
    if squeezed and groups == 1:
        rows[1:] = [rows[1][:, 0], rows[2][:, 0]]
    options["topk_length"] = length[0]
    out, lse = dsa_ext.sparse_mla(*rows, **options, attn_sink=sink, return_lse=True)
    torch.testing.assert_close((out, lse), (expected[0][0], expected[1][0]), rtol=0, atol=0)
    assert torch.equal(dsa_ext.sparse_mla(*rows, **options, attn_sink=sink), out)
    grads = [torch.autograd.grad(o.sin().sum(), (q, kv), retain_graph=True) for o in (out, expected[0])]
    torch.testing.assert_close(*grads, rtol=0, atol=0)

    dist = dsa_ext.attn_dist(*rows, lse, **options)
    assert dist.shape == rows[2].shape
    options["topk_length"] = length
    batched = dsa_ext.attn_dist(q, kv, indices, expected[1], **options)
    assert torch.equal(dist.view_as(batched[0]), batched[0])
    blocks = dsa_ext.attn_dist(*rows, lse, per_head_block=True)
    assert blocks.shape == (1, *rows[2].shape)


def test_ids_of_indexer_topk_fit() -> None:
    q, k, weights = torch.randn(6, 8, 64), torch.randn(30, 64), torch.randn(6, 8)
    starts, ends = torch.zeros(6, dtype=torch.int32), torch.arange(25, 31, dtype=torch.int32)
    ids, _ = dsa_ext.indexer_topk(q, k, weights, starts, ends, 10)
    out = dsa_ext.sparse_mla(torch.randn(6, 16, 576), torch.randn(30, 576), ids, q_start=24)
    assert out.shape == (6, 16, 512)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["kv", "indices"])
def test_errors_name_the_argument(name: str) -> None:
    q, kv, indices = make(1)
    args = {"kv": kv[0], "indices": indices[0]} | {name: {"kv": kv, "indices": indices}[name]}
    with pytest.raises(RuntimeError, match=rf"^dsa::sparse_mla_fwd: {name} must be \[.*\] when q is \[S, H, D\], got "):
        dsa_ext.sparse_mla(q[0], **args)


def test_compiles() -> None:
    q, kv, indices = make(1)
    compiled = torch.compile(dsa_ext.sparse_mla, backend="aot_eager", fullgraph=True)
    expected = dsa_ext.sparse_mla(q[0], kv[0, :, 0], indices[0, :, 0])
    torch.testing.assert_close(compiled(q[0], kv[0, :, 0], indices[0, :, 0]), expected)
