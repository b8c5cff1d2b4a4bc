"""The host functions of csrc/ that divide work: every item once, no more at a time than fits."""

import itertools
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sanitized.sparse_mla import SPARSE_MLA_DECODE

ROOT = Path(__file__).parent.parent


@given(items=st.integers(1, 5000), slots=st.integers(1, 5000), num_sms=st.integers(1, 140))
def test_pieces(host_functions: ModuleType, items: int, slots: int, num_sms: int) -> None:
    """Every unit of every list is processed once, by one worker or by all workers of a CTA. At most two of a worker's
    pieces are parts of a list: one that starts it, and one that does not."""
    seen: dict[int, dict[tuple[int, int], list[int]]] = {}
    for worker, pieces in enumerate(host_functions.block_sparse_attn_fwd.pieces(items, slots, num_sms)):
        parts = [begin == 0 for _, begin, end, units in pieces if end - begin < units]
        assert len(parts) == len(set(parts))
        for item, begin, end, units in pieces:
            assert 0 <= begin < end <= units <= slots
            seen.setdefault(item, {}).setdefault((begin, end), []).append(worker)
    assert sorted(seen) == list(range(items))
    for item in seen:
        ends = [0]
        for (begin, end), workers in sorted(seen[item].items()):
            assert begin == ends[-1]
            ends.append(end)
            if (begin, end) != (0, units) or len(workers) > 1:
                assert workers == list(range(workers[0], 3 * num_sms, num_sms))
        assert ends[-1] == units


@given(
    kv_heads=st.integers(1, 12),
    kv_blocks=st.integers(1, 60),
    query_blocks=st.integers(1, 90),
    slots=st.one_of(st.integers(1, 100), st.integers(1, 2**17)),
    used=st.floats(0, 1),
    num_sms=st.sampled_from((1, 132)),
)
def test_units(
    host_functions: ModuleType, kv_heads: int, kv_blocks: int, query_blocks: int, slots: int, used: float, num_sms: int
) -> None:
    """Every item once, behind all that it waits for, and tiles that nobody else uses at that time."""
    longest = int(used * slots)
    work = host_functions.block_sparse_attn_bwd.work
    (capacity, buffers, tile_bytes), units, order = work(kv_heads, kv_blocks, query_blocks, slots, longest, num_sms)
    assert capacity * min(buffers, 3) * tile_bytes <= 2**31 or capacity == slots
    assert buffers <= 3 or capacity * buffers * tile_bytes <= 2**31
    left = {
        (is_for_keys, unit): units[unit][not is_for_keys] for is_for_keys in (True, False) for unit in range(len(units))
    }
    units_of_block: dict[int, int] = {}
    queries = set()
    tiles: dict[int, set[int]] = {}
    last_units: dict[tuple[int, int], int] = {}  # of gradients of keys
    for is_for_keys, unit, head, block, tile in order:
        assert 0 <= head < kv_heads
        left[is_for_keys, unit] -= 1
        if is_for_keys:
            assert 0 <= block < kv_blocks
            assert unit < buffers or left[False, unit - buffers] == 0, "the tiles of this buffer are still needed"
            if not units[unit][2]:
                assert last_units[head, block] == unit - 1, "the part before this one comes first"
            if not (units[unit][2] and units[unit][3]):
                assert unit == units_of_block.get(block, -1) + 1, "all parts of the heads before it as well"
                units_of_block[block] = unit
            last_units[head, block] = unit
        else:
            assert 0 <= block < query_blocks
            assert left[True, unit] == 0, "not all tiles are stored"
            assert (head, block) not in queries
            queries.add((head, block))
            assert tile // capacity == (tile + max(1, longest) - 1) // capacity == unit % buffers
            assert tile not in tiles.setdefault(unit, set())
            assert all(abs(tile - other) >= longest for other in tiles[unit])
            tiles[unit].add(tile)
    assert not any(left.values())
    assert len(queries) == kv_heads * query_blocks
    assert len(last_units) == kv_heads * kv_blocks
    assert all(units[unit][3] for unit in last_units.values())


