"""SparseMLA with a PagedKVCache on the CPU, compared with the layer on whole sequences."""

from typing import Any

import pytest
import torch
from cached_layers import Feeder, poisoned
from modes import autocast
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa_ext
from dsa_ext.nn import PagedKVCache, SparseMLA, apply_rope

HIDDEN, TOPK = 48, 5
FP8 = torch.float8_e4m3fn
LENGTHS = (23, 9, 14)


def make_layer(dtype: torch.dtype = torch.float64, precision: str = "bf16", **changes: Any) -> SparseMLA:
    torch.manual_seed(0)
    sizes = {"q_lora_rank": 32, "nope_dim": 16, "v_dim": 24, "topk": TOPK, **changes}
    return SparseMLA(HIDDEN, 4, **sizes, indexer={"heads": 8, "head_dim": 64, "precision": precision}, dtype=dtype)


def make_inputs(dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, HIDDEN, generator=generator, dtype=torch.float64).to(dtype) for length in lengths]


def make_cache(layer: SparseMLA, page_size: int = 4, num_blocks: int = 64, **options: Any) -> PagedKVCache:
    return poisoned(layer.make_cache(1, num_blocks, len(LENGTHS), 40, page_size=page_size, **options))


@torch.no_grad()
def check_whole(feeder: Feeder, rtol: float | None = None, atol: float | None = None) -> None:
    """Every token got what the layer gives the whole sequence, in the absorbed form as with a cache."""
    for i, x in enumerate(feeder.inputs):
        whole = feeder.layer(x[None], cu_seqlens=torch.tensor([0, len(x)], dtype=torch.int32))
        assert torch.equal(feeder.ids(i), whole.ids[0])
        torch.testing.assert_close(feeder.out(i), whole.out[0], rtol=rtol, atol=atol)


@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, "bf16"), (torch.float32, "fp8"), (torch.bfloat16, "fp8")], ids=str
)
def test_steps_give_what_whole_sequences_give(dtype: torch.dtype, precision: str, page_size: int) -> None:
    """Prompts in chunks, then tokens one by one and two at a time, in any order of the sequences."""
    layer = make_layer(dtype, precision)
    feeder = Feeder(layer, make_inputs(dtype), make_cache(layer, page_size))
    feeder.prefill({0: 5, 2: 1})
    feeder.prefill({2: 4, 0: 7, 1: 3})
    feeder.decode([2, 0, 1])
    feeder.decode([1, None, 2], 2)
    feeder.prefill({1: 1})
    feeder.finish(2)
    check_whole(feeder)


@pytest.mark.parametrize("page_size", [1, 3, 53])
def test_pages_of_any_size(page_size: int) -> None:
    layer = make_layer()
    feeder = Feeder(layer, make_inputs(), make_cache(layer, page_size))
    feeder.prefill({0: 8, 1: 3, 2: 6})
    feeder.finish()
    check_whole(feeder)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_decoding_from_the_first_token(tokens: int) -> None:
    layer = make_layer()
    feeder = Feeder(layer, make_inputs(), make_cache(layer))
    feeder.finish(tokens)
    check_whole(feeder)


def test_chunks_of_a_prompt() -> None:
    """Of any size, from one token to the whole prompt."""
    layer, (x, *_) = make_layer(), make_inputs()
    for chunk in (1, 4, 9, len(x)):
        feeder = Feeder(layer, [x], make_cache(layer))
        for begin in range(0, len(x), chunk):
            feeder.prefill({0: min(chunk, len(x) - begin)})
        check_whole(feeder)


@pytest.mark.parametrize("topk", [1, 40])
def test_fewer_and_more_keys_than_there_are(topk: int) -> None:
    layer = make_layer(topk=topk)
    feeder = Feeder(layer, make_inputs(), make_cache(layer))
    feeder.prefill({1: 5, 0: 11})
    feeder.finish()
    check_whole(feeder)


