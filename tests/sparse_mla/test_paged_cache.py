"""PagedKVCache on the CPU: its pages, the tensors that a step reads, its errors."""

import copy
import io
import pickle
import random
import re
from typing import Any

import pytest
import torch

import dsa_ext
from dsa_ext.nn import CacheFullError, PagedKVCache

FP8 = torch.float8_e4m3fn


def make_small(**changes: Any) -> PagedKVCache:
    options: Any = {"layers": 2, "num_blocks": 4, "max_sequences": 2, "max_length": 12, "page_size": 4, **changes}
    return PagedKVCache(**options)


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


def test_rows_after_the_last_token_have_no_number() -> None:
    """Otherwise the rows that a page has left would be the first keys of the next sequence."""
    cache = make_small(num_blocks=8)
    a, b = cache.add(), cache.add()
    cache.prefill([a, b], [3, 6])
    pages = [*cache.blocks(a), *cache.blocks(b)]
    slots = torch.tensor([4 * page + row for page in pages for row in range(4)]).int()
    numbers = cache.keys_of_ids(slots)
    assert numbers.dtype == torch.int32
    assert numbers.clamp(min=-1).tolist() == [0, 1, 2, -1, 3, 4, 5, 6, 7, 8, -1, -1]


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
        last = [[4 * cache.blocks(s)[-1] + (cache.length(s) - 1) % 4] for s in (a, b, c)]
        assert cache.step.slots.tolist() == last  # type: ignore[union-attr]
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


@pytest.mark.parametrize("name", ["ids_of_keys", "keys_of_ids", "positions_of"])
def test_other_ids(name: str) -> None:
    cache = PagedKVCache(1, 4, 1, 256)
    cache.prefill([cache.add()], [100])
    function = getattr(cache, name)
    for wrong, got in ((torch.ones(2).byte(), r"uint8 \[2\] on cpu"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"^PagedKVCache: (ids|keys) must be int32 or int64 on cpu, got {got}$"):
            function(wrong)
    far = function(torch.tensor([-5, 10**6]))
    assert (far.dtype, (far < 0).all()) == (torch.int32, True)


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
    assert torch.equal(cache.gather(1), kv)
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
        ({"max_sequences": True}, "max_sequences must be a positive int, got True"),
        ({"num_blocks": 2**30}, "num_blocks and page_size must have a product below 2^31, got 1073741824 and 4"),
        ({"page_size": 0}, "page_size must be a positive int, got 0"),
        ({"page_size": 6}, "page_size must be a multiple of 4 with keys of the indexer in float8_e4m3fn, got 6"),
        ({"columns": 500}, "columns must be one of (576, 512), got 500"),
        ({"index_columns": 32}, "index_columns must be one of (64, 128), got 32"),
        ({"dtype": torch.float16}, "dtype must be bfloat16, float32, float64 or float8_e4m3fn, got torch.float16"),
        ({"index_dtype": torch.int8}, "index_dtype must be float8_e4m3fn or bfloat16 like the layers"),
        (
            {"dtype": torch.float32, "index_dtype": torch.bfloat16},
            "index_dtype must be float8_e4m3fn or float32 like the layers, got torch.bfloat16",
        ),
        (
            {"dtype": torch.float8_e4m3fn, "index_dtype": torch.float64},
            "index_dtype must be float8_e4m3fn or bfloat16 like the layers, got torch.float64",
        ),
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
        (lambda: cache.prefill([a, b], [1]), r"one positive int for each sequence, got \[1\] for \[0, 1\]"),
        (lambda: cache.prefill([a], [0]), "one positive int for each sequence"),
        (lambda: cache.prefill([], []), "one positive int for each sequence"),
        (lambda: cache.prefill([a], [10]), "sequence 0 has 3 tokens: 10 more exceed max_length=12"),
        (lambda: cache.prefill(a, [1]), "sequences must be a list, got 0"),  # type: ignore[arg-type]
        (lambda: cache.prefill([a], 1), "tokens must be a list, got 1"),  # type: ignore[arg-type]
        (lambda: cache.decode(b), "sequences must be a list, got 1"),  # type: ignore[arg-type]
        (lambda: cache.decode([a], 7), "decode takes 1 to 6 tokens of each sequence, got 7; prefill takes more"),
        (lambda: cache.decode([a, b, None]), "decode takes 1 to max_sequences=2 sequences, got 3"),
        (lambda: cache.decode([]), "decode takes 1 to max_sequences=2 sequences, got 0"),
        (lambda: cache.decode([b, 9]), "there is no sequence 9"),
        (lambda: cache.free(5), "there is no sequence 5"),
        (lambda: cache.length(5), "there is no sequence 5"),
        (lambda: cache.truncate(a, 4), "sequence 0 has 3 tokens, and cannot be truncated to 4"),
        (lambda: cache.evict(a, [0]), r"sequence 0 has no full pages, and only full ones can be evicted, got \[0\]"),
        (lambda: cache.kv(2), "layer must be from 0 to 1, got 2"),
        (lambda: cache.index_keys(-1), "layer must be from 0 to 1, got -1"),
        (lambda: cache.kv(True), "layer must be from 0 to 1, got True"),
        (lambda: cache.kv(0.0), r"layer must be from 0 to 1, got 0\.0"),  # type: ignore[arg-type]
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=f"PagedKVCache: .*{message}"):
            call()
        assert (cache.length(a), cache.length(b), cache.free_blocks) == (3, 0, 7)
    cache.prefill([a], [2])
    bad_rows: list[tuple[Any, str]] = [
        (torch.zeros(2, 512).bfloat16(), r"bfloat16 \[2, 512\]$"),
        (torch.zeros((), dtype=torch.bfloat16), r"bfloat16 \[\]$"),
        (None, "NoneType$"),
        (torch.zeros(2, 576), r"float32 \[2, 576\] \(autocast changes .*: make_cache and the layer must be called"),
    ]
    for kv, got in bad_rows:
        with pytest.raises(ValueError, match=rf"kv must be bfloat16 \[.., 576\], 2 rows, one for each .*, got {got}"):
            cache.write(0, kv)
    with pytest.raises(ValueError, match="k_scale must be a Tensor: keys in float8_e4m3fn have scales, got None"):
        cache.write_index(0, torch.zeros(2, 128).to(FP8))
    before = cache.index_keys(0).clone()
    with pytest.raises(
        ValueError, match=r"k_scale must be float32 \[..\], 2 numbers, one for each .*, got float32 \[3\]"
    ):
        cache.write_index(0, torch.ones(2, 128).to(FP8), torch.ones(3))
    assert torch.equal(cache.index_keys(0), before)
    with pytest.raises(ValueError, match="kv must be on cpu like the cache, got meta"):
        cache.write(0, torch.zeros(2, 576, device="meta").bfloat16())
    with pytest.raises(ValueError, match="dtype must be bfloat16, float32 or float64, got int32"):
        cache.gather(0, torch.int32)
    with pytest.raises(ValueError, match="k must be float8_e4m3fn"):
        cache.write_index(0, torch.zeros(2, 128).bfloat16())
    cache.decode([a])
    with pytest.raises(ValueError, match=r"gather, .* need a step of prefill; the current one is of decoding"):
        cache.gather(0, torch.bfloat16)
    for change in (lambda: cache.truncate(a, 2), lambda: cache.free(a)):
        change()
        with pytest.raises(ValueError, match="no step was begun: call prefill or decode, and again after"):
            cache.write(0, torch.zeros(1, 576).bfloat16())


