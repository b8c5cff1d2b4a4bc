"""The kernels of indexer_logits and indexer_topk against the reference, and their other promises.

Logits are compared with the reference in float64 on the same GPU; indexer_topk is the composition of the other two
operators, bit for bit.
"""

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from test_indexer_op import ERRORS, OPS, arguments, loss
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import (
    INT32_MAX,
    INT32_MIN,
    IndexerInputs,
    make_indexer_inputs,
    strided_copy,
    strided_rows,
)
from dsa_ext.testing.memory import bytes_beside_results
from dsa_ext.testing.tolerances import (
    SIMILARITY,
    bits,
    check_selected,
    logits_errors,
    similarity_error,
)

pytestmark = pytest.mark.gpu

LOGITS = torch.ops.dsa.indexer_logits.default
SELECT = torch.ops.dsa.topk_select.default
TOPK = torch.ops.dsa.indexer_topk.default
DEVICE = "cuda"
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
both_dtypes = pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
every_kernel = pytest.mark.parametrize(
    ("dtype", "heads", "dim"), list(itertools.product([FP8, BF16], [8, 16, 32, 64], [64, 128])), ids=str
)
#: Bytes that indexer_topk may take beside as much as its results.
WORKSPACE_LIMIT = 256 * 2**20


def make_gpu(seq: int, s_kv: int, heads: int = 64, dim: int = 128, dtype: torch.dtype = FP8) -> IndexerInputs:
    return make_indexer_inputs(seq, s_kv, heads, dim, dtype=dtype, device=DEVICE)


def tensors(inputs: IndexerInputs) -> tuple[Tensor, ...]:
    return inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke


def logits_of(inputs: IndexerInputs, clean: bool = True) -> Tensor:
    result: Tensor = LOGITS(*tensors(inputs), inputs.k_scale, clean)
    return result


