"""Attention in the expanded form, with the columns of sparse_mha, against the absorbed form on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_ext import functional
from dsa_ext.nn import absorbed, absorption
from dsa_ext.nn import expanded as expanded_module
from dsa_ext.nn.absorbed import absorbed_attention
from dsa_ext.nn.absorption import Rope
from dsa_ext.nn.expanded import NONE, Expanded, expanded_rows, fits
from dsa_ext.nn.indexer import IndexerTensors

BATCH, SEQ, HEADS, NOPE, LATENT, ROPE, V, SLOTS = 2, 13, 2, 128, 512, 64, 128, 5
SCALE = 0.05


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_inputs(keys: int = SEQ) -> tuple[list[Tensor], Tensor, Rope]:
    heads, kv = random(BATCH, SEQ, HEADS, NOPE + ROPE), random(BATCH, SEQ, 1, LATENT + ROPE, seed=1)
    weights = random(HEADS, NOPE, LATENT, seed=2) / 8, random(HEADS, V, LATENT, seed=3) / 8
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randperm(SEQ, generator=generator)[:SLOTS] for _ in range(BATCH * SEQ)]
    ids = torch.stack(rows).view(BATCH, SEQ, 1, SLOTS).int()
    ids = ids.where((ids <= torch.arange(SEQ).view(-1, 1, 1)) & (ids < keys), -1)
    angles = random(BATCH, SEQ, 1, ROPE // 2, seed=5)
    return [t.requires_grad_() for t in (heads, *weights, kv)], ids, Rope(angles.cos(), angles.sin(), True)


def make_learner() -> IndexerTensors:
    shapes = (BATCH, SEQ, 8, 64), (BATCH, SEQ, 64), (BATCH, SEQ, 8)
    return IndexerTensors(*(random(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)))


def results(expanded: Expanded, *, wanted: slice = slice(None), **options: Any) -> list[Any]:
    """Output, distribution and loss, and the gradients of all that requires one."""
    leaves, ids, rope = make_inputs()
    rope = rope._replace(interleaved=options.pop("interleaved", True))
    learner = make_learner() if options.pop("learns", False) else None
    weight = random(7, HEADS * V, seed=9).requires_grad_() if options.pop("projected", False) else None
    got = absorbed_attention(
        *leaves, ids, rope, sm_scale=SCALE, out_weight=weight, learner=learner, expanded=expanded, **options
    )
    total = got.out.sin().sum() + (0 if got.loss is None else 0.3 * got.loss)
    sources = [*leaves, *([] if weight is None else [weight]), *(learner or [])][wanted]
    return [got.out, got.distribution, got.loss, *torch.autograd.grad(total, sources)]


@pytest.mark.parametrize("rows", [1, 6, SEQ])
@pytest.mark.parametrize("queries", [3, BATCH * SEQ])
@pytest.mark.parametrize(
    "options", [{}, {"projected": True}, {"distribution": True}, {"learns": True}, {"interleaved": False}]
)
def test_like_the_absorbed_form(
    rows: int, queries: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed, "_BYTES", queries * HEADS * (LATENT + ROPE) * 8)
    torch.testing.assert_close(results(Expanded(rows, rows), **options), results(NONE, **options))


@pytest.mark.parametrize("rows", [6, SEQ])
@pytest.mark.parametrize("projected", [False, True])
def test_a_deferred_loss(rows: int, projected: bool) -> None:
    options = {"learns": True, "projected": projected}
    got = results(Expanded(rows, rows), deferred=True, **options)
    torch.testing.assert_close(got, results(NONE, **options))


def packed() -> dict[str, Tensor]:
    """Bounds of sequences of at most four rows."""
    row = torch.arange(SEQ, dtype=torch.int32)
    starts = torch.tensor([0, 2, 6, 9, 12])
    start = starts[torch.searchsorted(starts, row, right=True) - 1]
    return {"starts": start.int().expand(BATCH, -1), "ends": (row + 1).expand(BATCH, -1)}


@pytest.mark.parametrize("options", [{}, {"projected": True}, {"distribution": True}, {"learns": True}])
@pytest.mark.parametrize(("expanded", "at_once"), [((6, 6), SEQ), ((SEQ, SEQ, 4), SEQ), ((SEQ, SEQ, 4), 5)])
def test_packed_sequences(
    expanded: tuple[int, ...], at_once: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose lists name keys of their own sequence only; without a window and with one."""
    monkeypatch.setattr(expanded_module, "_WINDOW_ROWS", at_once)
    bounds = packed()
    plain = make_inputs

    def of_sequences(*args: Any) -> Any:
        leaves, ids, rope = plain(*args)
        return leaves, ids.where(ids >= bounds["starts"][:, :, None, None], -1), rope

    monkeypatch.setitem(globals(), "make_inputs", of_sequences)
    expected = results(NONE, **options, **bounds)
    torch.testing.assert_close(results(Expanded(*expanded), **options, **bounds), expected)
    if options.get("learns"):
        torch.testing.assert_close(results(Expanded(*expanded), deferred=True, **options, **bounds), expected)


