"""The kernel of indexer_logits_paged: bitwise equal to indexer_logits for the same keys, against the reference, and its
other promises."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from indexer_gpu_inputs import BF16, DEVICE, FP8, both_dtypes, every_kernel, message, on_device, same_bits
from paged_cases import ERRORS, errors_of, paged_arguments
from paged_gpu_inputs import PAGED, lengths_of, make_paged, unpaged, with_lengths
from streams import check_script, written_late
from torch import Tensor

from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, strided_copy, strided_rows
from dsa_ext.testing.paged_inputs import PagedInputs, poisoned
from dsa_ext.testing.tolerances import check

pytestmark = pytest.mark.gpu

# B, N, keys, page and the lengths.
SIZES = [
    (1, 1, 1, 64, "all"),
    (1, 1, 64, 64, "all"),
    (3, 2, 150, 64, "random"),
    (2, 6, 1000, 64, "per query"),
    (13, 5, 200, 64, "edges"),
    (13, 5, 200, 64, "edges of sequences"),
    (40, 1, 2100, 64, "one"),
    (3, 3, 300, 4, "random"),
    (4, 4, 700, 192, "per query"),
    (5, 1, 900, 68, "random"),
]


def run(inputs: PagedInputs, max_len: int | None = None, clean: bool = True) -> Tensor:
    result: Tensor = PAGED(*vars(inputs).values(), max_len, clean)
    return result


def assert_is_unpaged(inputs: PagedInputs, max_len: int | None = None) -> None:
    got = run(poisoned(inputs), max_len)
    assert same_bits(got, unpaged(inputs, got.shape[1]))


@every_kernel
def test_every_kernel(dtype: torch.dtype, heads: int, dim: int) -> None:
    for batch, queries, keys, page, kind in SIZES:
        inputs = with_lengths(make_paged(batch, queries, keys, heads, dim, page=page, dtype=dtype), kind)
        try:
            assert_is_unpaged(inputs)
            check("indexer_logits_paged", run(inputs), vars(inputs))
        except Exception as error:
            raise AssertionError(f"B={batch} N={queries} keys={keys} page={page} {kind}: {error}") from error


@both_dtypes
@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 6])
def test_numbers_of_queries(queries: int, dtype: torch.dtype) -> None:
    for heads in (8, 16, 32, 64):
        for kind in ("random", "per query"):
            assert_is_unpaged(with_lengths(make_paged(7, queries, 1500, heads, dtype=dtype), kind))


@both_dtypes
@pytest.mark.parametrize("batch", [1, 2, 31, 33, 64, 127, 129, 132, 133, 321, 700, 1100])
def test_batches(batch: int, dtype: torch.dtype) -> None:
    for kind in ("random", "one", "few", "all"):
        for queries in (1, 6):
            assert_is_unpaged(with_lengths(make_paged(batch, queries, 200, dtype=dtype), kind))
        assert_is_unpaged(with_lengths(make_paged(batch, 2, 60, 8, 64, dtype=dtype), kind))


@both_dtypes
@pytest.mark.parametrize("page", [4, 16, 48, 60, 64, 68, 128, 320, 576])
def test_page_sizes(page: int, dtype: torch.dtype) -> None:
    for keys in (1, page, 1000):
        assert_is_unpaged(with_lengths(make_paged(3, 2, keys, dtype=dtype, page=page), "random"))


@pytest.mark.parametrize("page", [1, 3, 53, 61, 69])
def test_odd_page_sizes(page: int) -> None:
    for keys in (1, page, 500):
        assert_is_unpaged(with_lengths(make_paged(3, 2, keys, dtype=BF16, page=page), "random"))


@both_dtypes
@pytest.mark.parametrize("sizes", [(1, 1, 131072), (2, 2, 50000), (5, 1, 20001)], ids=str)
def test_many_keys(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    for kind in ("all", "random"):
        assert_is_unpaged(with_lengths(make_paged(*sizes, dtype=dtype), kind))


@both_dtypes
@pytest.mark.parametrize("sizes", [(70, 1, 26000), (700, 2, 2400), (9, 3, 190000)], ids=str)
def test_long_calls(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Every CTA has tiles of several sequences, and some have many tiles of one."""
    for kind in ("random", "one", "all"):
        assert_is_unpaged(with_lengths(make_paged(*sizes, dtype=dtype), kind))
    inputs = with_lengths(make_paged(*sizes, dtype=dtype), "random")
    expected, graph = run(inputs), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(inputs)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert same_bits(got, expected)


