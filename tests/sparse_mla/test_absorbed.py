"""Attention in the absorbed form, whose queries are made part by part and not kept, against the plain formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from dsa_ext import functional
from dsa_ext.nn import absorbed, absorption
from dsa_ext.nn.absorbed import absorbed_attention
from dsa_ext.nn.absorption import Rope, absorbed_queries
from dsa_ext.nn.expanded import Expanded
from dsa_ext.nn.heads import multiply_heads
from dsa_ext.nn.indexer import IndexerTensors, scores_of_keys
from dsa_ext.nn.projections import is_plain

BATCH, SEQ, HEADS, NOPE, LATENT, ROPE, V, SLOTS = 3, 11, 3, 8, 512, 64, 16, 6
SCALE = 0.1


def make_inputs() -> tuple[list[Tensor], Tensor, Rope]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    heads, kv = random(BATCH, SEQ, HEADS, NOPE + ROPE), random(BATCH, SEQ, 1, LATENT + ROPE)
    weights = random(HEADS, NOPE, LATENT) / 8, random(HEADS, V, LATENT)
    ids = torch.randint(-1, SEQ, (BATCH, SEQ, 1, SLOTS), generator=generator, dtype=torch.int32)
    angles = random(BATCH, SEQ, 1, ROPE // 2)
    leaves = [t.requires_grad_() for t in (heads, *weights, kv)]
    return leaves, ids, Rope(angles.cos(), angles.sin(), interleaved=True)


def plain(leaves: list[Tensor], ids: Tensor, rope: Rope, **visible: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads, key_weight, value_weight, kv = leaves
    q = absorbed_queries(heads, key_weight, rope)
    latent, lse = functional.sparse_mla(q, kv, ids, sm_scale=SCALE, return_lse=True, **visible)
    p = functional.attn_dist(q.detach(), kv.detach(), ids, lse.detach(), sm_scale=SCALE, **visible)[:, :, 0]
    return multiply_heads(latent, value_weight.mT), lse.detach(), p


@pytest.mark.parametrize("queries", [1, 4, SEQ, 2 * SEQ, BATCH * SEQ])
@pytest.mark.parametrize("bounded", [False, True])
def test_parts(queries: int, bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "_BYTES", queries * HEADS * (LATENT + ROPE) * 8)
    leaves, ids, rope = make_inputs()
    row = torch.arange(SEQ, dtype=torch.int32).expand(BATCH, SEQ)
    visible = {"starts": row // 3, "ends": row + 2} if bounded else {}
    expected = plain(leaves, ids, rope, **visible)
    got = absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, distribution=True, **visible)
    assert not got.lse.requires_grad
    assert not got.distribution.requires_grad
    torch.testing.assert_close((got.out, got.lse, got.distribution), expected)
    dout = torch.linspace(-1, 1, expected[0].numel(), dtype=torch.float64).view(expected[0].shape)
    gradients = [torch.autograd.grad(values, leaves, dout) for values in (got.out, expected[0])]
    torch.testing.assert_close(*gradients)


def make_learner() -> IndexerTensors:
    generator = torch.Generator().manual_seed(1)
    shapes = (BATCH, SEQ, 8, 64), (BATCH, SEQ, 64), (BATCH, SEQ, 8)
    tensors = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return IndexerTensors(*(t.requires_grad_() for t in tensors))


@pytest.mark.parametrize("queries", [1, 4, SEQ, BATCH * SEQ])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_deferred_loss(queries: int, bounded: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value, which is there after the backward, and its gradients, with the factor that reaches it."""
    monkeypatch.setattr(absorbed, "_BYTES", queries * HEADS * (LATENT + ROPE) * 8)
    (leaves, ids, rope), learner = make_inputs(), make_learner()
    row = torch.arange(SEQ, dtype=torch.int32).expand(BATCH, SEQ)
    visible = {"starts": row // 3, "ends": row + 2} if bounded else {}
    if frozen:
        leaves = [t.detach() for t in leaves]
    out, _, p = plain(leaves, ids, rope, **visible)
    loss = functional.indexer_loss(scores_of_keys(learner, ids[:, :, 0]), p)
    got = absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, learner=learner, deferred=True, **visible)
    assert (got.loss == 0) == (not frozen)
    assert got.distribution is None
    wanted = [*([] if frozen else leaves), *learner]
    totals = [o.sin().sum() + 0.3 * value for o, value in ((out, loss), (got.out, got.loss))]
    torch.testing.assert_close(*(torch.autograd.grad(total, wanted) for total in totals))
    torch.testing.assert_close(got.loss, loss)


