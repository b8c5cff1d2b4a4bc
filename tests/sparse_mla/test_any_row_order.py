"""Packed and padded sequences, and queries in any order, against one call per sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_ext
from dsa_ext.testing.inputs import make_indexer_inputs, make_inputs

LENGTHS = (5, 1, 0, 12, 30)
HEADS, TOPK, HI, DI = 4, 7, 8, 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Args = dict[str, Tensor]


def packed(device: str) -> Args:
    """Tensors of the indexer and of the attention, rows of all sequences one after the other, and the causal bounds of
    each row; float64 on the CPU, bf16 on a GPU."""
    total, dtype = sum(LENGTHS), torch.float64 if device == "cpu" else torch.bfloat16
    main = make_inputs(1, total, total, HEADS, 1, TOPK, dtype=dtype, device=device)
    index = make_indexer_inputs(total, total, HI, DI, dtype=dtype, device=device)
    lengths = torch.tensor(LENGTHS, device=device)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths).int()
    ends = torch.arange(1, total + 1, device=device).int()
    named = {"main_q": main.q[0], "main_kv": main.kv[0, :, 0], "q": index.q, "k": index.k, "weights": index.weights}
    return {**named, "starts": starts, "ends": ends}


def step(a: Args, rows: Args) -> list[Tensor]:
    """Selection, attention, loss and gradients of the packed tensors `a`, with the queries `rows`. The selection lists
    ids that the bounds must hide."""
    q, kv, main_q = rows["q"].requires_grad_(), a["main_kv"].requires_grad_(), rows["main_q"].requires_grad_()
    k, weights = a["k"].requires_grad_(), rows["weights"].requires_grad_()
    bounds = {"starts": rows["starts"], "ends": rows["ends"]}
    scoring = (q.detach(), k.detach(), weights.detach())
    ids, _ = dsa_ext.indexer_topk(*scoring, rows["starts"], rows["ends"], TOPK)
    others = torch.randint_like(ids, len(kv))
    hidden = (others < bounds["starts"][:, None]) | (others >= bounds["ends"][:, None])
    listed = torch.cat([ids, torch.where(hidden, others, -1)], dim=1)
    out, lse = dsa_ext.sparse_mla(main_q, kv, listed, **bounds, return_lse=True)
    p = dsa_ext.attn_dist(main_q.detach(), kv.detach(), listed, lse.detach(), **bounds)
    assert not p[:, TOPK:].any()
    everything = torch.arange(len(kv), device=q.device).int().expand(len(q), -1)
    _, dense_lse = dsa_ext.sparse_mla(main_q.detach(), kv.detach(), everything, **bounds, return_lse=True)
    scores = dsa_ext.indexer_scores(q, k, weights, ids)
    loss = dsa_ext.indexer_loss(scores, p[:, :TOPK].contiguous(), reduction="sum")
    main = (main_q.detach(), kv.detach(), dense_lse)
    loss = loss + dsa_ext.indexer_dense_loss(q, k, weights, *main, **bounds, reduction="sum")
    grads = torch.autograd.grad(out.square().sum() + lse.exp().sum() + loss, [q, weights, main_q, k, kv])
    return [out, lse, p[:, :TOPK], loss, *grads]


def one_by_one(a: Args) -> list[Tensor]:
    """The same as `step`, with a causal call per sequence."""
    results, first = [], 0
    for length in LENGTHS:
        own = {name: value[first : first + length] for name, value in a.items()}
        first += length
        own["starts"], own["ends"] = torch.zeros_like(own["starts"]), own["ends"] - (first - length)
        q, kv, main_q = own["q"].requires_grad_(), own["main_kv"].requires_grad_(), own["main_q"].requires_grad_()
        k, weights = own["k"].requires_grad_(), own["weights"].requires_grad_()
        ids, _ = dsa_ext.indexer_topk(q.detach(), k.detach(), weights.detach(), own["starts"], own["ends"], TOPK)
        out, lse = dsa_ext.sparse_mla(main_q, kv, ids, return_lse=True)
        p = dsa_ext.attn_dist(main_q.detach(), kv.detach(), ids, lse.detach())
        everything = torch.arange(max(1, length), device=q.device).int().expand(length, -1)
        _, dense_lse = dsa_ext.sparse_mla(main_q.detach(), kv.detach(), everything, return_lse=True)
        loss = dsa_ext.indexer_loss(dsa_ext.indexer_scores(q, k, weights, ids), p, reduction="sum")
        main = (main_q.detach(), kv.detach(), dense_lse)
        loss = loss + dsa_ext.indexer_dense_loss(q, k, weights, *main, reduction="sum")
        grads = torch.autograd.grad(out.square().sum() + lse.exp().sum() + loss, [q, weights, main_q, k, kv])
        results.append([out, lse, p, loss[None], *grads])
    joined = [torch.cat(parts) for parts in zip(*results, strict=True)]
    joined[3] = joined[3].sum()
    return joined


def assert_same(got: list[Tensor], expected: list[Tensor], device: str) -> None:
    limits: Any = {} if device == "cpu" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got, expected, **limits)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_sequences(device: str) -> None:
    a = packed(device)
    assert_same(step(a, a), one_by_one(a), device)


@pytest.mark.parametrize("device", DEVICES)
def test_queries_in_any_order(device: str) -> None:
    """As a rank of a zig-zag context-parallel group holds them: the first and the last chunk, against all keys."""
    a = packed(device)
    order = torch.cat([torch.arange(0, 12), torch.arange(36, 48)]).to(device)
    rows = {name: a[name][order] for name in ("q", "weights", "main_q", "starts", "ends")}
    expected = one_by_one(a)
    got = step(a, rows)
    assert_same(got[:3], [expected[i][order] for i in range(3)], device)
    assert_same(got[4:7], [expected[i][order] for i in range(4, 7)], device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str, device: str) -> None:
    """Batches of padded sequences: keys of padding are NaN, and queries of padding see nothing."""
    batch, seq = len(LENGTHS), max(LENGTHS)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    x = make_inputs(batch, seq, seq, HEADS, 1, seq, dtype=dtype, device=device)
    first = torch.tensor([seq - length if side == "left" else 0 for length in LENGTHS], device=device)[:, None]
    position = torch.arange(seq, device=device)
    is_token = (position >= first) & (position < first + torch.tensor(LENGTHS, device=device)[:, None])
    kv = x.kv.masked_fill(~is_token[..., None, None], torch.nan)
    bounds = {
        "starts": first.expand(batch, seq).int(),
        "ends": torch.where(is_token, position + 1, 0).int(),
    }
    leaves = x.q.requires_grad_(), kv.requires_grad_()
    out, lse = dsa_ext.sparse_mla(*leaves, x.indices, **bounds, return_lse=True)
    dq, dkv = torch.autograd.grad(out.square().sum(), leaves)
    assert not out[~is_token].any()
    assert (lse[~is_token] == -torch.inf).all()
    assert not dq[~is_token].any()
    assert not dkv[~is_token].any()
    for b, length in enumerate(LENGTHS):
        own = slice(int(first[b]), int(first[b]) + length)
        alone = x.q[b, own].detach().requires_grad_(), x.kv[b, own].detach().requires_grad_()
        ids = (x.indices[b, own] - int(first[b])).contiguous()
        expected, expected_lse = dsa_ext.sparse_mla(*alone, ids, return_lse=True)
        grads = torch.autograd.grad(expected.square().sum(), alone)
        assert_same([out[b, own], lse[b, own], dq[b, own], dkv[b, own]], [expected, expected_lse, *grads], device)
