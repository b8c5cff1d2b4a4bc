"""sparse_mla_bwd of few heads, where the lists of neighboring queries are merged if they overlap: against the reference
in float64 on the same GPU, and against deterministic calls, which merge nothing."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_ext.testing.inputs import INT32_MAX, Inputs, drift_indices, make_inputs, random_indices, spoil_indices
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import backward_errors, similarity_error

pytestmark = pytest.mark.gpu

FWD = torch.ops.dsa.sparse_mla_fwd.default
OP = torch.ops.dsa.sparse_mla_bwd.default
DEVICE = "cuda"
#: Just enough slots for lists to be merged; the queries are no multiple of any run's.
QUERIES, SLOTS, KEYS = 515, 520, 3000
HEADS = [1, 2, 5, 8, 9, 16, 17, 32]


def normal(like: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def lists(kind: str, shape: tuple[int, int, int, int], s_kv: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(3)
    indices = drift_indices(shape, s_kv, generator)
    seq, topk = shape[1], shape[3]
    match kind:
        case "random":
            return random_indices(shape, s_kv, generator)
        case "unsorted":
            return indices[..., torch.randperm(topk, generator=generator, device=DEVICE)].contiguous()
        case "repeated":
            indices[:, ::5, :, 1] = indices[:, ::5, :, 0]
        case "padded":
            indices = spoil_indices(indices, s_kv)
            indices[..., -1] = -1  # which repeats an id
        case "empty":
            indices[:, ::3] = -1
            indices[:, 100:140] = INT32_MAX
        case "one key":
            indices[..., 1:] = -1
        case "the same":
            indices[:] = indices[:, :1].clone()
        case "mixed":  # lists of every other 16 queries repeat a key and are not merged
            others = torch.arange(seq, device=DEVICE) // 16 % 2 == 1
            indices[:, others, :, -1] = indices[:, others, :, 0]
    return indices


def inputs_of(kind: str, heads: int, groups: int = 1, batch: int = 1, d_qk: int = 576, s_kv: int = KEYS) -> Inputs:
    inputs = make_inputs(batch, QUERIES, s_kv, heads * groups, groups, 1, d_qk, device=DEVICE)
    inputs.indices = lists(kind, (batch, QUERIES, groups, SLOTS), s_kv)
    return inputs


def gradients(inputs: Inputs, dout: Tensor | None = None, dlse: Tensor | None = None, **options: Any) -> Any:
    deterministic = options.pop("deterministic", False)
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, **options)
    dout = normal(out) if dout is None else dout
    args = (dout, inputs.q, inputs.kv, out, lse, inputs.indices)
    return OP(*args, **options, dlse=dlse, deterministic=deterministic)


def check(inputs: Inputs, *, with_dlse: bool = False, **options: Any) -> None:
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, **options)
    dout, dlse = normal(out), normal(lse, 2) if with_dlse else None
    args = (dout, inputs.q, inputs.kv, out, lse, inputs.indices)
    got = OP(*args, **options, dlse=dlse)
    backward_errors(got, *args, dlse, **options).check()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["drift", "unsorted", "repeated", "padded", "empty", "one key", "the same", "mixed"])
def test_lists_of_every_kind(kind: str, heads: int) -> None:
    check(inputs_of(kind, heads, d_qk=512 if heads in (2, 9, 32) else 576), causal=False)


@pytest.mark.parametrize("heads", HEADS)
def test_random_lists(heads: int) -> None:
    check(inputs_of("random", heads, s_kv=16000), causal=False)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal from a position": {"causal": True, "q_start": KEYS - 300},
    "keys of several positions": {"causal": True, "q_start": 2 * KEYS, "positions_per_key": 4},
    "a scale": {"causal": False, "sm_scale": -0.03},
}


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("heads", [5, 16, 32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_options(options: dict[str, Any], heads: int, d_qk: int) -> None:
    check(inputs_of("mixed", heads, d_qk=d_qk), **options, with_dlse=True)


@pytest.mark.parametrize("heads", [3, 8, 16, 31])
def test_lengths_bounds_and_sinks(heads: int) -> None:
    """Packed sequences, one of which begins in the middle of a run."""
    inputs = inputs_of("drift", heads)
    shape = (1, QUERIES)
    generator = torch.Generator(DEVICE).manual_seed(5)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE, dtype=torch.int32)

    starts = torch.where(torch.arange(QUERIES, device=DEVICE) < 101, 0, KEYS // 2).int()[None]
    ends = torch.where(starts == 0, KEYS // 2, KEYS + 7).int()
    sink = torch.linspace(-3, 3, heads, device=DEVICE)
    lengths = integers(-1, SLOTS + 3)
    check(inputs, starts=starts, ends=ends, attn_sink=sink, with_dlse=True)
    check(inputs, starts=integers(-5, KEYS), ends=integers(0, KEYS + 5), causal=False)
    check(inputs, topk_length=lengths, attn_sink=sink, causal=False)


@pytest.mark.parametrize(("heads", "groups", "batch"), [(4, 2, 1), (16, 3, 2), (32, 1, 3), (8, 4, 2)])
def test_groups_and_batches(heads: int, groups: int, batch: int) -> None:
    check(inputs_of("mixed", heads, groups, batch), causal=False)


def test_views() -> None:
    """Slices of wider rows, and gradients that are expanded from one number."""
    inputs = inputs_of("drift", 16)
    expected = gradients(inputs, causal=False)
    wide = {name: torch.cat([tensor, tensor.flip(-1)], -1) for name, tensor in (("q", inputs.q), ("kv", inputs.kv))}
    views = Inputs(wide["q"][..., :576], wide["kv"][..., :576], torch.cat([inputs.indices] * 2, -1)[..., :SLOTS])
    assert torch.equal(gradients(views, causal=False)[0], expected[0])
    dout = torch.full((1, 1, 1, 1), 0.5, dtype=torch.bfloat16, device=DEVICE).expand(1, QUERIES, 16, 512)
    got = gradients(inputs, dout, causal=False)
    assert torch.equal(got[0], gradients(inputs, dout.contiguous(), causal=False)[0])


def errors_beside_deterministic(inputs: Inputs, **options: Any) -> list[float]:
    ours = gradients(inputs, causal=False, **options)
    expected = gradients(inputs, causal=False, deterministic=True, **options)
    return [similarity_error(a, b) for a, b in zip(ours[:2], expected[:2], strict=True)]


@pytest.mark.parametrize("heads", [2, 16, 32])
def test_more_keys_than_a_window(heads: int) -> None:
    """Lists are merged in windows of 40 to 160 thousand keys."""
    s_kv = 200_000
    inputs = make_inputs(1, 2051, s_kv, heads, 1, 1, device=DEVICE)
    inputs.indices = drift_indices((1, 2051, 1, 1600), s_kv, torch.Generator(DEVICE).manual_seed(1))
    assert max(errors_beside_deterministic(inputs)) <= 3e-5


@pytest.mark.gpu_memory(16)
def test_more_entries_than_one_launch_takes() -> None:
    inputs = make_inputs(1, 50_001, 8192, 2, 1, 1, device=DEVICE)
    inputs.indices = drift_indices((1, 50_001, 1, 2048), 8192, torch.Generator(DEVICE).manual_seed(1))
    assert max(errors_beside_deterministic(inputs)) <= 3e-5
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    extra = workspace_bytes(lambda: OP(out, inputs.q, inputs.kv, out, lse, inputs.indices, causal=False))
    assert extra <= 8192 * 576 * 4 + (256 + 32) * 2**20


def spread(tensor: Tensor) -> Tensor:
    """Which queries or keys of a gradient have a number that is not finite."""
    return ~tensor.isfinite().flatten(2).all(-1)[0]


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("where", ["dout", "q", "kv", "out", "lse"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_with_its_query(where: str, heads: int, value: float) -> None:
    """As in calls that merge nothing: NaN reaches the keys that its query lists, and no other query."""
    inputs = inputs_of("drift", heads)
    key = int(inputs.indices[0, 203, 0, 50])
    elsewhere = inputs.indices == key
    elsewhere[:, 203] = False
    inputs.indices[elsewhere] = -1
    finite = {"q": inputs.q, "kv": inputs.kv}
    places = {"q": (0, 203, 0, 7), "kv": (0, key, 0, 7), "lse": (0, 203, 0)}
    for name, tensor in finite.items():
        if name == where:
            tensor[places[name]] = value
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    tensors = {"dout": normal(out), "out": out, "lse": lse}
    if where in tensors:
        tensors[where][places.get(where, (0, 203, 0, 7))] = value
    args = (tensors["dout"], inputs.q, inputs.kv, tensors["out"], tensors["lse"], inputs.indices)
    got = OP(*args, causal=False)
    expected = OP(*args, causal=False, deterministic=True)
    for ours, other in zip(got[:2], expected[:2], strict=True):
        assert torch.equal(spread(ours), spread(other))
    others = spread(got[0])
    others[203] = False
    assert not others.any()


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_large_numbers_stay_with_their_query(heads: int) -> None:
    """Scores of a query with keys of its neighbors overflow; its own do not."""
    inputs = inputs_of("drift", heads)
    inputs.q[0, 203] *= 1e19
    own = inputs.indices[0, 203, 0].long()
    others = torch.ones(KEYS, dtype=torch.bool, device=DEVICE)
    others[own] = False
    inputs.kv[0, others] *= 1e19
    got = gradients(inputs, causal=False, sm_scale=1e-19)
    expected = gradients(inputs, causal=False, sm_scale=1e-19, deterministic=True)
    for ours, other in zip(got[:2], expected[:2], strict=True):
        assert torch.equal(spread(ours), spread(other))
    assert got[0][0, 203].isfinite().all()
    assert got[1][0, own].isfinite().all()


def test_overlapping_lists_are_merged() -> None:
    """Merged, keys are summed in other tiles, so that the last bits of dq depend on the neighbors' lists."""
    heads, run = 16, 4
    inputs = inputs_of("drift", heads)
    alone = torch.arange(QUERIES, device=DEVICE) % run == 0
    merged = gradients(inputs, causal=False)[0]
    others = lists("random", (1, QUERIES, 1, SLOTS), KEYS).sort(-1).values
    others[..., -1] = others[..., 0]  # a list that repeats a key is not merged
    inputs.indices = torch.where(alone[:, None, None], inputs.indices, others)
    single = gradients(inputs, causal=False)[0]
    differing = (merged != single).flatten(2).any(-1)[0]
    assert differing[alone].float().mean() > 0.9


def test_repeated_calls_and_graphs() -> None:
    """dq is repeatable; a graph that was captured with some lists is replayed with others, merged or not."""
    inputs = inputs_of("drift", 16)
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    args = (normal(out), inputs.q, inputs.kv, out, lse, inputs.indices)
    OP(*args, causal=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = OP(*args, causal=False)
    for kind in ("drift", "mixed", "repeated", "random", "drift"):
        inputs.indices.copy_(lists(kind, (1, QUERIES, 1, SLOTS), KEYS))
        for tensor, value in zip((out, lse), FWD(inputs.q, inputs.kv, inputs.indices, causal=False), strict=True):
            tensor.copy_(value)
        graph.replay()
        first = [tensor.clone() for tensor in captured]
        for _ in range(3):
            assert torch.equal(OP(*args, causal=False)[0], first[0])
        assert similarity_error(OP(*args, causal=False)[1], first[1]) <= 7e-6


def test_deterministic_calls_repeat_bitwise() -> None:
    inputs = inputs_of("mixed", 16)
    first = gradients(inputs, causal=False, deterministic=True)
    for _ in range(5):
        again = gradients(inputs, causal=False, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