@pytest.mark.parametrize("used", ["out", "loss"])
def test_a_deferred_loss_and_an_output_that_no_gradient_reaches(used: str) -> None:
    (leaves, ids, rope), learner = make_inputs(), make_learner()
    got = absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, learner=learner, deferred=True)
    total = got.out.sum() if used == "out" else got.loss
    gradients = torch.autograd.grad(total, [*leaves, *learner], allow_unused=True)
    assert [g is not None and bool(g.any()) for g in gradients] == [used == "out"] * 4 + [used == "loss"] * 3
    assert (got.loss > 0) == (used == "loss")


def test_what_is_kept() -> None:
    """Neither absorbed queries nor anything larger than the outputs in the latent."""
    leaves, ids, rope = make_inputs()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, distribution=True)
    rows = BATCH * SEQ * HEADS
    assert max(t.numel() for t in kept) == rows * LATENT
    assert sum(t.numel() == rows * LATENT for t in kept) == 1


@pytest.mark.parametrize("queries", [4, BATCH * SEQ])
def test_output_projection(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "_BYTES", queries * HEADS * (LATENT + ROPE) * 8)
    leaves, ids, rope = make_inputs()
    weight = torch.linspace(-1, 1, 7 * HEADS * V, dtype=torch.float64).sin().view(7, -1).requires_grad_()
    expected = linear(plain(leaves, ids, rope)[0].flatten(2), weight)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        got = absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, out_weight=weight).out
    torch.testing.assert_close(got, expected)
    assert all(t.shape[-1] not in (V, HEADS * V) for t in kept if t is not weight)
    gradients = [torch.autograd.grad(out.sin().sum(), [*leaves, weight]) for out in (got, expected)]
    torch.testing.assert_close(*gradients)


def with_complete_lists(ids: Tensor, expanded_rows: int) -> Tensor:
    """The ids, where the first queries list all keys up to their own."""
    ids = torch.cat([ids, ids.new_full((BATCH, SEQ, 1, SEQ - SLOTS), -1)], dim=-1)
    key = torch.arange(SEQ, dtype=torch.int32)
    ids[:, :expanded_rows, 0] = key.where(key <= key[:, None], -1)[:expanded_rows]
    return ids