def test_latents_in_fp8() -> None:
    """The same selection, which does not depend on the latents, and nearly the same results."""
    layer = make_layer(torch.bfloat16, "fp8")
    feeder = Feeder(layer, make_inputs(torch.bfloat16), make_cache(layer, dtype=FP8))
    assert feeder.cache.kv(0).shape[2:] == (1, 656)
    feeder.prefill({0: 5, 1: 4, 2: 13})
    feeder.finish()
    check_whole(feeder, rtol=0.1, atol=0.06)
    differs = [not torch.equal(feeder.out(i), layer(x[None]).out[0]) for i, x in enumerate(feeder.inputs)]
    assert any(differs), "the latents were not quantized"


def test_prefill_and_decoding_read_the_same_latents_in_fp8() -> None:
    layer, results = make_layer(torch.bfloat16, "fp8"), []
    for prefill in (True, False):
        feeder = Feeder(layer, make_inputs(torch.bfloat16), make_cache(layer, dtype=FP8))
        feeder.prefill({0: 16, 1: 3, 2: 8})
        step = feeder.prefill({0: 6, 1: 6, 2: 6}) if prefill else feeder.decode([0, 1, 2], 6)
        results.append(step.out.reshape(-1, HIDDEN))
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)


def test_rejected_tokens() -> None:
    """Tokens that a draft model proposed and that were rejected leave no trace, also where they began a page."""
    layer, inputs = make_layer(), make_inputs()
    feeder = Feeder(layer, [x.clone() for x in inputs], make_cache(layer))
    feeder.prefill({0: 7, 1: 3, 2: 8})
    for i, rejected in ((0, 3), (1, 2), (2, 4)):
        feeder.inputs[i][feeder.fed[i] + 4 - rejected : feeder.fed[i] + 4] = 9.0
    free = feeder.cache.free_blocks
    feeder.decode([0, 1, 2], 4)
    for i, kept in ((0, 1), (1, 2), (2, 0)):
        feeder.truncate(i, feeder.fed[i] - 4 + kept)
    feeder.inputs = inputs
    assert feeder.cache.free_blocks == free - 1
    feeder.finish(2)
    check_whole(feeder)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_evicted_pages(precision: str) -> None:
    """Their tokens are not selected, by prefill and decoding alike; all else is as without them."""
    layer, inputs = make_layer(torch.float32, precision), make_inputs(torch.float32)
    results = []
    for prefill in (True, False):
        feeder = Feeder(layer, inputs, make_cache(layer))
        feeder.prefill({0: 17, 1: 3, 2: 8})
        before, blocks = feeder.cache.free_blocks, feeder.cache.blocks(feeder.sequences[0])
        feeder.cache.evict(feeder.sequences[0], [1, 3, 1])
        assert feeder.cache.free_blocks == before + 2
        assert feeder.cache.blocks(feeder.sequences[0]) == [blocks[0], -1, blocks[2], -1, blocks[4]]
        assert feeder.cache.length(feeder.sequences[0]) == 17
        poisoned_pages = [blocks[1], blocks[3]]
        feeder.cache.kv(0)[poisoned_pages] = torch.nan
        step = feeder.prefill({0: 6, 1: 6, 2: 6}) if prefill else feeder.decode([0, 1, 2], 6)
        assert step.out.isfinite().all()
        results.append((step.out.reshape(-1, HIDDEN), feeder.ids(0)[17:]))
    (out, ids), (decoded, decoded_ids) = results
    torch.testing.assert_close(decoded, out)
    assert torch.equal(ids, decoded_ids)
    assert set(ids.unique().tolist()) <= {*range(4), *range(8, 12), *range(16, 23)}
    # A selection among the remaining keys by the layer itself.
    tensors = layer.indexer(inputs[0][None], layer.q_a_layernorm(layer.q_a_proj(inputs[0][None])))
    kept = torch.tensor([*range(4), *range(8, 12), *range(16, 23)])
    tensors = tensors._replace(q=tensors.q[:, 17:], k=tensors.k[:, kept], weights=tensors.weights[:, 17:])
    ends = torch.arange(10, 16, dtype=torch.int32)[None]
    expected = layer.indexer.select(tensors, TOPK, (torch.zeros_like(ends), ends))
    assert torch.equal(kept[expected[0].long()].int(), ids)


