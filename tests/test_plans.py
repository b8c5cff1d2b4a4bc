"""The host functions of csrc/ that divide work: every item once, no more at a time than fits."""

import itertools
from types import ModuleType

from hypothesis import given
from hypothesis import strategies as st


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


def test_plan_splits_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.sparse_mla_fwd.plan_splits
    assert plan(1, 2048, 132) > 4
    assert plan(4096, 2048, 132) == 1
    assert plan(1, 64, 132) == 1


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


@given(items=st.integers(1, 2**10), topk=st.integers(1, 2**20), num_sms=st.integers(1, 200))
def test_queries_at_once(host_functions: ModuleType, items: int, topk: int, num_sms: int) -> None:
    queries = host_functions.sparse_mla_bwd.queries_at_once(items, topk, 576, num_sms)
    assert queries == 1 or queries * items * topk * 576 * 2 <= 2**30


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


def test_plan_items_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.sparse_mla_bwd.plan_items
    assert plan(4096, 2048, 132) == (4092, 16)
    assert plan(132 * 7, 2048, 132) == (132 * 7, 1)
    assert plan(1, 64, 132) == (1, 1)


@given(rows=st.integers(0, 2**31 - 1), columns=st.integers(0, 2**31 - 1), num_sms=st.integers(1, 200))
def test_plan_ctas(host_functions: ModuleType, rows: int, columns: int, num_sms: int) -> None:
    ctas = host_functions.topk_select.plan_ctas(rows, columns, num_sms)
    assert ctas in (1, 2, 4, 8)
    if ctas > 1:
        assert rows * ctas <= num_sms, "every CTA must have an SM"


def test_plan_ctas_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.topk_select.plan_ctas
    assert plan(1, 2**20, 132) == 8
    assert plan(1, 131072, 132) == 4
    assert plan(32, 32768, 132) == 4, "runs that a CTA can hold"
    assert plan(64, 32768, 132) == 1
    assert plan(4096, 131072, 132) == 1
    assert plan(1, 1000, 132) == 1


@given(queries=st.integers(0, 2**20), keys=st.integers(0, 2**20))
def test_scored_at_once(host_functions: ModuleType, queries: int, keys: int) -> None:
    count = host_functions.indexer_topk.queries_at_once(queries, keys)
    assert min(1, queries) <= count <= queries
    assert count <= 1 or count * keys * 4 <= 2**28
    assert count < 64 or count == queries or count % 64 == 0


@given(
    queries=st.integers(1, 2**20),
    keys=st.integers(0, 2**31 - 2**26),
    heads=st.sampled_from([8, 16, 32, 64]),
    topk=st.integers(1, 4096),
    num_sms=st.integers(1, 200),
)
def test_plan_filter(host_functions: ModuleType, queries: int, keys: int, heads: int, topk: int, num_sms: int) -> None:
    block_queries = 512 // heads
    plan = host_functions.indexer_topk.plan_filter(queries, keys, heads, topk, block_queries, num_sms)
    period, sampled, capacity, at_once = plan
    if period == 0:
        return
    assert period % 1024 == 0
    assert period & (period - 1) == 0
    assert sampled % 64 == 0
    assert sampled <= 8192
    assert (sampled // 64 - 1) * period + 64 <= keys < sampled // 64 * period + 64, "all parts that are complete"
    # Windows of which all keys are candidates: these fit into the lists.
    assert topk <= capacity <= 8192
    assert 64 * (capacity // period + 1) <= 640
    assert at_once % 64 == 0 or at_once == queries
    entries = (min(at_once, queries) + (num_sms + 1) * block_queries) * capacity
    assert entries < 2**31
    assert entries * 8 + at_once * (sampled * 4 + 640 * 8) <= 1.03 * 2**28


def test_plan_filter_takes_what_fills_the_chip(host_functions: ModuleType) -> None:
    plan = host_functions.indexer_topk.plan_filter
    assert plan(4096, 2**17, 64, 2048, 8, 132) == (1024, 8192, 7168, 2048)
    assert plan(32768, 2**18, 32, 2048, 8, 132)[0] == 2048
    assert plan(1, 2**17, 64, 2048, 8, 132) == (0, 0, 0, 0), "one query"
    assert plan(4096, 8192, 64, 2048, 8, 132)[0] == 0, "few keys"
    assert plan(4096, 2**17, 8, 2048, 64, 132)[0] == 0, "few heads"
    assert plan(4096, 2**19, 64, 2048, 8, 132)[0] == 4096
    assert plan(4096, 2**20, 64, 2048, 8, 132)[0] == 0, "a sample that says too little"
