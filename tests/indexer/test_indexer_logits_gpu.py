"""The kernel of indexer_logits against the reference in float64 on the same GPU, and its other promises. Views, streams
and graphs of indexer_topk are here too."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from indexer_cases import arguments, errors_of, loss
from indexer_gpu_inputs import (
    BF16,
    BOUNDS,
    DEVICE,
    FP8,
    LOGITS,
    TOPK,
    both_dtypes,
    changed,
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
    same_bits,
    selected,
    tensors,
    visible_keys,
    with_bounds,
)
from streams import check_script, written_late
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import IndexerInputs, strided_copy, strided_rows
from dsa_ext.testing.tolerances import SIMILARITY, bits, check_selected, logits_errors, similarity_error

pytestmark = pytest.mark.gpu


def check(inputs: IndexerInputs) -> Tensor:
    logits = logits_of(inputs)
    logits_errors(logits, *tensors(inputs), inputs.k_scale).check()
    return logits


SIZES = (1, 5, 63, 64, 65, 130, 257, 1000, 4099)


@every_kernel
def test_logits(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Random pairs of sizes for each kernel, with and without writing -inf outside of the bounds."""
    generator = random.Random(f"{dtype} {heads} {dim}")
    for seq, s_kv, kind in zip(
        generator.sample(SIZES, len(SIZES)), generator.sample(SIZES, len(SIZES)), itertools.cycle(BOUNDS)
    ):
        inputs = poisoned(with_bounds(make_gpu(seq, s_kv, heads, dim, dtype), kind))
        try:
            logits = check(inputs)
            visible = visible_keys(inputs)
            assert same_bits(logits_of(inputs, clean=False)[visible], logits[visible]), "clean changes logits"
        except Exception as error:
            raise AssertionError(f"S={seq} S_kv={s_kv} {kind}: {error}") from error


#: One element of each tensor, which belongs to query 70 or to key 200.
PLACES = {"q": (70, 5, 3), "weights": (70, 5), "k": (200, 3), "k_scale": (200,)}


@pytest.mark.parametrize(
    ("dtype", "name"), [(FP8, name) for name in PLACES] + [(BF16, name) for name in ("q", "weights", "k")], ids=str
)
def test_what_is_not_finite_reaches_what_it_concerns_alone(dtype: torch.dtype, name: str) -> None:
    inputs = make_gpu(130, 300, dtype=dtype)
    expected = check(inputs)
    concerned = torch.zeros_like(expected, dtype=torch.bool)
    concerned[70 if name in ("q", "weights") else (slice(None), 200)] = True
    tensor = getattr(inputs, name)
    for value in [math.nan] if tensor.dtype == FP8 else [math.nan, math.inf, -math.inf]:
        spoiled = tensor.float()
        spoiled[PLACES[name]] = value
        logits = check(replace(inputs, **{name: spoiled.to(tensor.dtype)}))
        differs = bits(logits) != bits(expected)
        assert (differs & concerned).any()
        assert not (differs & ~concerned).any()
        assert value == value or logits[concerned & visible_keys(inputs)].isnan().all()


