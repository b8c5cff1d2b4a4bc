"""sparse_mla_fwd of few heads, where the lists of neighboring queries are merged if they overlap: against the reference
in float64 on the same GPU, and against deterministic calls, which merge nothing."""

from typing import Any

import pytest
import torch
from sparse_mla_gpu_inputs import DEVICE, make_bounds
from streams import written_late
from test_merged_lists_gpu import lists
from torch import Tensor

import dsa_ext
from dsa_ext.testing.inputs import Inputs, drift_indices, make_inputs, strided_copy
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.timing import time_ms
from dsa_ext.testing.tolerances import forward_errors, similarity_error

pytestmark = pytest.mark.gpu
OP = torch.ops.dsa.sparse_mla_fwd.default
#: Just enough for lists to be merged; the number of queries is no multiple of a run's.
QUERIES, SLOTS, KEYS = 3203, 660, 3000
heads_that_merge = pytest.mark.parametrize("heads", [16, 8])


def inputs_of(kind: str, heads: int, batch: int = 1, d_qk: int = 576) -> Inputs:
    inputs = make_inputs(batch, QUERIES, KEYS, heads, 1, 1, d_qk, device=DEVICE)
    inputs.indices = lists(kind, (batch, QUERIES, 1, SLOTS), KEYS)
    return inputs


