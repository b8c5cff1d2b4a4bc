"""PagedKVCache on the CPU: SparseMLA with it, compared with the layer on whole sequences; its pages; its errors."""

import random
import re
from typing import Any

import pytest
import torch
from cached_layers import Feeder, poisoned
from modes import autocast
from torch import Tensor

import dsa_ext
from dsa_ext.nn import CacheFullError, PagedKVCache, SparseMLA

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


def make_small(**changes: Any) -> PagedKVCache:
    options: Any = {"layers": 2, "num_blocks": 4, "max_sequences": 2, "max_length": 12, "page_size": 4, **changes}
    return PagedKVCache(**options)


@torch.no_grad()
def check_whole(feeder: Feeder, rtol: float | None = None, atol: float | None = None) -> None:
    """Every token got what the layer gives the whole sequence."""
    for i, x in enumerate(feeder.inputs):
        whole = feeder.layer(x[None])
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


def test_truncation_of_evicted_pages() -> None:
    cache = make_small(num_blocks=6)
    sequence = cache.add()
    cache.prefill([sequence], [11])
    cache.evict(sequence, [0, 1])
    with pytest.raises(ValueError, match="cannot be truncated to 6 tokens: the page of the last one was evicted"):
        cache.truncate(sequence, 6)
    cache.truncate(sequence, 8)
    assert (cache.blocks(sequence), cache.free_blocks) == ([-1, -1], 6)
    cache.prefill([sequence], [1])
    assert cache.blocks(sequence)[:2] == [-1, -1]
    cache.truncate(sequence, 0)
    cache.free(sequence)
    assert cache.free_blocks == 6


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


def test_slots_and_numbers_of_keys() -> None:
    """A step of prefill of two sequences, of which one has lost a page; a third one is not in the step."""
    cache = make_small(num_blocks=12, max_sequences=3, max_length=16)
    a, b, c = (cache.add() for _ in range(3))
    cache.prefill([a, b, c], [9, 4, 4])
    cache.evict(a, [1])
    cache.prefill([b, a], [1, 1])
    slots = [4 * block + row for s, n in ((b, 5), (a, 10)) for block in cache.blocks(s) for row in range(4)]
    slots = [*slots[:5], *slots[8:12], *slots[16:18]]
    assert cache.ids_of_keys(torch.arange(-1, 11)).tolist() == [-1, *slots]
    assert cache.keys_of_ids(torch.tensor(slots).int()).tolist() == list(range(11))
    others = torch.tensor([-1, -100, 4 * cache.blocks(c)[0] + 3, 12 * 4, 13 * 4, 2**31 - 1], dtype=torch.int32)
    assert (cache.keys_of_ids(others) < 0).all()
    step: Any = cache.step
    assert (step.starts.tolist(), step.ends.tolist()) == ([[0, 5]], [[5, 11]])
    assert step.positions.tolist() == [[4, 9]]


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


def test_addresses_stay() -> None:
    """A step of decoding of B sequences and N tokens reads the same memory, whatever its contents: a CUDA graph can be
    captured once."""
    cache = make_small(num_blocks=12, max_sequences=4, max_length=64)
    a, b, c = (cache.add() for _ in range(3))
    addresses = set()
    for sequences in ([a, b], [c, a], [b, None], [None, None]):
        cache.decode(sequences, 2)
        step = cache.step
        addresses.add(tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in step))
        cache.decode([a, b, c])
        assert cache.step.context_lens.tolist() == [cache.length(s) for s in (a, b, c)]  # type: ignore[union-attr]
    assert len(addresses) == 1