@every_kernel
def test_logits_do_not_depend_on_their_company(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Nor on the number of other keys."""
    inputs = with_bounds(make_gpu(257, 3001, heads, dim, dtype), "whole")
    whole = logits_of(inputs)
    for run in (slice(0, 1), slice(1, 2), slice(3, 8), slice(100, 257), slice(256, 257)):
        assert same_bits(logits_of(queries(inputs, run)), whole[run])
    for keys in (1, 100, 2999):
        fewer = changed(inputs, lambda tensor, keys=keys: tensor[:keys], "k", "k_scale")
        assert same_bits(logits_of(replace(fewer, ke=inputs.ke.clamp(max=keys))), whole[:, :keys])


def every_other(tensor: Tensor) -> Tensor:
    """The same numbers [N] with others between them."""
    return torch.stack([tensor, torch.full_like(tensor, 7)], 1)[:, 0]


@both_dtypes
@pytest.mark.parametrize("seq", [65, 2])
def test_views(seq: int, dtype: torch.dtype) -> None:
    inputs = make_gpu(seq, 257, dtype=dtype)
    strided = changed(changed(inputs, every_other, "ks", "ke", "k_scale"), strided_rows, "k", "weights")
    transposed = changed(strided, partial(strided_copy, swap_leading=True), "q")
    everything = ("q", "k", "weights", "ks", "ke", "k_scale")
    last = changed(inputs, lambda tensor: tensor[-1:].expand_as(tensor), *everything)
    for view in (changed(strided, strided_copy, "q"), transposed, last):
        dense = changed(view, torch.Tensor.contiguous, *everything)
        assert same_bits(logits_of(view), check(dense))
        check_selected(selected(view, 100), composed(dense, 100))


def shifted(rows: Tensor) -> Tensor:
    """The same rows, which start one row later in memory."""
    return torch.cat([rows[:1], rows])[1:]


@every_kernel
def test_few_queries(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Up to six, and a few more, have the logits that they have among 64 queries."""
    sizes = (1, 63, 66, 1001, 40003)
    for (s_kv, kind), seq in zip(itertools.product(sizes, BOUNDS), itertools.cycle((1, 2, 3, 4, 5, 6, 7))):
        inputs = with_bounds(make_gpu(64, s_kv, heads, dim, dtype), kind)
        for first in (9, 64 - seq):
            run = slice(first, first + seq)
            few, expected = poisoned(queries(inputs, run)), logits_of(inputs)[run]
            strided = changed(changed(few, strided_rows, "k", "weights"), every_other, "ks", "ke", "k_scale")
            for view in (few, strided, changed(few, shifted, "k", "k_scale")):
                logits, visible = logits_of(view), visible_keys(few)
                assert same_bits(logits, expected), (seq, s_kv, kind, first)
                assert same_bits(logits_of(view, clean=False)[visible], expected[visible]), (seq, s_kv, kind, first)


def far_apart(rows: Tensor) -> Tensor:
    """The same rows; the last starts more than 2^31 elements after the first, with NaN between them."""
    stride = (2**31 // (len(rows) - 1) // 128 + 1) * 128
    elements = stride * (len(rows) - 1) + rows[0].numel()
    buffer = torch.full((elements * rows.element_size(),), 255, dtype=torch.uint8, device=DEVICE).view(rows.dtype)
    return buffer.as_strided(rows.shape, (stride, *rows.stride()[1:])).copy_(rows)


@pytest.mark.gpu_memory(20)
@both_dtypes
@pytest.mark.parametrize("seq", [9, 2])
def test_rows_more_than_2_to_the_31_elements_apart(seq: int, dtype: torch.dtype) -> None:
    inputs = make_gpu(seq, 200, dtype=dtype)
    far = changed(inputs, far_apart, "q", "k", "weights")
    assert same_bits(logits_of(far), check(inputs))
    check_selected(selected(far, 50), composed(inputs, 50))


@pytest.mark.gpu_memory(12)
def test_more_than_2_to_the_31_logits() -> None:
    inputs = make_gpu(16400, 2**17 + 64, heads=8, dim=64)
    logits = logits_of(inputs)
    assert logits.numel() > 2**31
    for run in (slice(3), slice(8200, 8203), slice(16397, 16400)):
        logits_errors(logits[run], *tensors(queries(inputs, run)), inputs.k_scale).check()


@both_dtypes
def test_many_blocks_of_queries(dtype: torch.dtype) -> None:
    """Threads count the work of five or nine blocks each, of which some see no key."""
    inputs = with_bounds(make_gpu(20805, 70, dtype=dtype), "random")
    inputs.ke[4000:9000] = 0
    check(poisoned(inputs))


def test_units_of_work_that_32_bits_do_not_count() -> None:
    """Of queries that share memory."""
    inputs = make_gpu(1, 3, dtype=BF16)
    many = changed(inputs, lambda tensor: tensor.expand(1_720_000_000, *tensor.shape[1:]), "q", "weights", "ks", "ke")
    with pytest.raises(RuntimeError, match=r"q and k must make fewer than 2\^31 units of work .* got 2150"):
        logits_of(many)


@both_dtypes
@pytest.mark.parametrize("sizes", [(3, 40000), (300, 5000)], ids=str)
def test_repeats_are_bitwise_equal(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make_gpu(*sizes, dtype=dtype)
    logits, best = logits_of(inputs), selected(inputs, 2048)
    for _ in range(25):
        assert same_bits(logits_of(inputs), logits)
        check_selected(selected(inputs, 2048), best)


@both_dtypes
@pytest.mark.parametrize("sizes", [(0, 0), (0, 7), (7, 0)], ids=str)
def test_empty_tensors(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make_gpu(*sizes, dtype=dtype)
    assert logits_of(inputs).shape == sizes
    indices, values = selected(inputs, 3)
    assert indices.shape == values.shape == (sizes[0], 3)
    assert (indices == -1).all()
    assert (values == -math.inf).all()


def test_side_stream() -> None:
    """Keys that are written late on a side stream: a kernel on any other stream would read zeros."""
    inputs = make_gpu(64, 9000)
    expected, best = logits_of(inputs), selected(inputs, 2048)

    def call(k: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        late = replace(inputs, k=k)
        return logits_of(late), selected(late, 2048)

    logits, results = written_late(inputs.k, call)
    assert same_bits(logits, expected)
    check_selected(results, best)


@pytest.mark.parametrize("seq", [1, 40])
def test_calls_whose_inputs_are_written_just_before(seq: int) -> None:
    """Kernels that start before the preceding one is complete must not read yet."""
    inputs = make_gpu(seq, 40000)
    weights, changing = (inputs.weights, -inputs.weights), inputs.weights.clone()
    expected = [(logits_of(i), *selected(i, 2048)) for i in (replace(inputs, weights=w) for w in weights)]
    same = replace(inputs, weights=changing)
    torch.cuda.synchronize()
    for i in range(40):
        changing.copy_(weights[i % 2])
        best = selected(same, 2048)
        logits = logits_of(same)
        changing.zero_()
        assert same_bits(logits, expected[i % 2][0])
        check_selected(best, expected[i % 2][1:])


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.inputs import make_indexer_inputs
calls = [
    make_indexer_inputs(seq, s_kv, heads, dtype=dtype, device="cuda")
    for seq, s_kv, heads, dtype in (
        (1, 40000, 64, torch.float8_e4m3fn),
        (4, 9001, 32, torch.float8_e4m3fn),
        (300, 5000, 32, torch.float8_e4m3fn),
        (70, 9000, 16, torch.bfloat16),
    )
]
def run(i):
    logits = torch.ops.dsa.indexer_logits(i.q, i.k, i.weights, i.ks, i.ke, i.k_scale)
    return logits, *torch.ops.dsa.indexer_topk(i.q, i.k, i.weights, i.ks, i.ke, 2048, i.k_scale)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [run(i) for i in calls]
for i in calls:
    i.weights.neg_()
    i.ke.sub_(1)
for _ in range(3):
    graph.replay()
for results, i in zip(captured, calls):
    assert all(torch.equal(a, b) for a, b in zip(results, run(i)))
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


@both_dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    """test_schema compares arguments with torch.allclose, which has no fp8."""
    inputs = make_gpu(5, 33, 8, 64, dtype)
    leaves = tensors(inputs) if dtype == FP8 else [t.requires_grad_(t.is_floating_point()) for t in tensors(inputs)]
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests += ["test_schema"] if dtype == BF16 else []
    torch.library.opcheck(LOGITS, (*leaves, inputs.k_scale), test_utils=tests)
    torch.library.opcheck(TOPK, (*leaves, 9, inputs.k_scale), test_utils=tests)


def test_gradients() -> None:
    """Against float64 on the CPU; gradients outside of the bounds have no effect."""
    inputs = with_bounds(make_gpu(130, 301, 16, dtype=BF16), "packed")
    dlogits = torch.randn(130, 301, device=DEVICE).masked_fill(~visible_keys(inputs), math.nan)
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.weights)]
    got = torch.autograd.grad(dsa_ext.indexer_logits(*tensors(inputs)), leaves, dlogits)
    exact = [tensor.detach().double().cpu() for tensor in (dlogits, *leaves)]
    expected = reference.indexer_logits_bwd(*exact, inputs.ks.cpu(), inputs.ke.cpu())
    for name, leaf, a, b in zip(("dq", "dk", "dweights"), leaves, got, expected, strict=True):
        assert (a.dtype, a.device) == (leaf.dtype, leaf.device)
        error = similarity_error(a.cpu(), b)
        assert error <= SIMILARITY, (name, error)


def gradients(function: Callable[[IndexerInputs], Tensor], seq: int) -> list[Tensor]:
    inputs = make_gpu(seq, seq + 16, 8, 64, BF16)
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.weights)]
    result = function(inputs)
    return [result.detach(), *torch.autograd.grad(result, leaves)]


@pytest.mark.parametrize("options", [{"dynamic": True}, {"mode": "reduce-overhead"}], ids=str)
def test_compile(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, **options)
    for seq in (4, 8, 12) if options.get("dynamic") else (4, 4, 4):
        torch.compiler.cudagraph_mark_step_begin()
        got = [tensor.clone() for tensor in gradients(compiled, seq)]
        expected = gradients(loss, seq)
        assert max(similarity_error(a, b) for a, b in zip(got, expected, strict=True)) <= 1e-6


@errors_of("indexer_logits")
def test_errors_are_those_of_the_cpu(op: str, changes: dict[str, Any], text: str) -> None:
    assert message(op, on_device(arguments(op, **changes))) == f"dsa::{op}: {text}"


@pytest.mark.parametrize("op", ["indexer_logits"])
def test_a_mix_of_devices(op: str) -> None:
    check_a_mix_of_devices(op)


@pytest.mark.parametrize("op", ["indexer_logits"])
def test_rows_that_no_kernel_takes(op: str) -> None:
    check_rows_that_no_kernel_takes(op, "q", "k", "weights")
