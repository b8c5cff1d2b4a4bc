"""The kernel of topk_select against the reference, bit for bit, and its other promises."""

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from indexer_cases import arguments, errors_of
from indexer_gpu_inputs import check_a_mix_of_devices, check_rows_that_no_kernel_takes, message, on_device
from streams import check_script, written_late
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, nasty_rows, strided_rows
from dsa_ext.testing.tolerances import check_selected

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.topk_select.default
DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]
TOPKS = (1, 7, 256, 2048, 4096)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(logits: Tensor, starts: Tensor, ends: Tensor, topk: int) -> None:
    results = OP(logits, starts, ends, topk)
    assert all(result.is_contiguous() for result in results)
    check_selected(results, reference.topk_select(logits, starts, ends, topk))


@both_dtypes
@pytest.mark.parametrize("columns", [1, 5, 8185, 8190, 8193, 16377, 16384, 16385, 32761, 32768, 70001, 131077])
def test_rows_at_any_address(columns: int, dtype: torch.dtype) -> None:
    """Contiguous rows of odd length, slices that start at any column, one row expanded to all. Elements outside
    of a row would rank first."""
    for first in range(9):
        wide = torch.full((4, first + columns + 3), math.inf, dtype=dtype, device=DEVICE)
        wide[:, first : first + columns] = torch.randn(4, columns, device=DEVICE)
        rows = wide[:, first : first + columns]
        for logits in (rows, rows.contiguous(), rows[:1].expand(4, -1)):
            for topk in (1, 50, 4096):
                check(logits, *whole(logits), topk)
                check(logits, *windows(logits, seed=first), topk)


@both_dtypes
@pytest.mark.parametrize("columns", [8185, 8209, 20_003])
def test_more_rows_than_sms_at_any_address(columns: int, dtype: torch.dtype) -> None:
    for first in range(9):
        wide = torch.full((300, first + columns + first % 4), math.inf, dtype=dtype, device=DEVICE)
        logits = wide[:, first : first + columns]
        logits.copy_(torch.randn(300, columns, device=DEVICE))
        starts, ends = windows(logits, seed=first)
        for last, topk in itertools.product((ends, ends.clamp(min=columns - 5)), (2048, 4096)):
            check(logits, starts.clamp(max=first), last, topk)