@pytest.mark.parametrize("expanded_rows", [1, 4, SEQ])
@pytest.mark.parametrize("queries", [3, 2 * SEQ, BATCH * SEQ])
@pytest.mark.parametrize("distribution", [False, True])
@pytest.mark.parametrize("projected", [False, True])
def test_expanded_rows(
    expanded_rows: int, queries: int, distribution: bool, projected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed, "_BYTES", queries * HEADS * (LATENT + ROPE) * 8)
    leaves, ids, rope = make_inputs()
    ids = with_complete_lists(ids, expanded_rows)
    expected, _, p = plain(leaves, ids, rope)
    weight = None
    if projected:
        weight = torch.linspace(-1, 1, 7 * HEADS * V, dtype=torch.float64).sin().view(7, -1).requires_grad_()
        expected, leaves = linear(expected.flatten(2), weight), [*leaves, weight]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        got = absorbed_attention(
            *leaves[:4],
            ids,
            rope,
            sm_scale=SCALE,
            out_weight=weight,
            distribution=distribution,
            expanded=Expanded(expanded_rows, expanded_rows),
        )
    latents = sum(len(t.flatten(0, -2)) for t in kept if t.shape[2:] == (HEADS, LATENT))
    assert latents == BATCH * (SEQ - expanded_rows) * HEADS
    torch.testing.assert_close(got.out, expected)
    assert got.lse is None
    if distribution:
        torch.testing.assert_close(got.distribution, p)
    with torch.no_grad():
        out = absorbed_attention(
            *leaves[:4], ids, rope, sm_scale=SCALE, out_weight=weight, expanded=Expanded(expanded_rows, expanded_rows)
        ).out
    torch.testing.assert_close(out, expected)
    for wanted in (leaves, *([leaf] for leaf in leaves)):
        gradients = [torch.autograd.grad(o.sin().sum(), wanted, retain_graph=True) for o in (got.out, expected)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("by", ["argument", "torch"])
def test_expanded_rows_of_deterministic_calls(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the same bits as listed keys."""
    monkeypatch.setattr(absorption, "ExpandedAttention", None)
    leaves, ids, rope = make_inputs()
    ids = with_complete_lists(ids, 4)
    torch.use_deterministic_algorithms(by == "torch")
    try:
        outs = [
            absorbed_attention(
                *leaves,
                ids,
                rope,
                sm_scale=SCALE,
                deterministic=by == "argument",
                expanded=Expanded(expanded_rows, expanded_rows),
            ).out
            for expanded_rows in (0, 4)
        ]
        gradients = [torch.autograd.grad(out.sin().sum(), leaves) for out in outs]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_expanded_rows_show_nan() -> None:
    leaves, ids, rope = make_inputs()
    heads, *others = (t.detach().clone() for t in leaves)
    heads[0, 2] = torch.nan
    out = absorbed_attention(
        heads, *others, with_complete_lists(ids, 4), rope, sm_scale=SCALE, expanded=Expanded(4, 4)
    ).out
    assert torch.equal(out.isnan().all(-1).all(-1).nonzero(), torch.tensor([[0, 2]]))


def test_plain_projections() -> None:
    plain_one, with_bias, hooked = nn.Linear(3, 4, bias=False), nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    backward_hooked = nn.Linear(3, 4, bias=False)
    backward_hooked.register_full_backward_hook(lambda *_: None)
    patched, normed = (nn.Linear(3, 4, bias=False) for _ in range(2))
    patched.forward = lambda x: x
    nn.utils.parametrizations.weight_norm(normed)
    assert [is_plain(p) for p in (plain_one, with_bias, hooked, backward_hooked, patched, normed)] == [
        True,
        *[False] * 5,
    ]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_plain(plain_one)
    finally:
        handle.remove()


def test_gradient_of_the_output_projection_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs no backward of attention."""
    leaves, ids, rope = make_inputs()
    weight = torch.ones(7, HEADS * V, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(linear(plain(leaves, ids, rope)[0].flatten(2), weight).sum(), weight)
    out = absorbed_attention(*(t.detach() for t in leaves), ids, rope, sm_scale=SCALE, out_weight=weight).out
    monkeypatch.setattr(absorbed.torch.ops.dsa, "sparse_mla_bwd", None)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weight), expected)


@pytest.mark.parametrize("wide", ["heads", "kv"])
def test_wide_tensors_under_autocast(wide: str) -> None:
    """Are cast to bf16, as the operators cast them."""
    leaves, ids, rope = make_inputs()
    heads, key_weight, value_weight, kv = (t.detach().bfloat16().requires_grad_() for t in leaves)
    rope = Rope(rope.cos.bfloat16(), rope.sin.bfloat16(), interleaved=True)
    narrow = heads, kv
    if wide == "heads":
        heads = heads.detach().float().requires_grad_()
    else:
        kv = kv.detach().float().requires_grad_()
    expected = absorbed_attention(narrow[0], key_weight, value_weight, narrow[1], ids, rope, sm_scale=SCALE).out
    expected.float().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = absorbed_attention(heads, key_weight, value_weight, kv, ids, rope, sm_scale=SCALE).out
    out.float().sum().backward()
    assert torch.equal(out, expected)
    for got, leaf in ((heads, narrow[0]), (kv, narrow[1])):
        assert torch.equal(got.grad.bfloat16(), leaf.grad)


def test_output_projection_of_another_dtype() -> None:
    leaves, ids, rope = make_inputs()
    with pytest.raises(RuntimeError, match="dtype"):
        absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, out_weight=torch.ones(7, HEADS * V))


def test_only_some_gradients() -> None:
    leaves, ids, rope = make_inputs()
    expected = torch.autograd.grad(plain(leaves, ids, rope)[0].sum(), leaves)
    for i, leaf in enumerate(leaves):
        alone = [t if t is leaf else t.detach() for t in leaves]
        values = absorbed_attention(*alone, ids, rope, sm_scale=SCALE).out
        torch.testing.assert_close(torch.autograd.grad(values.sum(), leaf)[0], expected[i])


def test_second_derivatives_raise() -> None:
    leaves, ids, rope = make_inputs()
    values = absorbed_attention(*leaves, ids, rope, sm_scale=SCALE).out
    (gradient,) = torch.autograd.grad(values.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="dsa::sparse_mla_bwd: second derivatives"):
        gradient.sum().backward()


def test_without_gradients() -> None:
    leaves, ids, rope = make_inputs()
    expected = plain(leaves, ids, rope)
    with torch.no_grad():
        got = absorbed_attention(*leaves, ids, rope, sm_scale=SCALE)
        q = absorbed_queries(leaves[0], leaves[1], rope)
    torch.testing.assert_close(q, absorbed_queries(leaves[0], leaves[1], rope).detach())
    assert got.distribution is None
    torch.testing.assert_close(got.out, expected[0])


def test_checkpoints() -> None:
    leaves, ids, rope = make_inputs()

    def values() -> Tensor:
        return absorbed_attention(*leaves, ids, rope, sm_scale=SCALE).out

    expected = torch.autograd.grad(values().sum(), leaves)
    for reentrant in (False, True):
        out = checkpoint(lambda *_: values(), *leaves, use_reentrant=reentrant)
        out.sum().backward()
        assert all(torch.equal(leaf.grad, gradient) for leaf, gradient in zip(leaves, expected, strict=True))
        for leaf in leaves:
            leaf.grad = None
