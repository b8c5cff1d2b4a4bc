"""indexer_topk on a GPU: the composition of indexer_logits and topk_select, bit for bit. Views, streams and graphs of
both operators are in test_indexer_logits_gpu.py."""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from indexer_cases import arguments, errors_of
from indexer_gpu_inputs import (
    DEVICE,
    both_dtypes,
    check_a_mix_of_devices,
    check_rows_that_no_kernel_takes,
    composed,
    every_kernel,
    logits_of,
    make_gpu,
    message,
    on_device,
    poisoned,
    queries,
    selected,
    with_bounds,
)
from torch import Tensor

from dsa_ext.testing.inputs import IndexerInputs
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import check_selected

pytestmark = pytest.mark.gpu

#: Bytes that indexer_topk may allocate on top of its results: at most 256 MiB, a copy of k and its scales, and 1.5 KiB
#: a query.
WORKSPACE_LIMIT = 256 * 2**20
WORKSPACE_PER_QUERY = 1536
# S, S_kv, topk and the bounds.
SELECTIONS = [
    (1, 1, 1, "whole"),
    (5, 100, 2048, "causal"),
    (64, 1000, 7, "edges"),
    (65, 4099, 1, "packed"),
    (130, 9001, 2048, "causal"),
    (257, 5001, 4096, "random"),
    (3, 30001, 2048, "whole"),
]


@every_kernel
def test_selection(dtype: torch.dtype, heads: int, dim: int) -> None:
    for seq, s_kv, topk, kind in SELECTIONS:
        inputs = poisoned(with_bounds(make_gpu(seq, s_kv, heads, dim, dtype), kind))
        try:
            check_selected(selected(inputs, topk), composed(inputs, topk))
        except Exception as error:
            raise AssertionError(f"S={seq} S_kv={s_kv} topk={topk} {kind}: {error}") from error


