"""indexer_topk on a GPU where it selects from candidates: so many logits that a sample of the keys gives each query a
bar. The composition of indexer_logits and topk_select, bit for bit; which queries have too many or too few candidates,
and are selected once more, depends on contents."""

import itertools
from dataclasses import replace

import pytest
import torch
from indexer_gpu_inputs import (
    BF16,
    DEVICE,
    FP8,
    both_dtypes,
    composed,
    make_gpu,
    poisoned,
    same_bits,
    selected,
    tensors,
    with_bounds,
)
from torch import Tensor

from dsa_ext.testing.inputs import IndexerInputs, nasty_rows
from dsa_ext.testing.tolerances import check_selected

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_memory(6)]

#: S and S_kv: several blocks of queries for each CTA, several CTAs for each block, a sample of every 2048 keys.
SIZES = [(4101, 16400), (517, 131072 + 77), (262, 262144 - 5)]
PERIOD, PART = 1024, 64  # the first keys of every so many are the sample


def check(inputs: IndexerInputs, topk: int) -> None:
    check_selected(selected(inputs, topk), composed(inputs, topk))


def scaled(seq: int, scales: Tensor, heads: int = 32) -> IndexerInputs:
    """Every query's logits are `scales`, times a positive number of its own."""
    inputs = with_bounds(make_gpu(seq, len(scales), heads), "whole")
    one_key = inputs.k[:1].expand_as(inputs.k).contiguous()
    return replace(inputs, k=one_key, k_scale=scales, weights=inputs.weights.abs() + 1e-3)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim"), list(itertools.product([FP8, BF16], [16, 32, 64], [64, 128])), ids=str
)
def test_selection(dtype: torch.dtype, heads: int, dim: int) -> None:
    for (seq, s_kv), topk, kind in zip(SIZES, (2048, 2048, 500), ("causal", "whole", "random"), strict=True):
        check(poisoned(with_bounds(make_gpu(seq, s_kv, heads, dim, dtype), kind)), topk)


@both_dtypes
@pytest.mark.parametrize("kind", ["causal", "whole", "random", "packed", "few", "edges"])
def test_bounds(kind: str, dtype: torch.dtype) -> None:
    inputs = poisoned(with_bounds(make_gpu(4101, 24001, 32, dtype=dtype), kind))
    for topk in (1, 50, 2048, 4000):
        check(inputs, topk)


def test_windows_of_every_size() -> None:
    """All keys are candidates in windows that a list has room for, and a sampled key may be the first or the last."""
    inputs = make_gpu(16384, 16384, 32)
    check(inputs, 2048)
    shifted = torch.arange(16384, dtype=torch.int32, device=DEVICE)
    check(replace(inputs, ks=shifted // 2, ke=shifted), 1000)


@pytest.mark.parametrize("kind", ["whole", "random"])
def test_nasty_rows(kind: str) -> None:
    for name, row in nasty_rows(70001, device=DEVICE).items():
        inputs = with_bounds(scaled(1030, row), kind)
        try:
            for topk in (3, 2048):
                check(inputs, topk)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("best", ["sampled", "others", "first", "last", "one part in ten"])
def test_samples_that_are_wrong(best: str) -> None:
    """The best keys are sampled more often, or less often, than others: too few candidates, or too many."""
    key = torch.arange(66000, device=DEVICE)
    where = {
        "sampled": key % PERIOD < PART,
        "others": key % PERIOD >= PART,
        "first": key < 4000,
        "last": key >= 62000,
        "one part in ten": key // PART % 10 == 3,
    }[best]
    noise = torch.rand(len(key), generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    for topk in (100, 2048, 4096):
        check(scaled(1040, noise + where), topk)


def test_some_queries_once_more() -> None:
    """Rows of equal logits, which have too few candidates, among others."""
    inputs = with_bounds(make_gpu(1050, 66001), "whole")
    for step in (1, 7, 500):
        weights = inputs.weights.clone()
        weights[::step] = 0
        check(replace(inputs, weights=weights), 2048)


@pytest.mark.parametrize("fill", [float("nan"), float("-inf"), float("inf"), 0.0])
def test_rows_with_few_other_numbers(fill: float) -> None:
    scales = torch.full((66000,), fill, device=DEVICE)
    scales[5::97] = torch.linspace(-1, 1, len(scales[5::97]), device=DEVICE)
    for topk in (300, 2048):
        check(scaled(1030, scales), topk)


def test_repeated_calls() -> None:
    inputs = make_gpu(1030, 66001)
    first = selected(inputs, 2048)
    for _ in range(10):
        assert all(map(same_bits, selected(inputs, 2048), first))


def test_cuda_graph_with_other_contents() -> None:
    """What is selected once more differs between replays."""
    inputs = with_bounds(make_gpu(1030, 66001), "whole")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = selected(inputs, 2048)
    for kind, step in (("whole", 1), ("causal", 1031), ("random", 3)):
        changed = with_bounds(make_gpu(1030, 66001), kind)
        changed.weights[::step] = 0
        for to, source in zip(tensors(inputs), tensors(changed), strict=True):
            to.copy_(source)
        graph.replay()
        check_selected(results, composed(inputs, 2048))