def test_failed_calls_change_nothing_but_those_that_should_begin_a_step_end_the_last() -> None:
    cache = make_small(num_blocks=8)
    a, b = cache.add(), cache.add()
    cache.prefill([a], [5])
    step, blocks = cache.step, cache.blocks(a)
    bad: list[tuple[Any, str]] = [
        (lambda: cache.free(9), "there is no sequence 9"),
        (lambda: cache.free([a]), r"there is no sequence \[0\]"),  # type: ignore[arg-type]
        (lambda: cache.truncate(a, None), "length must be an int, got None"),  # type: ignore[arg-type]
        (lambda: cache.truncate(a, 2.0), r"length must be an int, got 2\.0"),  # type: ignore[arg-type]
        (lambda: cache.truncate(a, 6), "cannot be truncated to 6"),
        (lambda: cache.evict(a, 0), "pages must be a list of int, got 0"),  # type: ignore[arg-type]
        (lambda: cache.evict(a, [0, "x"]), r"pages must be from 0 to 0, .*, got \[0, 'x'\]"),  # type: ignore[list-item]
        (lambda: cache.evict(a, [0, 0.5]), r"pages must be from 0 to 0, .*, got \[0, 0\.5\]"),  # type: ignore[list-item]
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=f"PagedKVCache: .*{message}"):
            call()
        assert cache.step is step
        assert (cache.blocks(a), cache.length(a), cache.free_blocks) == (blocks, 5, 6)
    bad = [
        (lambda: cache.prefill([b], [True]), "one positive int for each sequence"),
        (lambda: cache.prefill([[b]], [3]), r"there is no sequence \[1\]"),  # type: ignore[list-item]
        (lambda: cache.prefill([a], [2**20]), "more exceed max_length"),
        (lambda: cache.decode([b], True), "decode takes 1 to 6 tokens of each sequence, got True"),
        (lambda: cache.decode([]), "decode takes 1 to max_sequences=.* sequences, got 0"),
        (lambda: cache.decode([9]), "there is no sequence 9"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=f"PagedKVCache: .*{message}"):
            call()
        with pytest.raises(ValueError, match=r"no step was begun: .* or a call failed"):
            _ = cache.step
        assert (cache.blocks(a), cache.length(a), cache.length(b), cache.free_blocks) == (blocks, 5, 0, 6)
        cache.decode([None])  # a step for the next call to end


def test_no_step_after_a_full_cache() -> None:
    """Layers that are called all the same must not write to the tokens of the step before."""
    cache = make_small(num_blocks=2)
    a, b = cache.add(), cache.add()
    for call in (lambda: cache.prefill([b], [5]), lambda: cache.decode([b, a], 5)):
        cache.prefill([a], [1])
        with pytest.raises(CacheFullError):
            call()
        assert (cache.length(b), cache.free_blocks) == (0, 1)
        with pytest.raises(ValueError, match="no step was begun"):
            cache.write(0, torch.zeros(1, 576).bfloat16())
        cache.truncate(a, 0)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_default_device(device: str) -> None:
    """Tables of the host are on the CPU whatever the default device is."""
    cache, expected = make_small(num_blocks=8, device="cpu"), make_small(num_blocks=8)
    steps: list[list[Any]] = [[], []]
    for each, collected, default in ((cache, steps[0], device), (expected, steps[1], "cpu")):
        with torch.device(default):
            a, b = each.add(), each.add()
            each.prefill([a, b], [5, 4])
            collected += [t.clone() for t in each.step]
            each.evict(a, [0])
            each.decode([b, None], 2)
            collected += [t.clone() for t in each.step]
            collected.append(each.positions_of(torch.arange(32, dtype=torch.int32, device="cpu")))
            each.truncate(b, 3)
    assert all(torch.equal(x, y) for x, y in zip(*steps, strict=True))
    with torch.device(device):
        assert make_small().kv(0).device.type == device


def test_built_in_inference_mode() -> None:
    with torch.inference_mode():
        cache = make_small()
    sequence = cache.add()
    cache.prefill([sequence], [2])
    cache.write(0, torch.ones(2, 576).bfloat16())
    cache.decode([sequence])
    cache.write(0, torch.ones(1, 576).bfloat16())
    with torch.inference_mode():
        cache.decode([sequence])
        cache.write(0, torch.ones(1, 576).bfloat16())
    cache.truncate(sequence, 1)
    assert not any(t.is_inference() for t in (cache.kv(0), cache.index_keys(0)))


def saved_and_loaded(cache: PagedKVCache) -> PagedKVCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded: PagedKVCache = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)  # fmt: skip
@pytest.mark.parametrize("decoding", [False, True])
def test_copies(copied: Any, decoding: bool) -> None:
    """In the middle of a step: a copy goes on with it, and with later steps, as the cache itself would."""
    cache = make_small(num_blocks=8)
    a, b = cache.add(), cache.add()
    cache.prefill([a, b], [5, 3])
    cache.write(1, torch.randn(8, 576).bfloat16())
    cache.decode([b, None]) if decoding else cache.prefill([b, a], [1, 1])
    other = copied(cache)
    for rows in (torch.randn(2, 576).bfloat16(), torch.randn(4, 576).bfloat16()):
        for each in (cache, other):
            each.write(1, rows)
        assert all(torch.equal(x, y) for x, y in zip(other.step, cache.step, strict=True))
        for sequence in (a, b):
            assert other.blocks(sequence) == cache.blocks(sequence)
            pages = cache.kv(1)[cache.blocks(sequence)], other.kv(1)[cache.blocks(sequence)]
            assert torch.equal(*(page.flatten(0, 1)[: cache.length(sequence)] for page in pages))
        for each in (cache, other):
            each.decode([a, b], 2)
    for each in (cache, other):
        each.free(a)
        assert (each.add(), each.sequences) == (2, [b, 2])


def test_copies_hold_no_iterators() -> None:
    """The iterators of itertools cannot be copied from Python 3.14 on."""
    assert not any(type(value).__module__ == "itertools" for value in vars(make_small()._tables).values())