def test_layers_that_share_an_indexer() -> None:
    """The second layer attends to the keys that the first selected, in prefill and in decoding."""
    layers = [make_layer(), make_layer()]
    inputs = make_inputs()
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter.mul_(1.1)
        expected = []
        for x in inputs:
            ids = layers[0](x[None]).ids
            expected.append(layers[1](x[None], ids=ids).out[0])
        cache = poisoned(layers[0].make_cache(2, 64, 3, 40, page_size=4))
        sequences = [cache.add() for _ in inputs]

        def step(x: Tensor) -> Tensor:
            ids = layers[0](x, cache=cache, layer=0).ids
            result = layers[1](x, cache=cache, layer=1, ids=ids)
            assert result.ids is ids
            return result.out

        cache.prefill(sequences, [8, 3, 7])
        got = step(torch.cat([x[:n] for x, n in zip(inputs, (8, 3, 7), strict=True)])[None])[0].split([8, 3, 7])
        cache.decode(sequences, 2)
        new = step(torch.stack([x[n : n + 2] for x, n in zip(inputs, (8, 3, 7), strict=True)]))
    for first, second, all_tokens in zip(got, new, expected, strict=True):
        out = torch.cat([first, second])
        torch.testing.assert_close(out, all_tokens[: len(out)])


@pytest.mark.parametrize("prefill", [True, False])
def test_ids_that_are_no_keys(prefill: bool) -> None:
    """Slots of other sequences, of later tokens and outside of the cache: none of them is read."""
    layer, (x, *_) = make_layer(), make_inputs()
    cache = make_cache(layer)
    sequence = cache.add()
    with torch.no_grad():
        cache.prefill([sequence], [8])
        layer(x[None, :8], cache=cache)
        if prefill:
            cache.prefill([sequence], [1])
        else:
            cache.decode([sequence])
        good = [block * 4 + row for block in cache.blocks(sequence) for row in range(4)][:9]
        slots = torch.tensor([[[*good, -1, -7, 2**31 - 1, 65 * 4, 64 * 4]]], dtype=torch.int32)
        got = layer(x[None, 8:9], cache=cache, ids=slots).out
        whole = torch.arange(9, dtype=torch.int32).expand(1, 9, 9)
        torch.testing.assert_close(got, layer(x[None, :9], ids=whole).out[:, 8:])