@both_dtypes
@pytest.mark.parametrize("sizes", [(260, 2**17), (33, 2**17 + 5), (5, 2**20), (1, 2**20 - 1)], ids=str)
def test_selection_among_many_keys(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make_gpu(*sizes, dtype=dtype)
    for kind, topk in (("causal", 2048), ("random", 4096), ("packed", 1)):
        inputs = with_bounds(inputs, kind)
        check_selected(selected(inputs, topk), composed(inputs, topk))


@both_dtypes
@pytest.mark.parametrize("s_kv", [5, 3001, 40003, 2**17])
def test_few_queries_select_what_they_select_among_others(s_kv: int, dtype: torch.dtype) -> None:
    for heads, kind, topk in ((64, "causal", 2048), (32, "random", 2048), (8, "packed", 3), (16, "edges", 4096)):
        inputs = with_bounds(make_gpu(64, s_kv, heads, dtype=dtype), kind)
        indices, values = composed(inputs, topk)
        for seq in (1, 2, 3, 4, 5, 6, 7, 16, 32):
            run = slice(64 - seq, 64)
            check_selected(selected(queries(inputs, run), topk), (indices[run], values[run]))


@pytest.mark.gpu_memory(4)
@pytest.mark.parametrize("topk", [50, 2047])
def test_selection_in_runs_whose_results_begin_anywhere(topk: int) -> None:
    """So many keys that runs are shorter than 64 queries: a run's first result is not 16-byte aligned."""
    inputs = make_gpu(130, 1_100_000, heads=8, dim=64, dtype=torch.bfloat16)
    check_selected(selected(inputs, topk), composed(inputs, topk))


@pytest.mark.parametrize("order", ["equal", "zeros", "repeated", "ascending", "descending"])
def test_selection_among_ties_and_in_order(order: str) -> None:
    inputs = with_bounds(make_gpu(140, 20000), "whole")
    assert inputs.k_scale is not None
    one_key, one = inputs.k[:1].expand_as(inputs.k).contiguous(), torch.ones_like(inputs.k_scale)
    k, k_scale = {
        "equal": (one_key, one),
        "zeros": (torch.zeros_like(inputs.k), one),
        "repeated": (inputs.k[:100].repeat(200, 1), one),
        "ascending": (one_key, torch.linspace(1, 2, len(one), device=DEVICE)),
        "descending": (one_key, torch.linspace(2, 1, len(one), device=DEVICE)),
    }[order]
    inputs = replace(inputs, k=k, k_scale=k_scale, weights=inputs.weights.abs())
    for topk in (1, 2048, 4096):
        check_selected(selected(inputs, topk), composed(inputs, topk))


@pytest.mark.parametrize("sizes", [(4096, 2**17), (64, 2**20)], ids=str)
def test_memory_beside_the_results(sizes: tuple[int, int]) -> None:
    inputs = make_gpu(*sizes)
    assert inputs.k_scale is not None
    copies = inputs.k.nbytes + inputs.k_scale.nbytes + WORKSPACE_PER_QUERY * sizes[0]
    assert workspace_bytes(lambda: selected(inputs, 2048)) <= WORKSPACE_LIMIT + copies


# So many logits that only those above a bar are kept.
@every_kernel
def test_selection_above_bars(dtype: torch.dtype, heads: int, dim: int) -> None:
    inputs = make_gpu(1403, 50001, heads, dim, dtype)
    for kind in ("causal", "whole", "random", "packed", "edges"):
        bounded = poisoned(with_bounds(inputs, kind))
        for topk in (2048, 7):
            expected = composed(bounded, topk)
            for _ in range(2):
                check_selected(selected(bounded, topk), expected)


@both_dtypes
@pytest.mark.parametrize(("seq", "s_kv", "topk"), [(700, 131072, 4096), (701, 131073, 2048), (520, 300001, 2048)])
def test_selection_above_bars_among_more_keys(dtype: torch.dtype, seq: int, s_kv: int, topk: int) -> None:
    inputs = make_gpu(seq, s_kv, 32, dtype=dtype)
    for kind in ("causal", "whole"):
        bounded = with_bounds(inputs, kind)
        check_selected(selected(bounded, topk), composed(bounded, topk))


def rest_of(host_functions: ModuleType, inputs: IndexerInputs) -> int:
    """The units of work that are kept for CTAs that are done first: some for the start of each block of queries, and
    its parts of tiles of keys that are not in the sample."""
    plan = host_functions.indexer_logits
    block = plan.queries_of_block(inputs.q[0, 0].nbytes, inputs.q.size(1))
    begins, ends = (bounds.clamp(0, len(inputs.k)) for bounds in (inputs.ks, inputs.ke))
    units = blocks = 0
    for run in zip(begins.split(block), ends.split(block), strict=True):
        blocks += 1
        seen = run[0] < run[1]
        if not seen.any():
            continue
        begin, end = (int(x) for x in (run[0][seen].amin(), run[1][seen].amax()))
        begin, end = (x - plan.sampled(x) for x in (begin, end))
        units += plan.start_units + (end - 1) // plan.part_keys + 1 - begin // plan.part_keys
    rest: int = plan.rest_of(units, blocks, 132)
    return rest


@every_kernel
def test_selection_above_bars_with_a_rest(dtype: torch.dtype, heads: int, dim: int, host_functions: ModuleType) -> None:
    inputs = make_gpu(2601, 131073, heads, dim, dtype)
    for kind in ("whole", "random"):
        bounded = poisoned(with_bounds(inputs, kind))
        assert heads < 16 or rest_of(host_functions, bounded) > 0
        expected = composed(bounded, 2048)
        for _ in range(2):
            check_selected(selected(bounded, 2048), expected)


@pytest.mark.gpu_memory(9)
def test_selection_above_bars_in_runs(host_functions: ModuleType) -> None:
    """Two runs, both with a rest for CTAs that are done first."""
    inputs = with_bounds(make_gpu(10_500, 100_000, 16, dim=64), "whole")
    plan = host_functions.indexer_topk
    first_run = plan.rows_at_once(10_500, 2 * plan.max_candidates(2048))
    assert rest_of(host_functions, queries(inputs, slice(first_run, 10_500))) > 0
    indices, values = selected(inputs, 2048)
    for run in (slice(0, 1000), slice(7300, 8300), slice(9500, 10_500)):
        check_selected((indices[run], values[run]), composed(queries(inputs, run), 2048))


def rows_beside_bars() -> dict[str, tuple[Any, ...]]:
    """Keys, scales and weights for which samples may mislead: too few logits above the bar, or too many."""
    inputs = make_gpu(1403, 50001)
    assert inputs.k_scale is not None
    place = torch.arange(50001, device=DEVICE)
    some = torch.rand(50001, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE) < 0.2
    one_key, one = inputs.k[:1].expand_as(inputs.k).contiguous(), torch.ones_like(inputs.k_scale)
    weights = inputs.weights.abs()
    return {
        "equal": (inputs, one_key, one, weights),
        "zeros": (inputs, torch.zeros_like(inputs.k), one, weights),
        "negative zeros": (inputs, torch.zeros_like(inputs.k), -one, weights),
        "repeated": (inputs, inputs.k[:100].repeat(501, 1)[:50001], one, weights),
        "ascending": (inputs, one_key, torch.linspace(1, 2, 50001, device=DEVICE), weights),
        "descending": (inputs, one_key, torch.linspace(2, 1, 50001, device=DEVICE), weights),
        "infinite": (inputs, inputs.k, one.masked_fill(some, torch.inf), weights),
        "NaN": (inputs, inputs.k, one.masked_fill(some, torch.nan), weights),
        "best are sampled": (inputs, inputs.k, one.masked_fill(place % 17 == 0, 3), weights),
        "worst are sampled": (inputs, inputs.k, one.masked_fill(place % 17 == 0, 0.01), weights),
        "best are neighbors": (inputs, inputs.k, one.masked_fill(place < 2048, 3), weights),
    }


#: For which topk the bars of these rows mislead, so that they are done again.
DONE_AGAIN = {
    "equal": (1, 2048),
    "zeros": (1, 2048),
    "negative zeros": (1, 2048),
    "repeated": (1,),
    "ascending": (),
    "descending": (),
    "infinite": (1, 2048),
    "NaN": (),
    "best are sampled": (2048,),
    "worst are sampled": (1, 2048),
    "best are neighbors": (),
}


@pytest.mark.parametrize("rows", DONE_AGAIN)
def test_rows_whose_sample_misleads(rows: str) -> None:
    inputs, k, k_scale, weights = rows_beside_bars()[rows]
    inputs = with_bounds(replace(inputs, k=k, k_scale=k_scale, weights=weights), "whole")
    for topk in (1, 2048):
        check_selected(selected(inputs, topk), composed(inputs, topk))


def mixed(seq: int, s_kv: int, dtype: torch.dtype) -> IndexerInputs:
    """Of three rows the first has equal logits, so that none is above its bar; the second has its best keys outside of
    the sample, so that too many are above its bar; the third one's bar does not mislead."""
    inputs = with_bounds(make_gpu(seq, s_kv, 16, 64, dtype), "whole")
    q, k, weights = inputs.q.float(), inputs.k.float(), inputs.weights.abs()
    most_q, most_k = q.max(), k.max()
    q[:, :, 0], k[:, 0] = 0, most_k
    q[1::3, :, 0], k[::17, 0] = most_q, 0
    weights[::3] = 0
    return replace(inputs, q=q.to(dtype), k=k.to(dtype), weights=weights)


@both_dtypes
def test_rows_whose_bars_mislead_beside_others(dtype: torch.dtype) -> None:
    inputs = mixed(1403, 50001, dtype)
    check_selected(selected(inputs, 2048), composed(inputs, 2048))


def test_rows_whose_bars_mislead_in_later_runs() -> None:
    inputs = mixed(4700, 98304, torch.bfloat16)
    indices, values = selected(inputs, 4096)
    for run in (slice(0, 300), slice(4450, 4700)):
        check_selected((indices[run], values[run]), composed(queries(inputs, run), 4096))


@pytest.mark.parametrize(("seq", "s_kv", "last"), [(4196, 2**14, 100), (2102, 2**15, 54)])
def test_rows_whose_bars_mislead_in_a_short_last_run(
    host_functions: ModuleType, seq: int, s_kv: int, last: int
) -> None:
    """The last run's rows are held by CTAs that have an SM each."""
    assert seq - host_functions.indexer_topk.rows_at_once(seq, s_kv) == last
    inputs = mixed(seq, s_kv, torch.bfloat16)
    indices, values = selected(inputs, 50)
    run = slice(seq - last - 30, seq)
    check_selected((indices[run], values[run]), composed(queries(inputs, run), 50))


@pytest.mark.gpu_memory(5)
@both_dtypes
def test_rows_whose_bars_mislead_among_the_most_keys(dtype: torch.dtype) -> None:
    """Rows that are done again are selected by several CTAs each, which leave other rows as they are."""
    inputs = mixed(520, 2**20, dtype)
    check_selected(selected(inputs, 2048), composed(inputs, 2048))


@both_dtypes
def test_rows_whose_bars_mislead_in_a_graph(dtype: torch.dtype) -> None:
    """Other rows at each replay, then none."""
    inputs = mixed(1403, 50001, dtype)
    selected(inputs, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = selected(inputs, 2048)
    k = inputs.k.clone()
    k[:, 0] = 0
    for _ in range(3):
        graph.replay()
        check_selected(result, composed(inputs, 2048))
        inputs.weights.copy_(inputs.weights.roll(1, 0))
    inputs.weights.fill_(1)
    inputs.k.copy_(k)
    graph.replay()
    check_selected(result, composed(inputs, 2048))


def misleads(host_functions: ModuleType, inputs: IndexerInputs, topk: int) -> Tensor:
    """Whether a row's bar misleads, by the rule of csrc/ops/indexer/indexer_topk."""
    plan, every = host_functions.indexer_topk, host_functions.indexer_logits.key_of_sample(1)
    logits = logits_of(inputs)
    logits = logits.masked_fill(logits.isnan(), -math.inf)
    bars = logits[:, ::every].topk(plan.rank_of_bar(topk)).values[:, -1:]
    above = (logits > bars).sum(1)
    result: Tensor = ((above < topk) & (bars[:, 0] > -math.inf)) | (above > plan.max_candidates(topk))
    return result


def test_which_bars_mislead(host_functions: ModuleType) -> None:
    """The tests above have the rows that they claim to have."""
    for name, (inputs, k, k_scale, weights) in rows_beside_bars().items():
        inputs = queries(with_bounds(replace(inputs, k=k, k_scale=k_scale, weights=weights), "whole"), slice(90))
        for topk in (1, 2048):
            assert bool((misleads(host_functions, inputs, topk) == (topk in DONE_AGAIN[name])).all()), (name, topk)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        for s_kv, topk in ((50001, 2048), (98304, 4096), (2**20, 2048), (2**14, 50), (2**15, 50)):
            expected = torch.tensor([True, True, False], device=DEVICE).repeat(30)
            assert torch.equal(misleads(host_functions, mixed(90, s_kv, dtype), topk), expected), (dtype, s_kv)
    plan = host_functions.indexer_topk
    assert plan.rows_at_once(4700, 2 * plan.max_candidates(4096)) < 4700, "not a run for all"
    rows, plan_row = plan.rows_at_once(520, 2**20), host_functions.topk_select.plan_row
    assert plan_row(rows, 2**20, False, 132, lambda ctas: 132 // ctas)[0] > 1, "a CTA for each row"


@pytest.mark.parametrize(("topk", "window"), [(7, 150), (2048, 3000), (4096, 5000)])
def test_signs_of_zeros_without_a_bar(topk: int, window: int) -> None:
    """So few keys in a row's window that its sample gives no bar: all of them are candidates."""
    inputs = make_gpu(1403, 100_000)
    assert inputs.k_scale is not None
    generator = torch.Generator(DEVICE).manual_seed(0)
    zero, negative = torch.rand((2, 100_000), generator=generator, device=DEVICE) < 0.5
    starts = torch.arange(1403, dtype=torch.int32, device=DEVICE) * 67
    inputs = replace(
        inputs,
        k=inputs.k.float().masked_fill(zero[:, None], 0).to(inputs.k.dtype),
        k_scale=torch.where(negative, -inputs.k_scale, inputs.k_scale),
        ks=starts,
        ke=starts + window,
    )
    indices, values = selected(inputs, topk)
    check_selected((indices, values), composed(inputs, topk))
    if topk > window // 3:
        signs = values[values == 0].signbit()
        assert signs.any()
        assert not signs.all()


def test_one_row_whose_sample_misleads() -> None:
    """One row is selected in another way than its neighbors, which keep their results."""
    inputs = with_bounds(make_gpu(1403, 50001), "whole")
    weights = inputs.weights.clone()
    weights[700] = 0
    inputs = replace(inputs, weights=weights)
    check_selected(selected(inputs, 2048), composed(inputs, 2048))


def test_selection_above_bars_in_a_graph() -> None:
    inputs = with_bounds(make_gpu(1403, 131073, 64), "causal")
    selected(inputs, 2048)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = selected(inputs, 2048)
    for seed in (1, 2):
        torch.manual_seed(seed)
        inputs.weights.copy_(torch.randn_like(inputs.weights))
        graph.replay()
        check_selected(result, composed(inputs, 2048))


@errors_of("indexer_topk")
def test_errors_are_those_of_the_cpu(op: str, changes: dict[str, Any], text: str) -> None:
    assert message(op, on_device(arguments(op, **changes))) == f"dsa::{op}: {text}"


@pytest.mark.parametrize("op", ["indexer_topk"])
def test_a_mix_of_devices(op: str) -> None:
    check_a_mix_of_devices(op)


@pytest.mark.parametrize("op", ["indexer_topk"])
def test_rows_that_no_kernel_takes(op: str) -> None:
    check_rows_that_no_kernel_takes(op, "q", "k", "weights")
