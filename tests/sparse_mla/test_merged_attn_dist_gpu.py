"""attn_dist of few heads, where the lists of neighboring queries are merged if they overlap: against the reference in
float64 on the same GPU, and against calls of fewer queries, which merge nothing: the results are the same bits."""

from typing import Any

import pytest
import torch
from sparse_mla_gpu_inputs import DEVICE, make_bounds
from streams import written_late
from test_merged_forward_gpu import KEYS, QUERIES, SLOTS, heads_that_merge, inputs_of, inputs_of_key_0
from test_merged_lists_gpu import lists
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dsa_ext.testing.inputs import Inputs, drift_indices, make_inputs, strided_copy
from dsa_ext.testing.timing import time_ms
from dsa_ext.testing.tolerances import check_dist

pytestmark = pytest.mark.gpu
OP = torch.ops.dsa.attn_dist.default


def lse_of(inputs: Inputs) -> Tensor:
    """Not that of the lists, which need not be in them."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    return 7 + torch.randn(inputs.q.shape[:3], generator=generator, device=DEVICE)


def in_parts(inputs: Inputs, lse: Tensor, queries: int = 1000, **options: Any) -> Tensor:
    """The results of calls that are too small to merge lists."""
    parts = []
    for first in range(0, inputs.q.shape[1], queries):
        part = slice(first, first + queries)
        of_rows = {name: v[:, part] if isinstance(v, Tensor) else v for name, v in options.items()}
        if of_rows.get("causal"):
            of_rows["q_start"] = of_rows.get("q_start", 0) + first
        parts.append(OP(inputs.q[:, part], inputs.kv, inputs.indices[:, part], lse[:, part], **of_rows))
    return torch.cat(parts, -3)


def check(inputs: Inputs, **options: Any) -> Tensor:
    lse = lse_of(inputs)
    dist: Tensor = OP(inputs.q, inputs.kv, inputs.indices, lse, **options)
    check_dist(dist, inputs.q, inputs.kv, inputs.indices, lse, **options)
    assert torch.equal(dist, in_parts(inputs, lse, **options))
    assert torch.equal(dist, OP(inputs.q, inputs.kv, inputs.indices, lse, **options))
    return dist


def in_order(indices: Tensor) -> Tensor:
    """Lists with their padding behind their ids, which ascend."""
    ids = torch.where(indices < 0, KEYS, indices).sort(-1).values
    return torch.where(ids == KEYS, -1, ids)


def microseconds_of_runs(inputs: Inputs, **options: Any) -> float:
    """Time of the kernel of merged runs in a call: about one if there are none."""
    lse = lse_of(inputs)
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        OP(inputs.q, inputs.kv, inputs.indices, lse, **options)
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in events.key_averages() if "attn_dist_runs_kernel" in event.key)


@heads_that_merge
@pytest.mark.parametrize(
    "kind", ["drift", "unsorted", "random", "repeated", "padded", "empty", "one key", "the same", "mixed"]
)
def test_lists(kind: str, heads: int) -> None:
    inputs = inputs_of(kind, heads)
    check(inputs, causal=False)
    if kind in ("drift", "mixed", "the same"):
        assert microseconds_of_runs(inputs, causal=False) > 10


@heads_that_merge
@pytest.mark.parametrize(
    "name", ["causal", "bounds", "ends", "lengths", "scale", "no scale", "512 columns", "per head block", "normalized"]
)
def test_options(name: str, heads: int) -> None:
    inputs = inputs_of("drift", heads, batch=2, d_qk=512 if name == "512 columns" else 576)
    options: dict[str, Any] = {"causal": name == "causal"}
    match name:
        case "causal":
            options["q_start"] = KEYS - QUERIES // 2
        case "bounds":  # invisible ids come first in some lists, which are not merged
            options |= make_bounds(KEYS, 2, QUERIES)
        case "ends":
            ends = torch.randint(0, KEYS + 5, (2, QUERIES), generator=torch.Generator().manual_seed(4))
            options |= {"starts": torch.zeros_like(ends).int().to(DEVICE), "ends": ends.int().to(DEVICE)}
        case "lengths":
            lengths = torch.randint(-3, SLOTS + 3, (2, QUERIES), generator=torch.Generator().manual_seed(4))
            options["topk_length"] = lengths.int().to(DEVICE)
        case "scale":
            options["sm_scale"] = -0.02
        case "no scale":
            options["sm_scale"] = 0.0
        case "per head block":
            options["per_head_block"] = True
        case "normalized":
            options["normalize"] = True
    check(inputs, **options)
    assert (microseconds_of_runs(inputs, **options) > 10) == (name not in ("bounds", "normalized"))


@heads_that_merge
def test_padding_behind_lists_of_any_length(heads: int) -> None:
    """Slots behind the visible ones are cleared in any of a run's queries."""
    inputs = inputs_of("drift", heads)
    lengths = torch.arange(QUERIES, device=DEVICE) * 37 % (SLOTS + 1)
    behind = torch.arange(SLOTS, device=DEVICE) >= lengths[:, None]
    inputs.indices[behind[None, :, None]] = -1
    torch.full((1, QUERIES, 1, SLOTS), torch.nan, device=DEVICE)  # memory that a result may get
    dist = check(inputs, causal=False)
    assert (dist[behind[None, :, None]] == 0).all()