def selected(inputs: IndexerInputs, topk: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = TOPK(*tensors(inputs), topk, inputs.k_scale)
    return result


def composed(inputs: IndexerInputs, topk: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = SELECT(logits_of(inputs), inputs.ks, inputs.ke, topk)
    return result


def check(inputs: IndexerInputs) -> Tensor:
    logits = logits_of(inputs)
    logits_errors(logits, *tensors(inputs), inputs.k_scale).check()
    return logits


def visible_keys(inputs: IndexerInputs) -> Tensor:
    return reference.indexer.inside(inputs.ks, inputs.ke, len(inputs.k))


def changed(inputs: IndexerInputs, change: Callable[[Tensor], Tensor], *names: str) -> IndexerInputs:
    """`change` of the named tensors, as far as they are there."""
    named = {name: getattr(inputs, name) for name in names}
    return replace(inputs, **{name: change(tensor) for name, tensor in named.items() if tensor is not None})


def queries(inputs: IndexerInputs, run: slice) -> IndexerInputs:
    return changed(inputs, lambda tensor: tensor[run], "q", "weights", "ks", "ke")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


SIZES = (1, 5, 63, 64, 65, 130, 257, 1000, 4099)
BOUNDS = ("causal", "whole", "random", "packed", "few", "edges")


def with_bounds(inputs: IndexerInputs, kind: str) -> IndexerInputs:
    seq, s_kv = len(inputs.q), len(inputs.k)
    generator = torch.Generator(DEVICE).manual_seed(seq)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (seq,), generator=generator, dtype=torch.int32, device=DEVICE)

    position = torch.arange(seq, dtype=torch.int32, device=DEVICE) * s_kv // seq
    first = integers(0, s_kv)
    edges = (INT32_MIN, INT32_MIN + 1, -1, 0, 1, 63, 65, s_kv - 1, s_kv, s_kv + 1, INT32_MAX)
    pairs = list(itertools.islice(itertools.cycle(itertools.product(edges, edges)), seq))
    ks, ke = {
        "causal": (inputs.ks, inputs.ke),
        "whole": (torch.zeros_like(first), torch.full_like(first, s_kv)),
        "random": (integers(-3, s_kv + 4), integers(-3, s_kv + 4)),  # half of them inverted
        "packed": (position // 100 * 100, position + 1),
        "few": (first, first + integers(0, 4)),
        "edges": torch.tensor(pairs, dtype=torch.int32, device=DEVICE).unbind(1),
    }[kind]
    return replace(inputs, ks=ks, ke=ke)


def poisoned(inputs: IndexerInputs) -> IndexerInputs:
    """NaN in keys that no query sees, and in queries that see none."""
    visible = visible_keys(inputs)

    def spoil(where: Tensor, tensor: Tensor) -> Tensor:
        mask = where.view(-1, *(1,) * (tensor.dim() - 1))
        return tensor.float().masked_fill(mask, math.nan).to(tensor.dtype)

    inputs = changed(inputs, partial(spoil, ~visible.any(1)), "q", "weights")
    return changed(inputs, partial(spoil, ~visible.any(0)), "k", "k_scale")


@every_kernel
def test_logits(dtype: torch.dtype, heads: int, dim: int) -> None:
    """All sizes with each other over the kernels, and whether what is outside of the bounds is written or not."""
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


#: One element of each tensor, of the query 70 or of the key 200.
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
    """Nor on how many keys there are beside."""
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
def test_views(dtype: torch.dtype) -> None:
    inputs = make_gpu(65, 257, dtype=dtype)
    strided = changed(changed(inputs, every_other, "ks", "ke", "k_scale"), strided_rows, "k", "weights")
    transposed = changed(strided, partial(strided_copy, swap_leading=True), "q")
    everything = ("q", "k", "weights", "ks", "ke", "k_scale")
    last = changed(inputs, lambda tensor: tensor[-1:].expand_as(tensor), *everything)
    for view in (changed(strided, strided_copy, "q"), transposed, last):
        dense = changed(view, torch.Tensor.contiguous, *everything)
        assert same_bits(logits_of(view), check(dense))
        check_selected(selected(view, 100), composed(dense, 100))


def far_apart(rows: Tensor) -> Tensor:
    """The same rows; the last begins more than 2^31 elements after the first. NaN stands between them."""
    stride = (2**31 // (len(rows) - 1) // 128 + 1) * 128
    elements = stride * (len(rows) - 1) + rows[0].numel()
    buffer = torch.full((elements * rows.element_size(),), 255, dtype=torch.uint8, device=DEVICE).view(rows.dtype)
    return buffer.as_strided(rows.shape, (stride, *rows.stride()[1:])).copy_(rows)


@pytest.mark.gpu_memory(20)
@both_dtypes
def test_rows_more_than_2_to_the_31_elements_apart(dtype: torch.dtype) -> None:
    inputs = make_gpu(9, 200, dtype=dtype)
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
@pytest.mark.parametrize("sizes", [(3, 40000), (300, 5000)], ids=str)
def test_repeats_are_bitwise_equal(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = make_gpu(*sizes, dtype=dtype)
    logits, best = logits_of(inputs), selected(inputs, 2048)
    for _ in range(25):
        assert same_bits(logits_of(inputs), logits)
        check_selected(selected(inputs, 2048), best)


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
    assert bytes_beside_results(lambda: selected(inputs, 2048)) <= WORKSPACE_LIMIT


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
    """Keys that are written late on a side stream: an operator on any other stream would read zeros."""
    inputs = make_gpu(64, 9000)
    expected, best = logits_of(inputs), selected(inputs, 2048)
    late = replace(inputs, k=torch.zeros_like(inputs.k))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.k.copy_(inputs.k)
        logits, results = logits_of(late), selected(late, 2048)
    stream.synchronize()
    assert same_bits(logits, expected)
    check_selected(results, best)


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.inputs import make_indexer_inputs
calls = [
    make_indexer_inputs(seq, s_kv, heads, dtype=dtype, device="cuda")
    for seq, s_kv, heads, dtype in (
        (1, 40000, 64, torch.float8_e4m3fn),
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
    done = subprocess.run([sys.executable, "-c", GRAPH_SCRIPT], capture_output=True, text=True)
    assert done.stdout.strip() == "captured", done.stderr


@both_dtypes
def test_opcheck(dtype: torch.dtype) -> None:
    """test_schema looks for changed arguments with torch.allclose, which does not know fp8."""
    inputs = make_gpu(5, 33, 8, 64, dtype)
    leaves = tensors(inputs) if dtype == FP8 else [t.requires_grad_(t.is_floating_point()) for t in tensors(inputs)]
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    tests += ["test_schema"] if dtype == BF16 else []
    torch.library.opcheck(LOGITS, (*leaves, inputs.k_scale), test_utils=tests)
    torch.library.opcheck(TOPK, (*leaves, 9, inputs.k_scale), test_utils=tests)


def test_gradients() -> None:
    """Against float64 on the CPU; what arrives outside of the bounds has no effect."""
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


def on_device(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in args.items()}


def message(op: str, args: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.dsa, op)(**args)
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize(("op", "changes", "text"), ERRORS, ids=[f"{op}: {text}" for op, _, text in ERRORS])
def test_errors_are_those_of_the_cpu(op: str, changes: dict[str, Any], text: str) -> None:
    assert message(op, on_device(arguments(op, **changes))) == f"dsa::{op}: {text}"


@pytest.mark.parametrize("op", OPS)
def test_a_mix_of_devices(op: str) -> None:
    args = on_device(arguments(op))
    first, *others = (name for name, value in args.items() if isinstance(value, Tensor))
    for name in others:
        text = message(op, {**args, name: args[name].cpu()})
        assert text == f"dsa::{op}: {name} must be on the device of {first}, cuda:0, got cpu"


def misplaced(tensor: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Views of its shape that no kernel takes, and what is said of them. topk_select takes all but the first."""
    *leading, rows, columns = tensor.shape
    size = tensor.element_size()
    yield tensor.new_empty(*leading, columns, rows).mT, f"must have stride 1 in its last dimension, got stride {rows}"
    wide = tensor.new_empty(*leading, rows, columns + 1)[..., :columns]
    multiples = f"must have rows that start 16-byte aligned: strides in multiples of {16 // size} elements"
    yield wide, f"{multiples}, got stride {wide.stride(0)} in dimension 0"
    late = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    yield late, f"must start 16-byte aligned, got an address that is {size} bytes past a multiple of 16"


@pytest.mark.parametrize("op", OPS)
def test_rows_that_no_kernel_takes(op: str) -> None:
    args = on_device(arguments(op))
    for name in ("logits",) if op == "topk_select" else ("q", "k", "weights"):
        views = list(misplaced(args[name]))
        for view, text in views[:1] if op == "topk_select" else views:
            assert message(op, {**args, name: view}) == f"dsa::{op}: {name} {text}"