@every_kernel
def test_every_stage_is_used_again(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Every CTA has several sequences, and more tiles than stages; for each shape of products."""
    for queries in {8: (6,), 16: (4, 6), 32: (2, 4, 6), 64: (1, 2, 3)}[heads]:
        assert_is_unpaged(with_lengths(make_paged(700, queries, 1500, heads, dim, dtype=dtype), "random"))


@both_dtypes
@pytest.mark.parametrize("max_len", [0, 1, 63, 130, 256, 257, 9000])
def test_columns(max_len: int, dtype: torch.dtype) -> None:
    """More or fewer columns than the table holds; with clean=False those below each length are the same."""
    inputs = with_lengths(make_paged(9, 2, 256, dtype=dtype), "random")
    assert_is_unpaged(inputs, max_len)
    expected, got = run(inputs, max_len), run(inputs, max_len, clean=False)
    seen = torch.arange(max_len, device=DEVICE) < lengths_of(inputs, max_len).flatten()[:, None]
    assert same_bits(got[seen], expected[seen])


@pytest.mark.parametrize("batch", [5, 200])
def test_sequences_of_length_0(batch: int) -> None:
    inputs = make_paged(batch, 2, 300)
    logits = run(replace(inputs, context_lens=torch.zeros(batch, dtype=torch.int32, device=DEVICE)))
    assert (logits == -math.inf).all()


@both_dtypes
@pytest.mark.parametrize("bad", [-1, INT32_MIN, 1 << 20, INT32_MAX])
def test_blocks_that_do_not_exist(bad: int, dtype: torch.dtype) -> None:
    inputs = make_paged(4, 2, 500, dtype=dtype)
    expected, table = run(inputs), inputs.block_table.clone()
    table[0, 3], table[2], table[3, ::2] = bad, bad, bad
    got = run(replace(inputs, block_table=table))
    missing = (table == bad).repeat_interleave(64, 1).repeat_interleave(2, 0)
    assert same_bits(got, expected.masked_fill(missing, -math.inf))
    for clean in (False, True):
        nothing = run(replace(inputs, block_table=torch.full_like(table, bad)), clean=clean)
        assert (nothing[:, :499] == -math.inf).all()


@pytest.mark.parametrize("sizes", [(0, 100, 2), (3, 0, 1), (3, 0, 0)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int]) -> None:
    batch, keys, spare = sizes
    inputs = make_paged(batch, 2, keys, spare=spare)
    inputs = replace(inputs, context_lens=inputs.context_lens + 9)
    for max_len in (None, 0, 70):
        logits = run(inputs, max_len)
        assert len(logits) == 2 * batch
        assert (logits == -math.inf).all() or keys > 0
    table = torch.zeros(batch, 3, dtype=torch.int32, device=DEVICE)
    none = replace(inputs, k_cache=inputs.k_cache[:0], block_table=table)
    assert (run(none, clean=False) == -math.inf).all()


@both_dtypes
def test_a_query_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    inputs = with_lengths(make_paged(128, 2, 3000, dtype=dtype), "random")
    logits = run(inputs).unflatten(0, (128, 2))
    for b in (0, 1, 63, 127):
        one = slice(b, b + 1)
        rows = slice(2 * b, 2 * b + 2)
        tensors = inputs.q[one], inputs.k_cache, inputs.weights[rows], inputs.context_lens[one], inputs.block_table[one]
        assert same_bits(PAGED(*tensors), logits[b])
    again = run(replace(inputs, **{n: getattr(inputs, n).flip(0) for n in ("q", "context_lens", "block_table")},
                        weights=inputs.weights.unflatten(0, (128, 2)).flip(0).flatten(0, 1)))  # fmt: skip
    assert same_bits(again.unflatten(0, (128, 2)).flip(0), logits)


@both_dtypes
def test_repeats_are_bitwise_equal(dtype: torch.dtype) -> None:
    for sizes in ((1, 1, 131072), (64, 2, 3000), (300, 6, 100)):
        inputs = with_lengths(make_paged(*sizes, dtype=dtype), "random")
        first = run(inputs)
        for _ in range(20):
            assert same_bits(run(inputs), first)


def views(inputs: PagedInputs) -> Iterator[PagedInputs]:
    """The same values in other layouts."""
    yield replace(inputs, q=strided_copy(inputs.q), weights=strided_rows(inputs.weights))
    q = inputs.q.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    lens = torch.stack([inputs.context_lens, torch.full_like(inputs.context_lens, 9)], -1)[..., 0]
    table = inputs.block_table.T.contiguous().T
    yield replace(inputs, q=q, context_lens=lens, block_table=table)
    cache, page = inputs.k_cache, inputs.k_cache.shape[1]
    yield replace(inputs, k_cache=torch.cat([cache, torch.full_like(cache, 255)], 1)[:, :page])
    if cache.dtype == BF16:
        yield replace(inputs, k_cache=cache.transpose(0, 1).contiguous().transpose(0, 1))
        yield replace(inputs, k_cache=strided_copy(cache))


@both_dtypes
def test_views(dtype: torch.dtype) -> None:
    inputs = with_lengths(make_paged(6, 3, 400, 16, dtype=dtype), "per query")
    for view in views(inputs):
        assert same_bits(run(view), run(inputs))


@pytest.mark.gpu_memory(12)
@both_dtypes
def test_a_cache_of_more_than_2_to_the_31_bytes(dtype: torch.dtype) -> None:
    inputs = make_paged(2, 1, 130, dtype=dtype)
    cache, stride = inputs.k_cache, 2**29
    buffer = torch.empty((len(cache) - 1) * stride + cache[0].numel(), dtype=cache.dtype, device=DEVICE)
    far = buffer.as_strided(cache.shape, (stride, *cache.stride()[1:]))
    far.copy_(cache)
    assert same_bits(run(replace(inputs, k_cache=far)), run(inputs))


@pytest.mark.gpu_memory(14)
def test_more_than_2_to_the_31_logits() -> None:
    inputs = make_paged(9, 1, 200)
    columns = 2**28 + 5
    logits = run(inputs, columns)
    expected = run(inputs)
    assert same_bits(logits[:, : expected.shape[1]], expected)
    assert (logits[::4, expected.shape[1] :] == -math.inf).all()


@both_dtypes
def test_side_stream(dtype: torch.dtype) -> None:
    inputs = with_lengths(make_paged(20, 2, 3000, dtype=dtype), "random")
    expected = run(inputs)
    assert same_bits(written_late(inputs.block_table, lambda late: run(replace(inputs, block_table=late))), expected)
    assert same_bits(written_late(inputs.context_lens, lambda late: run(replace(inputs, context_lens=late))), expected)


@both_dtypes
def test_a_graph_serves_any_lengths_and_tables(dtype: torch.dtype) -> None:
    inputs = with_lengths(make_paged(20, 2, 3000, dtype=dtype), "random")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = run(inputs)
    generator = torch.Generator(DEVICE).manual_seed(7)
    for high in (3000, 70, 1, 3100):
        lengths = torch.randint(-1, high, inputs.context_lens.shape, generator=generator, device=DEVICE)
        inputs.context_lens.copy_(lengths)
        blocks = torch.randint(len(inputs.k_cache), inputs.block_table.shape, generator=generator, device=DEVICE)
        inputs.block_table.copy_(blocks)
        captured.fill_(math.nan)
        graph.replay()
        assert same_bits(captured, unpaged(inputs, captured.shape[1]))


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.paged_inputs import make_paged_inputs
from dsa_ext.testing.tolerances import bits
calls = [make_paged_inputs(3, 2, 500, dtype=dtype, device="cuda") for dtype in (torch.float8_e4m3fn, torch.bfloat16)]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [dsa_ext.indexer_logits_paged(**vars(call)) for call in calls]
for call in calls:
    call.context_lens.sub_(100)
graph.replay()
for got, call in zip(captured, calls):
    assert torch.equal(bits(got), bits(dsa_ext.indexer_logits_paged(**vars(call))))
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


def test_infinite_and_nan_scores_stay_with_their_keys() -> None:
    inputs = make_paged(2, 2, 300, dtype=BF16)
    expected, cache = run(inputs), inputs.k_cache.clone()
    cache[inputs.block_table[0, 1].long(), 7] = math.nan
    got = run(replace(inputs, k_cache=cache))
    assert got[:2, 71].isnan().all()
    got[:2, 71] = expected[:2, 71]
    assert same_bits(got, expected)


@both_dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    args = on_device(paged_arguments("indexer_logits_paged", dtype))
    torch.library.opcheck(PAGED, (), args, test_utils=["test_autograd_registration", "test_faketensor"])


@errors_of("indexer_logits_paged")
def test_errors_are_those_of_the_cpu(op: str, changes: dict[str, Any], text: str) -> None:
    assert message(op, on_device(paged_arguments(op, **changes))) == f"dsa::{op}: {text}"


@pytest.mark.parametrize("op", ERRORS)
def test_a_mix_of_devices(op: str) -> None:
    args = on_device(paged_arguments(op))
    for name in ("k_cache", "weights", "context_lens", "block_table"):
        text = message(op, {**args, name: args[name].cpu()})
        assert text == f"dsa::{op}: {name} must be on the device of q, cuda:0, got cpu"


@pytest.mark.parametrize("op", ERRORS)
def test_caches_that_no_kernel_takes(op: str) -> None:
    fail = partial(message, op)
    for dtype in (FP8, BF16):
        args = on_device(paged_arguments(op, dtype))
        cache = args["k_cache"]
        late = torch.empty(cache.numel() + 8, dtype=cache.dtype, device=DEVICE)[1:][: cache.numel()].view(cache.shape)
        assert "k_cache must start 16-byte aligned, got an address that is" in fail({**args, "k_cache": late})
        turned = cache.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        assert "k_cache must have" in fail({**args, "k_cache": turned})
    args = on_device(paged_arguments(op))
    gaps = torch.cat([args["k_cache"]] * 2, 2)[..., : args["k_cache"].shape[2]]
    assert "k_cache must have contiguous pages, got strides 136 and 1" in fail({**args, "k_cache": gaps})