def adversarial_rows(columns: int) -> dict[str, Tensor]:
    """Rows that are hard for a selector that reads them once and drops candidates on the way."""
    t = torch.arange(columns, dtype=torch.int32, device=DEVICE)
    last_bits = (t + 0x3F800000).view(torch.float32)  # 1 + t * 2^-23
    noise = torch.randn(columns, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    sampled = torch.zeros(columns // 16 + 1, dtype=torch.bool, device=DEVICE)
    sampled[torch.arange(256, device=DEVICE) * (columns // 16) // 256] = True
    return {
        "ascending in the last bits": last_bits,
        "descending in the last bits": last_bits.flip(0),
        "the best come last": noise + 100.0 * (t >= columns - 5000),
        "the best come first": noise + 100.0 * (t < 5000),
        "steps up": (t // 4096).float(),
        "ramps": (t % 4096).float(),
        "ramps down": (-t % 4096).float(),
        "ties among few": (t % 3).float(),
        "ties at zero and below": 0.0 + (t * 97 % 32 < 2) - 1.0 * (t * 97 % 32 > 4),
        "one in 64": noise.masked_fill(t % 64 != 5, -math.inf),
        "subnormal": noise * 1e-40,
        "as far apart as can be": 3.4e38 * noise.sign() + noise,
        "many infinite": noise.masked_fill(t % 3 == 1, math.inf),
        "the best where samples are taken": noise + 100.0 * sampled[t.long() // 16],
        "half of the best where samples are taken": noise + 100.0 * (sampled[t.long() // 16] & (t % 16 < 8)),
        "the best in what one of 8 warps reads": noise + 100.0 * (t // 256 % 8 == 3),
        "the best in what one of 16 warps reads": noise + 100.0 * (t // 256 % 16 == 5),
    }


def rows_of(columns: int, dtype: torch.dtype) -> Tensor:
    """All nasty rows. The elements between them would rank first."""
    rows = nasty_rows(columns, device=DEVICE) | adversarial_rows(columns)
    return strided_rows(torch.stack(list(rows.values())).to(dtype), math.inf)


def repeated_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """At least `rows` rows: all nasty ones, repeated."""
    nasty = rows_of(columns, dtype)
    return strided_rows(nasty.repeat(-(-rows // len(nasty)), 1), math.inf)


def whole(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of whole rows."""
    starts = torch.zeros(len(logits), dtype=torch.int32, device=DEVICE)
    return starts, torch.full_like(starts, logits.shape[1])


def windows(logits: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random bounds; some are out of range, and those of one row in 8 are inverted."""
    rows, columns = logits.shape
    generator = torch.Generator(DEVICE).manual_seed(seed)
    bounds = torch.randint(-3, columns + 4, (2, rows), generator=generator, dtype=torch.int32, device=DEVICE)
    starts, ends = bounds.sort(dim=0).values
    inverted = torch.arange(rows, device=DEVICE) % 8 == 7
    return torch.where(inverted, ends, starts), torch.where(inverted, starts, ends)


@both_dtypes
@pytest.mark.parametrize("columns", [1, 5, 100, 2048, 4097, 30000, 2**17 + 3, 2**20])
def test_nasty_rows(columns: int, dtype: torch.dtype) -> None:
    logits = rows_of(columns, dtype)
    for topk in TOPKS:
        check(logits, *whole(logits), topk)
        check(logits, *windows(logits, seed=topk), topk)


@both_dtypes
@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 20, 28, 33, 66, 67, 132, 133, 300])
def test_row_counts(rows: int, dtype: torch.dtype) -> None:
    """Few rows are split over CTAs, longer rows over more."""
    for columns, topk in (
        (5, 4096),
        (8000, 2048),
        (9000, 2048),
        (16000, 2048),
        (24000, 2048),
        (30000, 100),
        (32000, 2048),
        (40000, 7),
        (2**17 + 3, 2048),
        (70000, 4096),
    ):
        for part in repeated_rows(rows, columns, dtype).split(rows):
            check(part, *whole(part), topk)
            check(part, *windows(part), topk)


@both_dtypes
@pytest.mark.parametrize("rows", [64, 300])
def test_few_values(rows: int, dtype: torch.dtype) -> None:
    """Ties at the last entry that is selected, and at what the sample ends with, among values of all magnitudes."""
    columns, tiny = 20_000, 2.0**-133
    numbers = torch.tensor([-math.inf, -3e38, -1.0, -0.75, -tiny, -0.0, 0.0, tiny, 1e-30, 1.0, 1.0078125, 3e38])
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        shares = torch.rand(rows, len(numbers), generator=generator) ** 4
        drawn = shares.multinomial(columns, replacement=True, generator=generator)
        logits = numbers[drawn].to(DEVICE, dtype)
        for topk in (100, 2048, 3000):
            check(logits, *whole(logits), topk)


@both_dtypes
@pytest.mark.parametrize(("rows", "topk"), [(64, 2048), (300, 2048), (300, 4096)])
@pytest.mark.parametrize("positive", [0, 160])
def test_ties_at_zero_above_a_guess_that_ties_below_it(positive: int, rows: int, topk: int, dtype: torch.dtype) -> None:
    """The sample's threshold is -1, as slightly more than topk entries are not negative; the selection ends at 0."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    order = torch.rand(rows, 100_000, generator=generator, device=DEVICE).argsort(1)
    logits = -2 - torch.rand(order.shape, generator=generator, device=DEVICE)
    logits[order < topk + 3012] = -1.0
    logits[order < topk + 12] = 0.0
    logits[order < positive] = 0.5
    check(logits.to(dtype), *whole(logits), topk)


@both_dtypes
def test_rows_too_many_to_be_cut_and_too_long_for_short_stretches(dtype: torch.dtype) -> None:
    for columns, topk in ((2**17 + 8, 2048), (300001, 2048), (300001, 4096), (600001, 2048)):
        logits = repeated_rows(140, columns, dtype)
        check(logits, *whole(logits), topk)
        check(logits, *windows(logits), topk)


def bounds_of(pairs: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    starts, ends = torch.tensor(list(pairs), dtype=torch.int32, device=DEVICE).unbind(1)
    return starts, ends


@both_dtypes
@pytest.mark.parametrize("columns", [100, 8000, 9000, 16000, 32000, 40000])
def test_windows(columns: int, dtype: torch.dtype) -> None:
    """Elements outside of the windows would rank first, or are NaN. All rows, and 28 at once: a CTA has an SM."""
    edges = (INT32_MIN, INT32_MIN + 1, -1, 0, 1, 2, 3, 5, columns // 2, columns - 1, columns, columns + 1, INT32_MAX)
    lengths = (6, 7, 8, 2047, 2048, 2049)
    pairs = [*itertools.product(edges, edges), *((start, start + n) for start in range(17) for n in lengths)]
    starts, ends = bounds_of(pairs)
    inside = reference.indexer.inside(starts, ends, columns)
    outside = torch.tensor([math.inf, math.nan], device=DEVICE).repeat(columns)[:columns]
    rows = repeated_rows(len(pairs), columns, torch.float32)[: len(pairs)]
    logits = strided_rows(torch.where(inside, rows, outside).to(dtype), math.inf)
    for topk, few in itertools.product((7, 2048), (len(pairs), 28)):
        for part in zip(logits.split(few), starts.split(few), ends.split(few), strict=True):
            check(*part, topk)


@both_dtypes
@pytest.mark.parametrize("columns", [8192, 16384, 32768])
def test_whole_vectors_of_results_from_each_cta(columns: int, dtype: torch.dtype) -> None:
    """Each eighth of the columns has as many of the best, so that those of every CTA begin at whole vectors."""
    logits = torch.randn(20, columns, device=DEVICE)
    logits.view(20, 8, -1)[..., :256] += 100
    check(logits.to(dtype), *whole(logits), 2048)


@both_dtypes
def test_views(dtype: torch.dtype) -> None:
    columns = 20000
    logits = rows_of(columns, dtype)
    starts, ends = windows(logits)
    expected = reference.topk_select(logits, starts, ends, 500)
    every_other = [torch.stack([bound, torch.full_like(bound, INT32_MAX)], 1)[:, 0] for bound in (starts, ends)]
    check_selected(OP(logits, *every_other, 500), expected)
    contiguous = logits.contiguous()
    check_selected(OP(contiguous, starts, ends, 500), expected)
    check(contiguous[::3], starts[::3], ends[::3], 500)
    check(contiguous[:, 8:1008], starts - 8, ends - 8, 500)
    check(contiguous[:1].expand(9, columns), starts[:1].expand(9), ends[:9], 500)


@pytest.mark.gpu_memory(12)
@both_dtypes
def test_rows_more_than_2_to_the_31_elements_apart(dtype: torch.dtype) -> None:
    columns, stride = 40000, 2**31 + 8
    buffer = torch.full((stride + columns,), math.inf, dtype=dtype, device=DEVICE)
    logits = buffer.as_strided((2, columns), (stride, 1))
    logits.copy_(torch.randn(2, columns, device=DEVICE))
    check(logits, *bounds_of([(5, columns), (3, columns - 7)]), 2048)


@pytest.mark.gpu_memory(22)
def test_more_than_2_to_the_31_results() -> None:
    rows, columns, topk = 2**31 // 4096 + 9, 16, 4096
    logits = torch.randn(rows, columns, device=DEVICE)
    starts, ends = whole(logits)
    indices, values = OP(logits, starts, ends, topk)
    for run in (slice(5), slice(rows // 2, rows // 2 + 5), slice(rows - 5, rows)):
        expected = reference.topk_select(logits[run], starts[run], ends[run], topk)
        check_selected((indices[run], values[run]), expected)
    assert indices[:, columns:].max() == -1
    assert values[:, columns:].max() == -math.inf


@pytest.mark.parametrize(
    "sizes", [(3, 2**17), (100, 20000), (500, 9000), (90, 8000), (90, 16000), (20, 32000)], ids=str
)
def test_repeats_are_bitwise_equal(sizes: tuple[int, int]) -> None:
    logits = torch.randn(sizes, device=DEVICE).bfloat16().float()  # many are equal
    bounds = windows(logits)
    first = OP(logits, *bounds, 2048)
    for _ in range(25):
        check_selected(OP(logits, *bounds, 2048), first)


@both_dtypes
@pytest.mark.parametrize("page_size", [1, 53, 64, 576, INT32_MAX])
def test_slots_of_a_cache(page_size: int, dtype: torch.dtype) -> None:
    """Every kernel, with tables of any numbers that may be too short, in any layout."""
    generator = torch.Generator(DEVICE).manual_seed(page_size)
    filtered = ((1, 131077, 2048), (16, 70000, 2048), (33, 70000, 4096), (28, 40000, 50), (300, 20000, 4096))
    held = ((6, 30000, 2048), (90, 16000, 2048), (90, 8000, 2048), (6, 5, 9), (300, 8000, 50))
    for rows, columns, topk in (*filtered, *held, (300, 9000, 50)):
        logits = repeated_rows(rows, columns, dtype)[:rows]
        bounds, pages = windows(logits), -(-columns // page_size)
        for sequences, to_sequence in ((rows, False), (max(1, rows // 3), rows % 3 == 0), (4, True)):
            sizes = (sequences, max(1, pages - 1))
            table = torch.randint(-2, 2**20, sizes, generator=generator, dtype=torch.int32, device=DEVICE)
            table[:, ::5] = torch.tensor(INT32_MAX, dtype=torch.int32, device=DEVICE)
            if rows % sequences:
                to_sequence = True
            args: dict[str, Any] = {"page_table": table.T.contiguous().T, "page_size": page_size}
            if to_sequence:
                numbers = torch.randint(-1, sequences + 1, (rows, 2), generator=generator, device=DEVICE)
                args["row_to_sequence"] = numbers.int()[:, 0]
            results = torch.ops.dsa.topk_select(logits, *bounds, topk, **args)
            check_selected(results, reference.topk_select(logits, *bounds, topk, **args))


EDGES = st.sampled_from([INT32_MIN, -1, 0, 1, INT32_MAX])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), columns=st.integers(0, 300) | st.integers(8000, 20000), seed=st.integers(0, 99))
def test_selection_matches_that_of_the_cpu(data: st.DataObject, columns: int, seed: int) -> None:
    rows = nasty_rows(columns, seed)
    names = data.draw(st.lists(st.sampled_from(list(rows)), min_size=1, max_size=4))
    bounds = st.lists(EDGES | st.integers(-5, columns + 5), min_size=len(names), max_size=len(names))
    starts, ends = (torch.tensor(data.draw(bounds), dtype=torch.int32) for _ in range(2))
    topk = data.draw(st.integers(1, 60) | st.integers(1, 4096))
    logits = torch.stack([rows[name] for name in names]).to(data.draw(st.sampled_from(DTYPES)))
    indices, values = OP(strided_rows(logits.to(DEVICE), math.inf), starts.to(DEVICE), ends.to(DEVICE), topk)
    check_selected((indices.cpu(), values.cpu()), reference.topk_select(logits, starts, ends, topk))


@pytest.mark.parametrize("sizes", [(0, 0), (0, 100), (5, 0)], ids=str)
def test_empty_tensors(sizes: tuple[int, int]) -> None:
    for dtype in DTYPES:
        logits = torch.empty(sizes, dtype=dtype, device=DEVICE)
        check(logits, *whole(logits), 3)


@pytest.mark.parametrize("sizes", [(1, 3000), (90, 8000), (90, 16000), (5, 30000), (32, 70000), (64, 50000)], ids=str)
def test_side_stream(sizes: tuple[int, int]) -> None:
    """Logits that are written late on a side stream: a kernel on any other stream would read zeros."""
    logits = torch.randn(sizes, device=DEVICE)
    bounds = whole(logits)
    expected = OP(logits, *bounds, 2048)
    check_selected(written_late(logits, lambda late: OP(late, *bounds, 2048)), expected)


def test_kernels_that_start_early_in_a_row() -> None:
    """Calls on one buffer that is written anew before each, some of which start in the tail of the kernel before."""
    lone = [(1, 3000), (90, 8000), (90, 16000), (4, 30000), (1, 70000), (32, 70000), (16, 70000)]
    sizes = [*lone[:4], (300, 9000), *lone[4:], (1, 30000)]
    inputs = [torch.randn(size, device=DEVICE) for size in sizes]
    expected = [OP(x, *whole(x), 1000) for x in inputs]
    flat = torch.empty(max(x.numel() for x in inputs), device=DEVICE)
    bounds = [whole(x) for x in inputs]
    for _ in range(5):
        results = []
        for x, of_x in zip(inputs, bounds, strict=True):
            logits = flat[: x.numel()].view(x.shape)
            logits.copy_(x)
            results.append(OP(logits, *of_x, 1000))
        for result, of_x in zip(results, expected, strict=True):
            check_selected(result, of_x)


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.tolerances import check_selected
calls = []
for rows, columns, dtype in (
    (3, 2**17, torch.float32), (3, 30000, torch.float32), (100, 20000, torch.bfloat16), (500, 9000, torch.float32),
    (90, 8000, torch.float32), (90, 16000, torch.float32),
):
    logits = torch.randn(rows, columns, device="cuda").to(dtype)
    ends = torch.randint(columns, (rows,), dtype=torch.int32, device="cuda")
    calls.append((logits, torch.zeros_like(ends), ends, 2048))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [torch.ops.dsa.topk_select(*call) for call in calls]
for logits, _, ends, _ in calls:
    logits.neg_()
    ends.add_(1)
for _ in range(3):
    graph.replay()
for results, call in zip(captured, calls):
    check_selected(results, torch.ops.dsa.topk_select(*call))
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


@both_dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 64, dtype=dtype, device=DEVICE, requires_grad=True)
    torch.library.opcheck(OP, (logits, *whole(logits), 9))


@errors_of("topk_select")
def test_errors_are_those_of_the_cpu(op: str, changes: dict[str, Any], text: str) -> None:
    assert message(op, on_device(arguments(op, **changes))) == f"dsa::{op}: {text}"


@pytest.mark.parametrize("op", ["topk_select"])
def test_a_mix_of_devices(op: str) -> None:
    check_a_mix_of_devices(op)


@pytest.mark.parametrize("op", ["topk_select"])
def test_rows_that_no_kernel_takes(op: str) -> None:
    """It takes rows at any address."""
    check_rows_that_no_kernel_takes(op, "logits", views=1)
