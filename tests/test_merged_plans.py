"""The host functions of csrc/ that say which lists are merged, and how many at a time."""

from types import ModuleType

from hypothesis import given
from hypothesis import strategies as st


def test_queries_of_a_run(host_functions: ModuleType) -> None:
    """The rows of a tile are as many queries as have room with their heads, in a power of two."""
    for heads in range(1, 33):
        queries = host_functions.merged_lists.queries_of_run(heads)
        assert queries == min(8, 64 // 2 ** (heads - 1).bit_length())
        assert queries * heads <= 64


@given(heads=st.integers(1, 32), topk=st.integers(1, 2**29), seq_kv=st.integers(0, 2**24), percent=st.integers(1, 99))
def test_entries_of_a_run(host_functions: ModuleType, heads: int, topk: int, seq_kv: int, percent: int) -> None:
    """A merged list is shorter than the lists together, in tiles of 64 keys, and has each key once."""
    merged = host_functions.merged_lists
    queries = merged.queries_of_run(heads)
    entries, tiles = merged.entries_of_run(queries, topk, seq_kv, percent), queries * -(-topk // 64)
    assert entries % 64 == 0
    assert entries // 64 < tiles
    assert entries >= seq_kv or entries // 64 >= percent / 100 * tiles - 1
    assert entries <= max(64, -(-seq_kv // 64) * 64)


def test_which_forward_calls_merge_lists(host_functions: ModuleType) -> None:
    def merges(
        heads: int = 16, groups: int = 1, batch: int = 1, queries: int = 4096, slots: int = 2048, keys: int = 32768
    ) -> bool:
        result: bool = host_functions.merged_lists.are_merged_forward(heads, groups, batch, queries, slots, keys, 132)
        return result

    assert [heads for heads in range(1, 129) if merges(heads)] == [8, 16]
    assert not merges(groups=2)
    assert [queries for queries in (3167, 3168) if merges(queries=queries, slots=800)] == [3168]
    assert [slots for slots in (511, 512) if merges(slots=slots)] == [512]
    assert [keys for keys in (131072, 131073) if merges(keys=keys)] == [131072]
    assert [keys for keys in (2**16, 2**16 + 1) if merges(batch=2, queries=2048, keys=keys)] == [2**16]
    assert not merges(batch=4096, queries=1), "queries have no neighbors"
    assert [keys for keys in (0, 1) if merges(keys=keys)] == [1], "without keys there is nothing to merge"
    assert not merges(queries=2**20, keys=2**24), "ids have no room beside the queries"


@given(runs=st.integers(1, 2**20), entries=st.integers(0, 2**24), queries=st.sampled_from([2, 4, 8]))
def test_runs_at_once(host_functions: ModuleType, runs: int, entries: int, queries: int) -> None:
    merged = host_functions.merged_lists
    words = merged.words_of_run(entries, queries)
    assert words > entries + queries
    at_once = merged.runs_at_once(runs, words)
    assert 1 <= at_once <= runs
    assert at_once * words * 4 <= 2**28
    assert at_once == runs or (at_once + 1) * words * 4 > 2**28


def test_which_calls_merge_lists(host_functions: ModuleType) -> None:
    are_merged = host_functions.merged_lists.are_merged
    for heads in (1, 8, 16, 32):
        assert are_merged(heads, 1, 1, 4096, 2048, 131072)
    assert not are_merged(33, 1, 1, 4096, 2048, 131072), "a tile has no room for a second query"
    assert not are_merged(16, 1, 4096, 1, 2048, 8192), "queries have no neighbors"
    assert not are_merged(16, 1, 1, 4096, 2048, 2**24), "ids have no room beside the queries"
    assert not are_merged(16, 1, 1, 64, 2048, 1000), "too little work"
    assert not are_merged(16, 1, 1, 512, 2048, 131072), "reading all keys would take long"
