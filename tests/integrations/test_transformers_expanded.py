"""transformers' models with heads that sparse_mha takes: padded, packed and compiled, against transformers itself."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import MODELS, both, integration, make_model, tokens

from dsa_ext.nn import absorption, expanded

SEQ, FIRST = 30, 14
LENGTHS = 12, 4, 14


def make(name: str, **changes: Any) -> Any:
    return make_model(name, qk_nope_head_dim=128, v_head_dim=128, **changes)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int | None]]:
    """Filled with sequences, queries and window of each attention in the expanded form, of at most FIRST queries, with
    a window of 10 at a time."""
    calls: list[tuple[int, int, int | None]] = []
    plain = absorption.ExpandedAttention

    def counted(heads: Tensor, *args: Any, **options: Any) -> Any:
        calls.append((*heads.shape[:2], options["window"]))
        return plain(heads, *args, **options)

    monkeypatch.setattr(absorption, "ExpandedAttention", counted)
    monkeypatch.setattr(expanded, "expanded_rows", lambda seq, *_: min(seq, FIRST))
    monkeypatch.setattr(expanded, "_WINDOW_ROWS", 10)
    return calls


def padded(side: str) -> dict[str, Tensor]:
    mask = torch.ones(2, SEQ, dtype=torch.long)
    hidden = slice(0, 7) if side == "left" else slice(SEQ - 7, None)
    mask[1, hidden] = 0
    return {"attention_mask": mask}


def packed(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    return {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(name: str, side: str, seen: Any) -> None:
    """Of sequences that are one by one in the expanded form at first, then in the absorbed one."""
    inputs = padded(side)
    plain, ours = both(make(name), input_ids=tokens(2, SEQ), use_cache=False, **inputs)
    is_token = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours.logits[is_token], plain.logits[is_token], rtol=1e-4, atol=1e-5)
    assert set(seen) == {(1, FIRST, None)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lengths", [LENGTHS, (15, 15), (1,) * SEQ])
def test_packed_sequences(name: str, lengths: tuple[int, ...], seen: Any) -> None:
    """All are in the expanded form if the longest one is not too long."""
    plain, ours = both(make(name), input_ids=tokens(1, SEQ), use_cache=False, **packed(lengths))
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)
    assert set(seen) == ({(1, 10, max(lengths))} if max(lengths) <= FIRST else {(1, FIRST, None)})


def test_ids_that_bounds_exclude(seen: Any) -> None:
    """A layer that shares an indexer gets ids of other sequences: it ignores them."""
    model = make("GlmMoeDsa")
    x, layer = torch.randn(1, SEQ, 64, generator=torch.Generator().manual_seed(0)), model.model.layers[1].self_attn
    with integration.enable(model), torch.no_grad():
        tables = model.model.rotary_emb(x, torch.arange(SEQ)[None])
        row = torch.arange(SEQ)
        bounds = torch.stack([row // 10 * 10, row + 1, torch.ones_like(row), 0 * row], -1).int()[None, None]
        every = row.int().expand(1, SEQ, -1)
        own = every.where((every <= row[:, None]) & (every >= bounds[0, 0, :, :1]), -1)
        outs = [layer(x, tables, bounds, prev_topk_indices=ids.contiguous())[0] for ids in (every, own)]
    assert not seen
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("inputs", [padded("left"), packed(LENGTHS)])
@pytest.mark.parametrize("train_indexer", [False, True])
def test_gradients(inputs: dict[str, Any], train_indexer: bool, seen: Any) -> None:
    model = make("DeepseekV32", num_experts_per_tok=4).train()
    ids = tokens(2 if "attention_mask" in inputs else 1, SEQ)
    labels = ids.where(inputs.get("attention_mask", torch.ones_like(ids)) == 1, -100)
    results = []
    for deterministic in (True, None):  # deterministic gradients are those of the absorbed form
        with integration.enable(model, train_indexer=train_indexer, deterministic=deterministic):
            model.zero_grad()
            loss = model(ids, labels=labels, use_cache=False, **inputs).loss
            loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert bool(seen) == (deterministic is None)
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("seq", [FIRST, SEQ])
def test_masks_of_numbers(seq: int, seen: Any) -> None:
    """Queries may see later keys: all are in the expanded form, or none."""
    visible = torch.ones(seq, seq, dtype=torch.bool).tril()
    visible[:5, :5] = True
    mask = torch.zeros(seq, seq).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    plain, ours = both(make("DeepseekV32"), input_ids=tokens(1, seq), attention_mask=mask, use_cache=False)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)
    assert set(seen) == ({(1, FIRST, None)} if seq == FIRST else set())


@pytest.mark.parametrize("name", MODELS)
def test_cached_keys(name: str, seen: Any) -> None:
    """A chunk of a prompt is in the expanded form if no keys precede it."""
    model, ids = make(name), tokens(2, SEQ)
    with integration.enable(model), torch.no_grad():
        whole = model(ids, use_cache=False).logits
        seen.clear()
        first = model(ids[:, :17], use_cache=True)
        assert set(seen) == {(1, FIRST, None)}
        seen.clear()
        second = model(ids[:, 17:], past_key_values=first.past_key_values)
        assert not seen
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [{}, padded("left"), packed(LENGTHS)])
@pytest.mark.parametrize("most", [FIRST, SEQ])
def test_compiled(inputs: dict[str, Any], most: int, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "expanded_rows", lambda seq, *_: min(seq, most))
    torch._dynamo.reset()
    model, ids = make("DeepseekV32"), tokens(2 if "attention_mask" in inputs else 1, SEQ)
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        calls.append(str(graph.code).count("dsa.sparse_mha_fwd"))
        return graph.forward

    with integration.enable(model), torch.no_grad():
        expected = model(ids, use_cache=False, **inputs).logits
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(ids, use_cache=False, **inputs).logits, expected, rtol=1e-4, atol=1e-5)
    # Without a mask a graph does not know that no query sees a later key: sequences might be packed.
    is_known = "attention_mask" in inputs
    assert sum(calls) == (len(model.model.layers) if is_known or most == SEQ else 0)