def test_units_of_a_video(host_functions: ModuleType) -> None:
    """12 heads of 364 blocks."""

    def shape(slots: int, longest: int) -> tuple[int, int, int]:
        sizes, units, _ = host_functions.block_sparse_attn_bwd.work(12, 364, 364, slots, longest, 132)
        return sizes[0], sizes[1], len(units)

    assert shape(36, 36) == (364 * 36, 4, 12)
    assert shape(182, 182) == (364 * 182, 3, 12)
    assert shape(360, 360) == (87381, 3, 24), "two parts of a head"
    assert shape(364, 36) == (87381, 3, 12), "lists with many free slots"


def test_a_config_for_every_shape(host_functions: ModuleType) -> None:
    shapes = itertools.product([(576, 512), (512, 512)], [64, 32, 16])
    assert sorted(host_functions.sparse_mla_fwd.configs) == sorted((*dims, heads) for dims, heads in shapes)


@given(items=st.integers(0, 2**40), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_plan_splits(host_functions: ModuleType, items: int, topk: int, num_sms: int) -> None:
    fwd = host_functions.sparse_mla_fwd
    splits = fwd.plan_splits(items, topk, num_sms)
    tiles = -(-topk // fwd.block_k)
    assert 1 <= splits <= fwd.max_splits
    assert splits <= tiles, "a part without keys"
    if splits > 1:
        assert splits * items <= num_sms, "the parts must run at once"


def test_lengths_of_lists_are_found_in_large_calls(host_functions: ModuleType) -> None:
    """From as many slots and queries on as the documentation says."""
    lengths = host_functions.list_lengths
    slots, decode_slots, queries = lengths.fewest_slots, lengths.fewest_decode_slots, lengths.fewest_queries
    pages = {
        "sparse_mla_fwd": f"at least {queries} queries (B * S) and 2^{slots.bit_length() - 1} slots",
        "sparse_mla_decode": f"at least {queries} tokens and 2^{decode_slots.bit_length() - 1} slots",
    }
    for page, words in pages.items():
        assert words in (ROOT / f"docs/sparse_mla/{page}.md").read_text()
    for fewest in (slots, decode_slots):
        topk = fewest // queries
        assert lengths.are_found(1, queries, 1, topk, False, fewest)
        assert lengths.are_found(2, queries // 2, 2, topk // 2, False, fewest)
        assert not lengths.are_found(1, queries, 1, topk, True, fewest), "they are given"
        assert not lengths.are_found(1, queries - 1, 1, 2 * topk, False, fewest)
        assert not lengths.are_found(1, queries, 1, topk - 1, False, fewest)
    assert lengths.are_found(2**14, 2**14, 1, 2**20, False, slots), "2^48 slots"


def test_plan_splits_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.sparse_mla_fwd.plan_splits
    assert plan(1, 2048, 132) > 4
    assert plan(4096, 2048, 132) == 1
    assert plan(1, 64, 132) == 1


@given(tokens=st.integers(1, 10**6), heads=st.integers(1, 128), topk=st.integers(1, 2**20), is_packed=st.booleans())
def test_plans_of_decoding(host_functions: ModuleType, tokens: int, heads: int, topk: int, is_packed: bool) -> None:
    decode = host_functions.sparse_mla_decode
    block_heads, splits = decode.make_plan(tokens, heads, topk, 132, is_packed, False)
    assert block_heads in decode.head_blocks
    assert block_heads < 2 * heads or block_heads == 16
    assert is_packed or block_heads == min(64, max(16, 1 << (heads - 1).bit_length())), "of sparse_mla_fwd"
    assert 1 <= splits <= min(decode.max_splits, -(-topk // 64)), "a part without keys"
    invariant = decode.make_plan(tokens, heads, topk, 132, is_packed, True)
    assert invariant == decode.make_plan(1, heads, topk, 132, is_packed, True)
    assert invariant[1] == 1


@pytest.mark.parametrize("is_packed", [True, False])
def test_plans_of_decoding_fill_the_chip(host_functions: ModuleType, is_packed: bool) -> None:
    plan = host_functions.sparse_mla_decode.make_plan
    for heads in (16, 64, 128):
        block_heads, splits = plan(1, heads, 2048, 132, is_packed, False)
        assert heads // block_heads * splits > 30
        assert plan(256, heads, 2048, 132, is_packed, False) == (min(64, heads), 1)


@given(
    divisor=st.one_of(st.integers(1, 5000), st.integers(1, 2**31 - 1)),
    quotient=st.integers(0, 2**31 - 1),
    offset=st.integers(-2, 2),
)
def test_slots_are_divided_exactly(host_functions: ModuleType, divisor: int, quotient: int, offset: int) -> None:
    x = min(max(quotient % ((2**31 - 1) // divisor + 1) * divisor + offset, 0), 2**31 - 1)
    assert host_functions.sparse_mla_decode.quotient(x, divisor) == x // divisor


def test_sanitized_calls_of_decoding_have_all_plans(host_functions: ModuleType) -> None:
    plan = host_functions.sparse_mla_decode.make_plan
    found = set()
    for (batch, tokens, *_, heads, topk, _d_qk), batch_invariant in SPARSE_MLA_DECODE:
        block_heads, splits = plan(batch * tokens, heads, topk, 132, True, batch_invariant)
        found.add((block_heads, heads > block_heads, splits > 1))
    assert found >= set(itertools.product([64], [False, True], [False, True])), "alone and in pairs"
    assert {block_heads for block_heads, _, _ in found} == {16, 32, 64}


@given(items=st.integers(0, 2**40), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_plan_items(host_functions: ModuleType, items: int, topk: int, num_sms: int) -> None:
    whole, parts = host_functions.sparse_mla_bwd.plan_items(items, topk, num_sms)
    split = items - whole
    assert parts >= 1
    if parts == 1:
        assert split == 0
    else:
        assert 0 < split == items % num_sms, "only what the last wave would leave idle is split"
        assert split * parts <= num_sms, "the parts must run at once"
        assert parts * host_functions.sparse_mla_fwd.block_k <= topk, "a part without keys"


@given(groups=st.integers(1, 2**10), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_queries_at_once(host_functions: ModuleType, groups: int, topk: int, num_sms: int) -> None:
    queries = host_functions.sparse_mla_bwd.queries_at_once(groups, topk, 576, num_sms)
    assert queries == 1 or queries * groups * topk * 576 * 2 <= 2**30


@given(
    queries=st.integers(1, 2**30),
    groups=st.integers(1, 8),
    topk=st.integers(1, 2**20),
    row_bytes=st.sampled_from([0, 1024, 1152]),
    num_sms=st.integers(2, 200),
)
def test_pair_queries_at_once(
    host_functions: ModuleType, queries: int, groups: int, topk: int, row_bytes: int, num_sms: int
) -> None:
    """Launches of about equal size, of whole waves of pairs if they have room, whose dS and rows take at most 1 GiB."""
    at_once = host_functions.sparse_mla_bwd.pair_queries_at_once(queries, groups, topk, row_bytes, num_sms)
    wave, size = max(1, num_sms // 2 // groups), groups * (-(-topk // 64) * 2 * 64 * 64 * 2 + topk * row_bytes)
    assert 1 <= at_once <= queries
    assert at_once == queries or at_once % wave == 0 or wave * size > 2**30
    assert at_once == 1 or at_once * size <= 2**30
    launches = -(-queries // at_once)
    assert launches == 1 or queries - (launches - 1) * at_once > at_once - launches * wave


@given(items=st.integers(0, 2**30), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_most_ctas(host_functions: ModuleType, items: int, topk: int, num_sms: int) -> None:
    """A launch for at most so many items has CTAs for any number of them."""
    bwd = host_functions.sparse_mla_bwd
    for count in {items, items - items % num_sms, max(0, items - 1), items // 2}:
        whole, parts = bwd.plan_items(count, topk, num_sms)
        assert whole + (count - whole) * parts <= bwd.most_ctas(items, num_sms)


@given(groups=st.integers(1, 2**20), size=st.integers(0, 2**40), num_sms=st.integers(1, 200))
def test_groups_at_once(host_functions: ModuleType, groups: int, size: int, num_sms: int) -> None:
    at_once = host_functions.indexer_bwd.groups_at_once(groups, size, 2**30, num_sms)
    assert 1 <= at_once <= groups
    assert at_once == 1 or at_once * size <= 2**30
    assert at_once == groups or at_once < num_sms or at_once % num_sms == 0


def test_queries_at_once_fill_waves(host_functions: ModuleType) -> None:
    queries_at_once = host_functions.sparse_mla_bwd.queries_at_once
    assert queries_at_once(1, 2048, 576, 132) == 3 * 132
    assert queries_at_once(2, 2048, 576, 132) == 3 * 132 // 2
    pair_queries_at_once = host_functions.sparse_mla_bwd.pair_queries_at_once
    assert pair_queries_at_once(8192, 1, 2048, 0, 132) == 25 * 66
    assert pair_queries_at_once(8192, 1, 2048, 1152, 132) == 5 * 66
    assert pair_queries_at_once(8192, 2, 2048, 1152, 132) == 5 * 33
    assert pair_queries_at_once(8192, 1, 30000, 1152, 132) == 66 // 3


def test_plan_items_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.sparse_mla_bwd.plan_items
    assert plan(4096, 2048, 132) == (4092, 16)
    assert plan(132 * 7, 2048, 132) == (132 * 7, 1)
    assert plan(1, 64, 132) == (1, 1)


#: So many clusters of so many CTAs, one CTA an SM, an H200 was seen to run at once.
CLUSTERS = {2: 66, 3: 33, 4: 28, 5: 20, 6: 16, 7: 14, 8: 14}


@given(
    rows=st.integers(0, 2**31 - 1) | st.integers(0, 200),
    columns=st.integers(0, 2**31 - 2**26) | st.integers(0, 2**17),
    is_bf16=st.booleans(),
    num_sms=st.integers(1, 200),
    at_once=st.integers(1, 200),
)
def test_plan_row(
    host_functions: ModuleType, rows: int, columns: int, is_bf16: bool, num_sms: int, at_once: int
) -> None:
    ctas, held = host_functions.topk_select.plan_row(rows, columns, is_bf16, num_sms, lambda ctas: at_once // ctas)
    assert 1 <= ctas <= 8
    if held:
        assert columns <= min(32768, (8192 if rows > num_sms or is_bf16 else 16384) * ctas)
    if ctas > 1:
        assert rows <= min(num_sms, at_once) // ctas, "every CTA must have an SM"


def test_plan_row_fills_the_chip(host_functions: ModuleType) -> None:
    def plan(rows: int, columns: int, is_bf16: bool = False) -> tuple[int, bool]:
        plan_row = host_functions.topk_select.plan_row
        result: tuple[int, bool] = plan_row(rows, columns, is_bf16, 132, CLUSTERS.__getitem__)
        return result

    assert plan(1, 2**20) == (8, False)
    assert [plan(rows, 131072)[0] for rows in (1, 14, 16, 20, 28, 32, 64, 67, 4096)] == [8, 8, 6, 5, 4, 3, 2, 1, 1]
    assert plan(66, 32768) == (2, True), "runs that a CTA can hold"
    assert plan(67, 32768) == plan(133, 16384) == (1, False), "no SM for each CTA"
    assert plan(132, 16384) == (1, True)
    assert plan(66, 16384, is_bf16=True) == (2, True)
    assert plan(28, 32768, is_bf16=True) == (4, True)
    assert plan(29, 32768, is_bf16=True) == (3, False), "no room for 29 clusters of four"
    assert plan(64, 32768, is_bf16=True) == (2, False)
    assert plan(64, 30000, is_bf16=True) == (1, False), "too short for two that filter"
    assert plan(10**6, 8192) == (1, True)
    assert plan(1, 1000) == plan(1, 0) == (1, True)


@given(queries=st.integers(0, 5000), tiles=st.integers(1, 100), num_sms=st.integers(1, 140), divisible=st.booleans())
def test_rounds(host_functions: ModuleType, queries: int, tiles: int, num_sms: int, divisible: bool) -> None:
    """All rounds of CTAs but the last have whole queries; the last one has no more pieces than CTAs, or than tiles."""
    whole, pieces, items = host_functions.listed_keys.plan_rounds(queries, tiles, num_sms, divisible)
    assert 1 <= pieces <= tiles
    assert items == whole + (queries - whole) * pieces
    if pieces == 1:
        assert items == queries
    else:
        assert divisible
        assert whole == queries // num_sms * num_sms
        assert items - whole <= num_sms
    rest = queries % num_sms
    if divisible and tiles > 1 and 0 < rest <= num_sms // 2:
        assert pieces > 1


@given(units=st.one_of(st.integers(0, 2000), st.integers(0, 2**40)), ctas=st.integers(1, 140))
def test_tickets(host_functions: ModuleType, units: int, ctas: int) -> None:
    """Each unit of the rest once, in order; a later ticket is not larger, but for the last unit."""
    tickets = host_functions.indexer_logits.tickets(units, ctas)
    assert len(tickets) % ctas == 0
    assert [begin for begin, _ in tickets] == [0, *(end for _, end in tickets[:-1])]
    assert tickets[-1][1] == units
    sizes = [end - begin for begin, end in tickets]
    assert min(sizes) >= 0
    assert all(size <= earlier + 1 for earlier, size in itertools.pairwise(sizes))
    assert max(sizes[-ctas:]) <= units / ctas / 4 + 2, "some CTA would end long before this one"


@given(units=st.integers(0, 2**40), items=st.integers(0, 2**20), ctas=st.integers(1, 140))
def test_rest(host_functions: ModuleType, units: int, items: int, ctas: int) -> None:
    """A small part is kept back, or nothing where a ticket would be few units, or would begin after many items."""
    rest = host_functions.indexer_logits.rest_of(units, items, ctas)
    if rest == 0:
        assert units < max(1025 * ctas, 256 * items)
    else:
        assert rest == units // 16
        assert min(end - begin for begin, end in host_functions.indexer_logits.tickets(rest, ctas)) >= 16


@given(keys=st.integers(0, 5000))
def test_sample_and_other_keys(host_functions: ModuleType, keys: int) -> None:
    """Every key is in one of the two sets, both ascend, and `sampled` counts the first one's keys below any bound."""
    logits = host_functions.indexer_logits
    sample = [logits.key_of_sample(i) for i in range(logits.sampled(keys))]
    others = [logits.key_of_other(i) for i in range(keys - logits.sampled(keys))]
    assert sample == sorted(sample)
    assert others == sorted(others)
    assert sorted(sample + others) == list(range(keys))


@pytest.mark.parametrize("topk", [1, 2, 16, 64, 512, 2047, 2048, 4096])
def test_bars(host_functions: ModuleType, topk: int) -> None:
    """Of random rows hardly any has fewer than topk logits above its bar, or more than there is room for."""
    plan = host_functions.indexer_topk
    rank, places = plan.rank_of_bar(topk), plan.max_candidates(topk)
    mean = topk / 17
    assert rank >= mean + 4.5 * mean**0.5, "topk of a row's best keys are sampled less often than that"
    assert rank * 17 + 4 * 17 * rank**0.5 <= places <= 8192
    assert places % 64 == 0


def test_where_candidates_are_kept(host_functions: ModuleType) -> None:
    keeps = host_functions.indexer_topk.keeps_candidates
    assert keeps(4096, 2**17, 64, 2048)
    assert keeps(4096, 2**20, 16, 4096)
    assert not keeps(4096, 2**20 + 1, 64, 2048)
    assert not keeps(4096, 2**17, 8, 2048)
    assert not keeps(4096, 2**15, 64, 2048), "too many are above the bar"
    assert not keeps(2**20, 2**13, 64, 1), "a sample of so few keys says little"
    assert not keeps(512, 2**17, 64, 2048), "their logits are one run"


@given(queries=st.integers(0, 2**20), keys=st.integers(0, 2**20))
def test_scored_at_once(host_functions: ModuleType, queries: int, keys: int) -> None:
    count = host_functions.indexer_topk.rows_at_once(queries, keys)
    assert min(1, queries) <= count <= queries
    assert count <= 1 or count * keys * 4 <= 2**28
    assert count < 64 or count == queries or count % 64 == 0