@heads_that_merge
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_with_their_queries(value: float, heads: int) -> None:
    inputs = inputs_of("drift", heads)
    lse = lse_of(inputs)
    key = int(inputs.indices[0, QUERIES // 2, 0, 7])
    expected = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    inputs.kv[0, key] = value
    inputs.q[0, 5] = value
    dist = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    torch.testing.assert_close(dist, in_parts(inputs, lse, causal=False), rtol=0, atol=0, equal_nan=True)
    elsewhere = inputs.indices != key
    elsewhere[:, 5] = False
    assert 1 < int((~elsewhere).any(-1).sum()) < QUERIES
    assert torch.equal(dist[elsewhere], expected[elsewhere])


@heads_that_merge
def test_keys_that_nobody_lists(heads: int) -> None:
    """They do not matter. Key 0 is among them, which is copied where a tile has fewer than 64 keys."""
    inputs = inputs_of("drift", heads)
    inputs.indices = in_order(torch.where(inputs.indices % 64 == 0, -1, inputs.indices))
    lse = lse_of(inputs)
    expected = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    assert microseconds_of_runs(inputs, causal=False) > 10
    inputs.kv[0, ::64] = torch.nan
    assert torch.equal(OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False), expected)


@heads_that_merge
@pytest.mark.parametrize("s_kv", [0, 1])
def test_hardly_any_keys(s_kv: int, heads: int) -> None:
    dist = check(inputs_of_key_0(s_kv, heads, 0), causal=False)
    assert (dist[..., 0] > 0).all() == (s_kv == 1)
    assert not dist[..., 1:].any()


@heads_that_merge
def test_any_layout(heads: int) -> None:
    inputs = inputs_of("drift", heads)
    lse = lse_of(inputs)
    expected = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    wide = torch.full((*inputs.indices.shape[:-1], SLOTS + 9), 7, dtype=torch.int32, device=DEVICE)
    wide[..., 4:-5] = inputs.indices
    strided_lse = torch.stack([lse, lse], -1)[..., 0]
    got = OP(strided_copy(inputs.q), strided_copy(inputs.kv), wide[..., 4:-5], strided_lse, causal=False)
    assert torch.equal(got, expected)


@heads_that_merge
def test_graph_and_side_stream(heads: int) -> None:
    inputs = inputs_of("drift", heads)
    lse = lse_of(inputs)
    expected = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    held = lists("unsorted", tuple(inputs.indices.shape), KEYS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = OP(inputs.q, inputs.kv, held, lse, causal=False)
    held.copy_(inputs.indices)
    graph.replay()
    assert torch.equal(captured, expected)
    late = written_late(inputs.indices, lambda indices: OP(inputs.q, inputs.kv, indices, lse, causal=False))
    assert torch.equal(late, expected)


@heads_that_merge
def test_more_keys_than_a_window(heads: int) -> None:
    """Lists are merged in windows of 40 and 80 thousand keys."""
    inputs = make_inputs(1, 6400, 99_999, heads, 1, 1, device=DEVICE)
    inputs.indices = drift_indices((1, 6400, 1, 1600), 99_999, torch.Generator(DEVICE).manual_seed(1))
    assert microseconds_of_runs(inputs, causal=False) > 10
    lse = lse_of(inputs)
    assert torch.equal(OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False), in_parts(inputs, lse, causal=False))


@pytest.mark.gpu_memory(16)
def test_more_entries_than_one_launch_takes() -> None:
    """A launch ends within a sequence."""
    inputs = make_inputs(3, 20_001, 8192, 8, 1, 1, device=DEVICE)
    inputs.indices = drift_indices((3, 20_001, 1, 2048), 8192, torch.Generator(DEVICE).manual_seed(1))
    lse = lse_of(inputs)
    dist = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    assert torch.equal(dist, in_parts(inputs, lse, causal=False))


@pytest.mark.timing
@heads_that_merge
def test_lists_that_drift_take_less_time(heads: int) -> None:
    inputs = make_inputs(1, 4096, 32768, heads, 1, 1, device=DEVICE)
    inputs.indices = lists("drift", (1, 4096, 1, 2048), 32768)
    lse = lse_of(inputs)
    merged = time_ms(lambda: OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False))
    shuffled = inputs.indices.flip(-1).contiguous()  # which is not merged
    plain = time_ms(lambda: OP(inputs.q, inputs.kv, shuffled, lse, causal=False))
    assert merged < {16: 0.9, 8: 0.7}[heads] * plain, f"{merged:.3f} ms, not merged {plain:.3f} ms"