def test_pages_are_shared_by_no_two_sequences() -> None:
    """Random steps: tables have the pages that the lengths require, every page once."""
    for seed in range(20):
        draw = random.Random(seed)
        page = draw.choice([4, 8])
        cache = make_small(num_blocks=draw.randrange(4, 12), max_sequences=3, max_length=30, page_size=page)
        lengths: dict[int, int] = {}
        for _ in range(120):
            some = draw.sample(list(lengths), draw.randrange(len(lengths) + 1))
            before = {s: cache.blocks(s) for s in lengths}
            action = draw.choice(["add", "free", "truncate", "evict", "prefill", "decode"])
            try:
                if action == "add":
                    lengths[cache.add()] = 0
                elif action == "prefill" and some:
                    counts = [draw.randrange(1, 9) for _ in some]
                    cache.prefill(some, counts)
                    lengths |= {s: lengths[s] + n for s, n in zip(some, counts, strict=True)}
                elif action == "decode" and some:
                    cache.decode(some, count := draw.randrange(1, 7))
                    lengths |= {s: lengths[s] + count for s in some}
                elif some and action == "free":
                    cache.free(some[0])
                    del lengths[some[0]]
                elif some and action == "truncate":
                    cache.truncate(some[0], length := draw.randrange(lengths[some[0]] + 1))
                    lengths[some[0]] = length
                elif some and action == "evict" and lengths[some[0]] >= page:
                    cache.evict(some[0], [draw.randrange(lengths[some[0]] // page)])
            except (CacheFullError, ValueError):
                assert {s: cache.blocks(s) for s in lengths} == before
            assert cache.sequences == list(lengths)
            assert {s: cache.length(s) for s in lengths} == lengths
            tables = {s: cache.blocks(s) for s in lengths}
            assert all(len(tables[s]) == -(-lengths[s] // page) for s in lengths)
            used = [block for table in tables.values() for block in table if block >= 0]
            assert len(set(used)) == len(used)
            assert len(used) + cache.free_blocks == cache.num_blocks
            assert all(block < cache.num_blocks for block in used)


def test_a_full_cache() -> None:
    """An error that changes nothing, after which the cache is usable."""
    cache = make_small(max_length=16)
    a, b = cache.add(), cache.add()
    with pytest.raises(CacheFullError, match="it holds max_sequences=2 sequences"):
        cache.add()
    cache.prefill([a, b], [9, 3])
    for call in (lambda: cache.prefill([b, a], [1, 4]), lambda: cache.decode([b, a], 2)):
        with pytest.raises(CacheFullError, match="PagedKVCache: 1 more pages are required, 0 of 4 are free"):
            call()
        assert (cache.length(a), cache.length(b)) == (9, 3)
    cache.free(a)
    assert (cache.free_blocks, cache.sequences) == (3, [b])
    cache.decode([b], 6)
    assert (cache.length(b), cache.add() not in (a, b)) == (9, True)


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


def test_positions_of_slots() -> None:
    cache = make_small(num_blocks=8, max_length=16)
    a, b = cache.add(), cache.add()
    cache.prefill([a, b], [5, 3])
    cache.prefill([a], [6])
    for sequence in (a, b):
        slots = torch.tensor([4 * block + row for block in cache.blocks(sequence) for row in range(4)]).int()
        assert cache.positions_of(slots).tolist() == list(range(len(slots)))
    free = set(range(9)) - {*cache.blocks(a), *cache.blocks(b)}
    others = torch.tensor([-1, -9, 2**31 - 1, *(4 * block for block in free)], dtype=torch.int32)
    assert (cache.positions_of(others) == -1).all()


def test_operators_read_the_pages() -> None:
    """The tensors of the cache, as a layer of one's own passes them to the operators."""
    cache = make_small(num_blocks=8, index_columns=64)
    sequence = cache.add()
    kv, k = torch.randn(7, 576).bfloat16(), torch.randn(7, 64).bfloat16()
    _, _, k8, scale = dsa_ext.quantize_indexer(k[:, None], k)
    cache.prefill([sequence], [7])
    cache.write(1, kv)
    cache.write_index(1, k8, scale)
    assert torch.equal(cache.gather(1, torch.bfloat16), kv)
    assert torch.equal(cache.gather_index(1)[0].view(torch.uint8), k8.view(torch.uint8))
    assert torch.equal(cache.gather_index(1)[1], scale)  # type: ignore[arg-type]
    cache.decode([sequence])
    new_kv, new_k = torch.randn(1, 1, 576).bfloat16(), torch.randn(1, 1, 64).bfloat16()
    q8, q_scale, k8, scale = dsa_ext.quantize_indexer(torch.randn(1, 1, 8, 64).bfloat16(), new_k)
    cache.write(1, new_kv)
    cache.write_index(1, k8, scale)
    step: Any = cache.step
    slots, _ = dsa_ext.indexer_topk_paged(
        q8, cache.index_keys(1), q_scale[0], step.context_lens, step.block_table, 9, return_slots=True
    )
    assert cache.positions_of(slots).tolist() == [[*range(8), -1]]
    q = torch.randn(1, 1, 16, 576).bfloat16()
    out, _ = dsa_ext.sparse_mla_decode(q, cache.kv(1), slots[None])
    expected = dsa_ext.sparse_mla(q[0], torch.cat([kv, new_kv[0]]), torch.arange(8).int()[None], causal=False)
    torch.testing.assert_close(out[0], expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a positive int, got 0"),
        ({"num_blocks": 2.0}, "num_blocks must be a positive int, got 2.0"),
        ({"num_blocks": 2**30}, "num_blocks and page_size must have a product below 2^31, got 1073741824 and 4"),
        ({"page_size": 0}, "page_size must be a positive int, got 0"),
        ({"page_size": 6}, "page_size must be a multiple of 4 with keys of the indexer in float8_e4m3fn, got 6"),
        ({"columns": 500}, "columns must be one of (576, 512), got 500"),
        ({"index_columns": 32}, "index_columns must be one of (64, 128), got 32"),
        ({"dtype": torch.float16}, "dtype must be bfloat16, float32, float64 or float8_e4m3fn, got torch.float16"),
        ({"index_dtype": torch.int8}, "index_dtype must be bfloat16, float32, float64 or float8_e4m3fn"),
    ],
    ids=str,
)
def test_errors_of_sizes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"PagedKVCache: {message}")):
        make_small(**changes)


def test_errors_of_steps() -> None:
    cache = make_small(num_blocks=8)
    a, b = cache.add(), cache.add()
    with pytest.raises(ValueError, match="no step was begun: call prefill or decode"):
        cache.step  # noqa: B018
    cache.prefill([a], [3])
    bad: list[tuple[Any, str]] = [
        (lambda: cache.prefill([a, 7], [1, 1]), r"there is no sequence 7; those in the cache are \[0, 1\]"),
        (lambda: cache.prefill([a, a], [1, 1]), r"sequences must be distinct, got \[0, 0\]"),
        (lambda: cache.prefill([a, b], [1]), r"a positive number of tokens for each sequence, got \[1\] for \[0, 1\]"),
        (lambda: cache.prefill([a], [0]), "a positive number of tokens for each sequence"),
        (lambda: cache.prefill([], []), "a positive number of tokens for each sequence"),
        (lambda: cache.prefill([a], [10]), "sequence 0 has 3 tokens: 10 more exceed max_length=12"),
        (lambda: cache.decode([a], 7), "decode takes 1 to 6 tokens of each sequence, got 7; prefill takes more"),
        (lambda: cache.decode([a, b, None]), "decode takes 1 to max_sequences=2 sequences, got 3"),
        (lambda: cache.decode([]), "decode takes 1 to max_sequences=2 sequences, got 0"),
        (lambda: cache.decode([b, 9]), "there is no sequence 9"),
        (lambda: cache.free(5), "there is no sequence 5"),
        (lambda: cache.length(5), "there is no sequence 5"),
        (lambda: cache.truncate(a, 4), "sequence 0 has 3 tokens, and cannot be truncated to 4"),
        (lambda: cache.evict(a, [0]), "pages must be from 0 to -1, the full pages of sequence 0, got"),
        (lambda: cache.kv(2), "layer must be from 0 to 1, got 2"),
        (lambda: cache.index_keys(-1), "layer must be from 0 to 1, got -1"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=f"PagedKVCache: .*{message}"):
            call()
        assert (cache.length(a), cache.length(b), cache.free_blocks) == (3, 0, 7)
    cache.prefill([a], [2])
    for kv, got in ((torch.zeros(2, 512).bfloat16(), r"bfloat16 \[2, 512\]"), (torch.zeros(2, 576), "float32")):
        with pytest.raises(ValueError, match=rf"kv must be bfloat16 \[2 tokens, 576\], got {got}"):
            cache.write(0, kv)
    with pytest.raises(ValueError, match="k_scale is for float8_e4m3fn keys, got none"):
        cache.write_index(0, torch.zeros(2, 128).to(FP8))
    with pytest.raises(ValueError, match="k must be float8_e4m3fn"):
        cache.write_index(0, torch.zeros(2, 128).bfloat16())
    cache.decode([a])
    with pytest.raises(ValueError, match="the current step is one of decoding"):
        cache.gather(0, torch.bfloat16)
    for change in (lambda: cache.truncate(a, 2), lambda: cache.free(a)):
        change()
        with pytest.raises(ValueError, match="no step was begun: call prefill or decode, and again after"):
            cache.write(0, torch.zeros(1, 576).bfloat16())


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
            (x, {"positions": torch.zeros(1)}, "positions and cu_seqlens must be None with a cache"),
            (x, {"cu_seqlens": torch.zeros(2).int()}, "positions and cu_seqlens must be None with a cache"),
            (x, {"ids": torch.zeros(1, 2, 3).int()}, r"ids must be int32 \[B=1, S=1, K\]"),
            (x, {"layer": 1}, "layer must be from 0 to 0, got 1"),
        ]
        for given, options, message in calls:
            with pytest.raises(ValueError, match=message):
                layer(given, cache=cache, **options)
        with pytest.raises(TypeError, match="SparseMLA: cache must be a PagedKVCache, got dict"):
            layer(x, cache={})
        with pytest.raises(ValueError, match="layer is a number in a cache, got 0 without a cache"):
            layer(x, layer=0)
        cache.prefill([sequence], [2])
        with pytest.raises(ValueError, match=r"x must be \[1, 2, 48\], the tokens of the last cache.prefill"):
            layer(x, cache=cache)
        other = make_layer(torch.float32)
        with pytest.raises(ValueError, match=r"kv must be float64 \[2 tokens, 576\], got float32"):
            other(x.float().expand(1, 2, -1), cache=cache)
        layer.phase = "dense"
        with pytest.raises(ValueError, match="a cache is for the phase 'sparse', got 'dense'"):
            layer(x, cache=cache)
        layer.phase = "sparse"
        several = layer.make_cache(2, 8, 1, 8)
        several.decode([several.add()])
        with pytest.raises(ValueError, match="layer must be the number of this layer in a cache of 2, got None"):
            layer(x, cache=several)