@pytest.mark.parametrize("options", [{}, {"distribution": True}, {"learns": True, "projected": True}])
@pytest.mark.parametrize("expanded", [(6, 6), (SEQ, SEQ), (SEQ, SEQ, SEQ)])
def test_plain_formulas(expanded: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that compiled calls get."""
    expected = results(NONE, **options)
    monkeypatch.setattr(expanded_module, "_WINDOW_ROWS", 5)
    calls, sparse_mha = [], functional.sparse_mha
    monkeypatch.setattr(functional, "sparse_mha", lambda *a, **o: calls.append(a[0].shape[1]) or sparse_mha(*a, **o))
    monkeypatch.setattr(absorbed, "is_compiling", lambda: True)
    torch.testing.assert_close(results(Expanded(*expanded), **options), expected)
    assert calls == ([5, 5, 3] if len(expanded) == 3 else [expanded[0]])


def test_places() -> None:
    def places(*expanded: Any) -> list[tuple[int, ...]]:
        return [(r.start, r.stop, k.start, k.stop) for r, k, _ in Expanded(*expanded).places()]

    assert places(0, 0) == places(0, 0, 7) == []
    assert places(5, 9) == [(0, 5, 0, 9)]
    for expanded, causal in {(5, 9): False, (5, 5): True, (5, 5, None, False): False, (9, 9, 3): True}.items():
        assert [of[2] for of in Expanded(*expanded).places()] == [causal]
    assert places(8000, 8000, 100) == [(0, 8000, 0, 8000)]
    assert places(16384, 16384, 100) == [(0, 8192, 0, 8192), (8192, 16384, 8093, 16384)]
    assert places(8193, 8193, 9000) == [(0, 4097, 0, 4097), (4097, 8193, 0, 8193)]


@pytest.mark.parametrize("rows", [6, SEQ])
def test_keys_of_other_rows(rows: int) -> None:
    """As on a rank that has some of the first queries: bounds say where they are, and they list any of 9 keys. Of a
    rank that has no others too."""
    row = torch.arange(SEQ, dtype=torch.int32).expand(BATCH, SEQ)
    bounds = {"starts": torch.zeros_like(row), "ends": row + 1}
    leaves, ids, rope = make_inputs(keys=9)
    outs = [
        absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, expanded=e, **bounds).out
        for e in (Expanded(rows, 9), NONE)
    ]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), leaves) for out in outs))


@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient(wanted: int) -> None:
    chosen = {"wanted": slice(wanted, wanted + 1)}
    torch.testing.assert_close(results(Expanded(6, 6), **chosen), results(NONE, **chosen))


def test_what_is_kept() -> None:
    """Values and lse of the rows in the expanded form, latents of the others; no keys or values of heads."""
    leaves, ids, rope = make_inputs()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        absorbed_attention(*leaves, ids, rope, sm_scale=SCALE, expanded=Expanded(6, 6))
    assert max(t.numel() for t in kept) == max(t.numel() for t in (*leaves, random(1, SEQ - 6, HEADS, LATENT)))


def test_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are worked on apart."""
    expected = results(Expanded(SEQ, SEQ), distribution=True)
    shapes, plain = [], absorption.ExpandedAttention

    def counted(heads: Tensor, *args: Any, **options: Any) -> Any:
        shapes.append(tuple(heads.shape[:2]))
        return plain(heads, *args, **options)

    monkeypatch.setattr(expanded_module, "MOST_PAIRS", 200)
    monkeypatch.setattr(absorption, "ExpandedAttention", counted)
    torch.testing.assert_close(results(Expanded(SEQ, SEQ), distribution=True), expected)
    assert shapes == [(1, SEQ)] * 2 * BATCH


def test_rows() -> None:
    columns = 128, 64, 128
    assert [expanded_rows(10**6, 2048, heads, *columns) // 2048 for heads in (128, 64, 32, 16, 8)] == [4, 4, 6, 8, 8]
    assert [expanded_rows(10**6, 100, heads, *columns) // 100 for heads in (128, 64, 48, 32, 16, 8, 1)] == [
        4,
        4,
        4,
        6,
        10,
        18,
        130,
    ]
    assert expanded_rows(100, 2048, 128, *columns) == 100
    assert expanded_rows(10**6, 2048, 64, 192, 64, 256) == 2048
    assert fits(*columns)
    assert not fits(192, 64, 256)


def test_weights_of_one_tensor_are_not_copied() -> None:
    whole = random(HEADS + 1, NOPE + V, LATENT)[1:]
    keys, values = whole.split([NOPE, V], dim=1)
    together = expanded_module._together(keys, values)
    assert torch.equal(together, whole)
    assert together.data_ptr() == whole.data_ptr()
    apart = [(keys.clone(), values), (keys, values.clone()), (values, keys), (keys[:1], values[1:]), (keys, keys)]
    for some, others in (*apart, (whole[:, :NOPE], whole[:, NOPE + 1 :])):
        assert torch.equal(expanded_module._together(some, others), torch.cat([some, others], dim=1))
