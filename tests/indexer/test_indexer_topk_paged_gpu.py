"""indexer_topk_paged on a GPU: the composition of its parts, bit for bit, and the selection of indexer_topk."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from indexer_gpu_inputs import DEVICE, FP8, SELECT, TOPK, both_dtypes, every_kernel, message, on_device
from paged_cases import errors_of, paged_arguments
from paged_gpu_inputs import PAGED, TOPK_PAGED, lengths_of, make_paged, with_lengths
from streams import written_late
from torch import Tensor

from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.paged_inputs import PagedInputs, gathered, poisoned
from dsa_ext.testing.tolerances import check_selected

pytestmark = pytest.mark.gpu

#: Bytes that indexer_topk_paged may allocate on top of its results.
WORKSPACE_LIMIT = 257 * 2**20
# B, N, keys, page, topk and the lengths.
SELECTIONS = [
    (1, 1, 1, 64, 1, "all"),
    (5, 2, 100, 64, 2048, "random"),
    (13, 5, 1000, 64, 7, "edges"),
    (3, 6, 9001, 64, 2048, "per query"),
    (40, 1, 5001, 192, 4096, "random"),
    (3, 3, 300, 4, 50, "random"),
]


def selected(inputs: PagedInputs, topk: int, slots: bool = False) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = TOPK_PAGED(*vars(inputs).values(), topk, slots)
    return result


def composed(inputs: PagedInputs, topk: int, slots: bool = False) -> tuple[Tensor, Tensor]:
    logits = PAGED(*vars(inputs).values())
    ends = lengths_of(inputs, logits.shape[1]).flatten()
    table = (inputs.block_table, inputs.k_cache.shape[1]) if slots else ()
    result: tuple[Tensor, Tensor] = SELECT(logits, torch.zeros_like(ends), ends, topk, *table)
    return result


@every_kernel
def test_selection(dtype: torch.dtype, heads: int, dim: int) -> None:
    for batch, queries, keys, page, topk, kind in SELECTIONS:
        inputs = poisoned(with_lengths(make_paged(batch, queries, keys, heads, dim, page=page, dtype=dtype), kind))
        for slots in (False, True):
            try:
                check_selected(selected(inputs, topk, slots), composed(inputs, topk, slots))
            except Exception as error:
                raise AssertionError(f"B={batch} N={queries} keys={keys} topk={topk} {kind}: {error}") from error


@both_dtypes
@pytest.mark.parametrize("sizes", [(3, 2, 5000), (1, 1, 131072), (2, 6, 30000)], ids=str)
def test_the_selection_is_that_of_training(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    inputs = with_lengths(make_paged(*sizes, dtype=dtype), "random")
    queries, held = sizes[1], inputs.block_table.shape[1] * 64
    ids, values = selected(inputs, 2048)
    slots, _ = selected(inputs, 2048, slots=True)
    ends = lengths_of(inputs, held)
    for b in range(sizes[0]):
        k, k_scale = gathered(inputs, b)
        rows = slice(b * queries, (b + 1) * queries)
        expected = TOPK(inputs.q[b], k, inputs.weights[rows], torch.zeros_like(ends[b]), ends[b], 2048, k_scale)
        check_selected((ids[rows], values[rows]), expected)
        blocks = inputs.block_table[b].long()[ids[rows].clamp(min=0).long() // 64]
        assert torch.equal(slots[rows], torch.where(ids[rows] >= 0, blocks * 64 + ids[rows] % 64, -1))


def test_blocks_that_do_not_exist() -> None:
    inputs = make_paged(4, 2, 5000)
    table = inputs.block_table.clone()
    table[0, ::2], table[1] = -1, len(inputs.k_cache)
    inputs = replace(inputs, block_table=table)
    for slots in (False, True):
        check_selected(selected(inputs, 2048, slots), composed(inputs, 2048, slots))
    assert (selected(inputs, 2048)[0][2:4] == -1).all()


@pytest.mark.gpu_memory(14)
def test_runs_of_sequences() -> None:
    """More logits than are held at a time."""
    inputs = with_lengths(make_paged(100, 6, 131072, 8, 64, spare=0), "random")
    assert workspace_bytes(lambda: selected(inputs, 2047)) <= WORKSPACE_LIMIT
    for slots in (False, True):
        got = selected(inputs, 2047, slots)
        check_selected(got, composed(inputs, 2047, slots))


def test_runs_of_few_sequences() -> None:
    """Runs of 32 and 8 sequences, whose kernels start early and use the same memory for their logits."""
    inputs = make_paged(40, 1, 4096, 8, 64)
    generator = torch.Generator(DEVICE).manual_seed(1)
    sizes = (40, 2**21 // inputs.k_cache.shape[1])
    table = torch.randint(len(inputs.k_cache), sizes, generator=generator, dtype=torch.int32, device=DEVICE)
    inputs = with_lengths(replace(inputs, block_table=table), "random")
    for slots in (False, True):
        expected = composed(inputs, 2048, slots)
        for _ in range(3):
            check_selected(selected(inputs, 2048, slots), expected)


def test_side_stream() -> None:
    inputs = with_lengths(make_paged(20, 2, 3000), "random")
    expected = selected(inputs, 500, slots=True)
    tables = written_late(inputs.block_table, lambda late: selected(replace(inputs, block_table=late), 500, slots=True))
    check_selected(tables, expected)


@both_dtypes
def test_a_graph_serves_any_lengths_and_tables(dtype: torch.dtype) -> None:
    inputs = with_lengths(make_paged(20, 2, 3000, dtype=dtype), "random")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = selected(inputs, 500, slots=True)
    generator = torch.Generator(DEVICE).manual_seed(7)
    for high in (3000, 70, 1, 3100):
        inputs.context_lens.copy_(
            torch.randint(-1, high, inputs.context_lens.shape, generator=generator, device=DEVICE)
        )
        blocks = torch.randint(len(inputs.k_cache), inputs.block_table.shape, generator=generator, device=DEVICE)
        inputs.block_table.copy_(blocks)
        for _ in range(2):
            graph.replay()
        check_selected(captured, composed(inputs, 500, slots=True))


@pytest.mark.parametrize("sizes", [(0, 100, 2), (3, 0, 1), (3, 0, 0)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int]) -> None:
    batch, keys, spare = sizes
    inputs = make_paged(batch, 2, keys, spare=spare)
    for slots in (False, True):
        indices, values = selected(replace(inputs, context_lens=inputs.context_lens + 9), 5, slots)
        assert indices.shape == values.shape == (2 * batch, 5)
        assert (indices == -1).all()
    table = torch.zeros(batch, 3, dtype=torch.int32, device=DEVICE)
    none = replace(inputs, k_cache=inputs.k_cache[:0], block_table=table)
    assert (selected(none, 5)[0] == -1).all()


@both_dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    args = on_device(paged_arguments("indexer_topk_paged", dtype))
    torch.library.opcheck(TOPK_PAGED, (), args, test_utils=["test_autograd_registration", "test_faketensor"])


@errors_of("indexer_topk_paged")
def test_errors_are_those_of_the_cpu(op: str, changes: dict[str, Any], text: str) -> None:
    assert message(op, on_device(paged_arguments(op, **changes))) == f"dsa::{op}: {text}"


def test_repeats_are_bitwise_equal() -> None:
    inputs = make_paged(2, 1, 131072, dtype=FP8)
    first = selected(inputs, 2048)
    for _ in range(25):
        check_selected(selected(inputs, 2048), first)