def test_rows_without_a_sequence() -> None:
    """They change nothing that belongs to a sequence, and have empty selections."""
    layer, inputs = make_layer(), make_inputs()
    pages = []
    for order in ([0, 1], [0, None, 1], [None, 0, 1]):
        feeder = Feeder(layer, inputs[:2], make_cache(layer))
        feeder.prefill({0: 5, 1: 5})
        feeder.decode(order, 3)  # type: ignore[arg-type]
        pages.append((feeder.cache.kv(0).clone(), feeder.cache.index_keys(0).clone()))
    for others in pages[1:]:
        for a, b in zip(pages[0], others, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize(
    ("dtype", "precision", "latents"),
    [(torch.float64, "bf16", None), (torch.bfloat16, "fp8", None), (torch.bfloat16, "fp8", FP8)],
    ids=str,
)
def test_nan_and_infinities_reach_results(
    dtype: torch.dtype, precision: str, latents: torch.dtype | None, value: float
) -> None:
    """They make all scores of their token NaN, which then selects its own key, and reach no other token: in prefill and
    in decoding, as without a cache."""
    layer, inputs = make_layer(dtype, precision), make_inputs(dtype)
    for i, token in ((0, 0), (0, 6), (0, 20), (1, 8), (2, 7)):
        inputs[i][token] = value
    feeder = Feeder(layer, inputs, make_cache(layer, dtype=latents))
    feeder.prefill({0: 8, 1: 3})
    feeder.decode([1, None, 0], 2)
    feeder.finish(3)
    for i, x in enumerate(inputs):
        with torch.no_grad():
            whole = layer(x[None], cu_seqlens=torch.tensor([0, len(x)], dtype=torch.int32))
        assert torch.equal(feeder.ids(i), whole.ids[0])
        assert torch.equal(feeder.out(i).isnan(), ~x.isfinite().all(1)[:, None].expand(-1, HIDDEN))
        assert torch.equal(feeder.out(i).isnan(), whole.out[0].isnan())


def test_a_cache_under_autocast() -> None:
    layer, inputs = make_layer(torch.float32, "fp8"), make_inputs(torch.float32)
    with torch.no_grad(), autocast():
        feeder = Feeder(layer, inputs, make_cache(layer))
        assert feeder.cache.dtype == torch.bfloat16
        feeder.prefill({0: 9, 1: 4, 2: 6})
        feeder.finish(3)
        for i, x in enumerate(inputs):
            whole = layer(x[None])
            assert torch.equal(feeder.ids(i), whole.ids[0])
            torch.testing.assert_close(feeder.out(i), whole.out[0], rtol=0.05, atol=0.02)


def test_a_cache_in_fp8_is_for_layers_in_bf16() -> None:
    for dtype in (torch.float32, torch.float64):
        message = f"SparseMLA: dtype may be float8_e4m3fn in bfloat16 layers only, got {dtype}"
        with pytest.raises(ValueError, match=message.replace("torch.", "")):
            make_cache(make_layer(dtype), dtype=FP8)
    for own, of_cache, also in (
        (torch.float32, torch.bfloat16, ""),
        (torch.bfloat16, torch.float32, ", or float8_e4m3fn"),
    ):
        message = f"SparseMLA: dtype must be {own}, the layer's own{also}, got {of_cache}".replace("torch.", "")
        with pytest.raises(ValueError, match=message):
            make_cache(make_layer(own), dtype=of_cache)
    with autocast():
        assert make_cache(make_layer(torch.float32), dtype=FP8).dtype == FP8


def test_errors_of_calls() -> None:
    layer, cache = make_layer(), make_cache(make_layer())
    sequence, x = cache.add(), torch.zeros(1, 1, HIDDEN, dtype=torch.float64)
    cache.decode([sequence])
    with pytest.raises(ValueError, match="SparseMLA: a cache has no gradients, call under"):
        layer(x, cache=cache)
    with torch.no_grad():
        calls: list[tuple[Tensor, dict[str, Any], str]] = [
            (x[:, :, 1:], {}, r"x must be \[B, S, 48\]"),
            (
                x.expand(1, 2, -1),
                {},
                r"x must be \[1, 1, 48\], the tokens of the last cache.decode, got .*\[1, 2, 48\]",
            ),
            (x, {"positions": torch.zeros(1)}, "positions, cu_seqlens and max_seqlen must be None with a cache"),
            (x, {"cu_seqlens": torch.zeros(2).int()}, "positions, cu_seqlens and max_seqlen must be None with a cache"),
            (x, {"ids": torch.zeros(1, 2, 3).int()}, r"ids must be int32 \[B=1, S=1, K\]"),
            (x, {"layer": 1}, "layer must be from 0 to 0, got 1"),
        ]
        for given, options, message in calls:
            with pytest.raises(ValueError, match=message):
                layer(given, cache=cache, **options)
        with pytest.raises(TypeError, match="SparseMLA: cache must be a PagedKVCache, got dict"):
            layer(x, cache={})
        elsewhere = make_layer().to("meta").make_cache(1, 8, 1, 8)
        with pytest.raises(ValueError, match="SparseMLA: cache is on meta, x on cpu"):
            layer(x, cache=elsewhere)
        with pytest.raises(ValueError, match="layer is a number in a cache, got 0 without a cache"):
            layer(x, layer=0)
        cache.prefill([sequence], [2])
        with pytest.raises(ValueError, match=r"x must be \[1, 2, 48\], the tokens of the last cache.prefill"):
            layer(x, cache=cache)
        other = make_layer(torch.float32)
        hint = r"\(autocast changes .*: make_cache and the layer must be called under the same autocast\)$"
        with pytest.raises(ValueError, match=rf"kv must be float64 \[.., 576\], 2 rows, .*, got float32 .* {hint}"):
            other(x.float().expand(1, 2, -1), cache=cache)
        layer.phase = "dense"
        with pytest.raises(ValueError, match="a cache is for the phase 'sparse', got 'dense'"):
            layer(x, cache=cache)
        layer.phase = "sparse"
        several = layer.make_cache(2, 8, 1, 8)
        several.decode([several.add()])
        with pytest.raises(ValueError, match="layer must be the number of this layer in a cache of 2, got None"):
            layer(x, cache=several)
        with pytest.raises(RuntimeError, match=r"SparseMLA: a cache cannot be used in the transforms of torch\.func"):
            torch.vmap(lambda x: layer(x, cache=several, layer=0).out)(x[None])


def test_fake_tensors_leave_no_tables() -> None:
    """A pass with fake tensors, for example to trace a model, does not spoil the cache."""
    layer, (x, *_) = make_layer(), make_inputs()
    cache = make_cache(layer)
    sequence = cache.add()
    cache.prefill([sequence], [4])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        heads = mode.from_tensor(torch.randn(1, 4, 2, 64, dtype=torch.float64))
        assert apply_rope(heads, cache.rows()).shape == heads.shape
    cache.truncate(sequence, 0)
    cache.prefill([sequence], [len(x)])
    with torch.no_grad():
        torch.testing.assert_close(layer(x[None], cache=cache).out, layer(x[None]).out)
        heads = torch.randn(1, len(x), 2, 64, dtype=torch.float64)
        torch.testing.assert_close(apply_rope(heads, cache.rows()), apply_rope(heads, torch.arange(len(x))))


@pytest.mark.parametrize("with_tables", [False, True])
def test_compiled_layer(with_tables: bool) -> None:
    """Whole graphs of prefill and of decoding, whether or not an ordinary call has filled the tables of RoPE."""
    torch._dynamo.reset()
    layer, (x, *_) = make_layer(), make_inputs()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    cache = make_cache(layer)
    sequence = cache.add()
    if with_tables:
        cache.decode([sequence])
        with torch.no_grad():
            layer(x[None, :1], cache=cache)
        cache.truncate(sequence, 0)
    with torch.no_grad():
        expected = layer(x[None]).out
        cache.prefill([sequence], [len(x) - 2])
        torch.testing.assert_close(compiled(x[None, :-2], cache=cache).out, expected[:, :-2])
        for i in (len(x) - 2, len(x) - 1):
            cache.decode([sequence])
            torch.testing.assert_close(compiled(x[None, i : i + 1], cache=cache).out, expected[:, i : i + 1])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_batch_invariant_is_passed(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, got = dsa_ext.functional.sparse_mla_decode, []

    def spy(*args: Any, **options: Any) -> Any:
        got.append(options["batch_invariant"])
        return decode(*args, **options)

    monkeypatch.setattr(dsa_ext.functional, "sparse_mla_decode", spy)
    layer = make_layer()
    feeder = Feeder(layer, make_inputs(), make_cache(layer, batch_invariant=batch_invariant))
    feeder.prefill({0: 3})
    feeder.decode([0, 1])
    assert got == [batch_invariant]


@torch.no_grad()
def test_lengths_of_selected_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is told how long the contexts are, unless ids come from elsewhere, in any order."""
    calls: list[Tensor | None] = []
    decode = dsa_ext.functional.sparse_mla_decode

    def recorded(*args: Any, topk_length: Tensor | None = None, **options: Any) -> Any:
        calls.append(None if topk_length is None else topk_length.clone())
        return decode(*args, topk_length=topk_length, **options)

    layer = make_layer()
    cache = make_cache(layer)
    feeder = Feeder(layer, make_inputs(), cache)
    feeder.prefill({0: 5, 1: 2})
    monkeypatch.setattr(dsa_ext.functional, "sparse_mla_decode", recorded)
    feeder.decode([1, 0])
    (lengths,) = calls
    assert lengths is not None
    assert lengths.tolist() == [3, 6]
    cache.decode([1, 0])
    x = torch.randn(2, 1, HIDDEN, dtype=torch.float64)
    layer(x, cache=cache, ids=layer(x, cache=cache).ids)
    assert calls[2] is None