def check(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    args = (inputs.q, inputs.kv, inputs.indices)
    out, lse = OP(*args, **options)
    forward_errors(out, lse, *args, **options).check()
    for a, b in zip(OP(*args, **options), (out, lse), strict=True):
        assert torch.equal(a, b)
    return out, lse


def is_merged(inputs: Inputs, results: tuple[Tensor, Tensor], **options: Any) -> bool:
    plain = OP(inputs.q, inputs.kv, inputs.indices, **options, deterministic=True)
    return not torch.equal(plain[0], results[0])


@heads_that_merge
@pytest.mark.parametrize(
    "kind", ["drift", "unsorted", "random", "repeated", "padded", "empty", "one key", "the same", "mixed"]
)
def test_lists(kind: str, heads: int) -> None:
    inputs = inputs_of(kind, heads)
    results = check(inputs, causal=False)
    if kind in ("drift", "unsorted", "mixed"):
        assert is_merged(inputs, results, causal=False)


@pytest.mark.usefixtures("deterministic_algorithms")
@heads_that_merge
def test_nothing_is_merged_with_the_deterministic_switch(heads: int) -> None:
    """Then a query's results do not depend on the other queries of the call."""
    inputs = inputs_of("drift", heads)
    out, lse = dsa_ext.sparse_mla(inputs.q, inputs.kv, inputs.indices, causal=False, return_lse=True)
    some = slice(301, 501)
    part_out, part_lse = OP(inputs.q[:, some], inputs.kv, inputs.indices[:, some], causal=False)
    assert torch.equal(part_out, out[:, some])
    assert torch.equal(part_lse, lse[:, some])


@heads_that_merge
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_keys_that_nobody_lists(value: float, heads: int) -> None:
    """They do not matter, and do not keep lists from being merged."""
    inputs = inputs_of("drift", heads)
    inputs.indices[inputs.indices % 64 == 7] = -1
    expected = OP(inputs.q, inputs.kv, inputs.indices, causal=False)
    assert is_merged(inputs, expected, causal=False)
    inputs.kv[0, 7::64] = value
    for a, b in zip(OP(inputs.q, inputs.kv, inputs.indices, causal=False), expected, strict=True):
        assert torch.equal(a, b)


def inputs_of_key_0(s_kv: int, heads: int, slot: int) -> Inputs:
    """Lists with nothing but key 0, in slot `slot`."""
    inputs = make_inputs(1, QUERIES, s_kv, heads, 1, 1, device=DEVICE)
    inputs.indices = torch.full((1, QUERIES, 1, SLOTS), -1, dtype=torch.int32, device=DEVICE)
    inputs.indices[..., slot] = 0
    return inputs


@heads_that_merge
@pytest.mark.parametrize("s_kv", [0, 1])
def test_hardly_any_keys(s_kv: int, heads: int) -> None:
    lse = check(inputs_of_key_0(s_kv, heads, 3), causal=False)[1]
    assert lse.isneginf().all() == (s_kv == 0)


@heads_that_merge
def test_calls_that_return_the_largest_scores_merge_nothing(heads: int) -> None:
    inputs = inputs_of("drift", heads)
    results = torch.ops.dsa.sparse_mla_max_fwd(inputs.q, inputs.kv, inputs.indices, causal=False)
    for a, b in zip(results, OP(inputs.q, inputs.kv, inputs.indices, causal=False, deterministic=True), strict=False):
        assert torch.equal(a, b)


@heads_that_merge
def test_gradients(heads: int) -> None:
    """Of calls whose forward pass merges."""
    inputs = inputs_of("drift", heads)
    q, kv = inputs.q.requires_grad_(), inputs.kv.requires_grad_()
    dout = torch.randn(1, QUERIES, heads, 512, device=DEVICE).bfloat16()
    merged, plain = (
        torch.autograd.grad(OP(q, kv, inputs.indices, causal=False, deterministic=d)[0], (q, kv), dout)
        for d in (False, True)
    )
    for a, b in zip(merged, plain, strict=True):
        assert similarity_error(a, b) <= 3e-5


@heads_that_merge
@pytest.mark.parametrize(
    "name", ["causal", "positions_per_key", "bounds", "lengths", "sink", "no sink", "scale", "no scale", "512 columns"]
)
def test_options(name: str, heads: int) -> None:
    inputs = inputs_of("drift", heads, batch=2, d_qk=512 if name == "512 columns" else 576)
    seq = QUERIES
    options: dict[str, Any] = {"causal": name in ("causal", "positions_per_key")}
    match name:
        case "causal":
            options["q_start"] = KEYS - seq // 2
        case "positions_per_key":
            options |= {"q_start": 4 * KEYS - seq // 2, "positions_per_key": 4}
        case "bounds":
            options |= make_bounds(KEYS, 2, seq)
        case "lengths":
            lengths = torch.randint(-3, SLOTS + 3, (2, seq), generator=torch.Generator().manual_seed(4))
            options["topk_length"] = lengths.int().to(DEVICE)
        case "sink":
            options["attn_sink"] = torch.linspace(-3, 3, heads, device=DEVICE)
        case "no sink":
            options["attn_sink"] = torch.linspace(-3, 3, heads, device=DEVICE)
            options["attn_sink"][::2], options["attn_sink"][1] = -torch.inf, torch.inf
        case "scale":
            options["sm_scale"] = -0.3
        case "no scale":
            options["sm_scale"] = -0.0
    results = check(inputs, **options)
    assert is_merged(inputs, results, **options) or name == "no scale"  # all weights are 1 then


@heads_that_merge
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_with_their_queries(value: float, heads: int) -> None:
    """In a key of the second sequence that some queries list, also in a column that all queries multiply by 0, and in a
    query."""
    inputs = inputs_of("drift", heads, batch=2)
    inputs.q[..., 100] = 0
    expected = OP(inputs.q, inputs.kv, inputs.indices, causal=False)[0]
    key = int(inputs.indices[1, QUERIES // 2, 0, -1])
    inputs.kv[1, key, 0, 100] = value
    inputs.q[0, 5] = value
    out = OP(inputs.q, inputs.kv, inputs.indices, causal=False)[0]
    spoiled = (inputs.indices == key).any(-1).squeeze(-1)
    spoiled[0] = False
    assert 1 < int(spoiled.sum()) < QUERIES
    spoiled[0, 5] = True
    assert not out[spoiled].isfinite().all((1, 2)).any()
    torch.testing.assert_close(out[~spoiled], expected[~spoiled], rtol=2**-6, atol=2**-8)


@heads_that_merge
def test_no_key_is_finite(heads: int) -> None:
    inputs = inputs_of("drift", heads)
    inputs.kv[:] = torch.nan
    out, lse = OP(inputs.q, inputs.kv, inputs.indices, causal=False)
    assert out.isnan().all()
    assert lse.isnan().all()


@heads_that_merge
def test_large_numbers_stay_with_their_query(heads: int) -> None:
    """Scores of a query with keys of its neighbors overflow, or their values exceed its own by far; its own do not."""
    inputs = inputs_of("drift", heads)
    others = torch.ones(KEYS, dtype=torch.bool, device=DEVICE)
    others[inputs.indices[0, 203, 0].long()] = False
    for factor, sm_scale in ((1e19, 1e-19), (1e35, 1e-35)):
        kv, q = inputs.kv.clone(), inputs.q.clone()
        kv[0, others] *= factor
        q[0, 203] *= factor if sm_scale == 1e-19 else 1
        args = (q, kv, inputs.indices)
        out, lse = OP(*args, causal=False, sm_scale=sm_scale)
        expected, expected_lse = OP(*args, causal=False, sm_scale=sm_scale, deterministic=True)
        torch.testing.assert_close(lse[0, 203], expected_lse[0, 203], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[0, 203], expected[0, 203], rtol=2**-6, atol=2**-8)
        assert expected[0, 203].isfinite().all()


@pytest.mark.gpu_memory(16)
def test_more_entries_than_one_launch_takes() -> None:
    """A launch ends within a sequence, whose later runs list a key that is not finite."""
    inputs = make_inputs(3, 20_001, 8192, 8, 1, 1, device=DEVICE)
    inputs.indices = drift_indices((3, 20_001, 1, 2048), 8192, torch.Generator(DEVICE).manual_seed(1))
    key = int(inputs.indices[2, 19_000, 0, 1000])
    inputs.kv[2, key, 0, 570] = torch.nan
    out, lse = OP(inputs.q, inputs.kv, inputs.indices, causal=False)
    expected, expected_lse = OP(inputs.q, inputs.kv, inputs.indices, causal=False, deterministic=True)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-8, equal_nan=True)
    assert 1 < int(lse.isnan().any(-1).sum()) < 20_001
    extra = workspace_bytes(lambda: OP(inputs.q, inputs.kv, inputs.indices, causal=False))
    assert 200 * 2**20 <= extra <= 258 * 2**20


@heads_that_merge
def test_any_layout(heads: int) -> None:
    inputs = inputs_of("drift", heads)
    expected = OP(inputs.q, inputs.kv, inputs.indices, causal=False)
    wide = torch.full((*inputs.indices.shape[:-1], SLOTS + 9), 7, dtype=torch.int32, device=DEVICE)
    wide[..., 4:-5] = inputs.indices
    got = OP(strided_copy(inputs.q), strided_copy(inputs.kv), wide[..., 4:-5], causal=False)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@heads_that_merge
def test_graph_and_side_stream(heads: int) -> None:
    inputs = inputs_of("drift", heads)
    expected = OP(inputs.q, inputs.kv, inputs.indices, causal=False)
    held = lists("random", tuple(inputs.indices.shape), KEYS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = OP(inputs.q, inputs.kv, held, causal=False)
    held.copy_(inputs.indices)
    graph.replay()
    late = written_late(inputs.indices, lambda indices: OP(inputs.q, inputs.kv, indices, causal=False))
    for results in (captured, late):
        for a, b in zip(results, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.timing
@heads_that_merge
def test_lists_that_drift_take_less_time(heads: int) -> None:
    inputs = make_inputs(1, 4096, 32768, heads, 1, 1, device=DEVICE)
    inputs.indices = lists("drift", (1, 4096, 1, 2048), 32768)
    merged = time_ms(lambda: OP(inputs.q, inputs.kv, inputs.indices, causal=False))
    plain = time_ms(lambda: OP(inputs.q, inputs.kv, inputs.indices, causal=False, deterministic=True))
    assert merged < {16: 0.95, 8: 0.75}[heads] * plain, f"{merged:.3f} ms, not merged {plain:.3f} ms"
