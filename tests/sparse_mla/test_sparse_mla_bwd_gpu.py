"""The kernels of sparse_mla_bwd against the reference in float64 on the same GPU, and their other promises."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bwd_gpu import DEVICE, FWD, OP, both_modes, check, normal
from streams import check_script, written_late
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_inputs, poison_unselected, spoil_indices, strided_copy
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.timing import time_ms

pytestmark = pytest.mark.gpu

AXES: dict[str, list[Any]] = {
    "d_qk": [576, 512],
    "groups_and_heads": [
        *((1, heads) for heads in (1, 2, 8, 15, 17, 31, 33, 63, 64, 65, 127, 128)),
        *((2, heads) for heads in (34, 256)),
        (4, 260),
    ],
    "topk": [1, 5, 63, 64, 65, 130, 700],
    "seq": [1, 2, 7, 33, 140],
    "s_kv": [1, 5, 64, 1000, 9000, 30000],
    "batch": [1, 2],
    "position": [(False, 0, 1), (True, 0, 1), (True, 900, 1), (True, 5000, 4)],
    "lengths": [False, True],
    "bounds": [False, True],
    "sink": [False, True],
    "sm_scale": [None, 0.05, -0.04, 0.0],
    "spoiled": [False, True],
    "dlse": [False, True],
    "deterministic": [False, True],
    "dist": [False, True],
}


def combinations() -> Iterator[dict[str, Any]]:
    """Seeded random combinations of bounded work, in which each value of each axis occurs several times."""
    generator = random.Random(0)
    columns = {name: list(itertools.islice(itertools.cycle(values), 48)) for name, values in AXES.items()}
    for values in columns.values():
        generator.shuffle(values)
    for row in zip(*columns.values(), strict=True):
        case = dict(zip(columns, row, strict=True))
        heads = case["groups_and_heads"][1]
        while case["batch"] * case["seq"] * heads * case["topk"] > 2**21 and case["seq"] > 1:
            case["seq"] //= 2
        yield case


@pytest.mark.parametrize("case", list(combinations()), ids=lambda case: "-".join(map(str, case.values())))
def test_random_cases(case: dict[str, Any]) -> None:
    (groups, heads), (causal, q_start, positions_per_key) = case["groups_and_heads"], case["position"]
    batch, seq, s_kv, topk = (case[name] for name in ("batch", "seq", "s_kv", "topk"))
    inputs = make_inputs(batch, seq, s_kv, heads, groups, topk, case["d_qk"], device=DEVICE)
    indices = spoil_indices(inputs.indices, s_kv) if case["spoiled"] else inputs.indices
    options: dict[str, Any] = {"causal": causal, "q_start": q_start, "positions_per_key": positions_per_key}
    options["sm_scale"] = case["sm_scale"]
    if case["lengths"]:
        options["topk_length"] = torch.randint(-1, topk + 3, (batch, seq), dtype=torch.int32, device=DEVICE)
    if case["sink"]:
        options["attn_sink"] = torch.linspace(-3, 3, heads, device=DEVICE)
    modes = {"deterministic": case["deterministic"], "return_dist": case["dist"]}
    check(inputs.q, inputs.kv, indices, with_dlse=case["dlse"], **modes, **options)


@both_modes
def test_many_queries_share_keys(deterministic: bool) -> None:
    """Sums of a thousand terms, from CTAs in several waves."""
    inputs = make_inputs(1, 700, 15000, 64, 1, 256, device=DEVICE)
    near = (inputs.indices % 300).sort(-1).values
    check(inputs.q, inputs.kv, near, causal=False, deterministic=deterministic)


@both_modes
def test_nothing_visible(deterministic: bool) -> None:
    inputs = make_inputs(2, 5, 40, 32, 1, 70, device=DEVICE)
    for ids in (-1, INT32_MIN, INT32_MAX, 40):
        padding = torch.full_like(inputs.indices, ids)
        out, lse = FWD(inputs.q, inputs.kv, padding)
        grads = OP(out, inputs.q, inputs.kv, out, lse, padding, dlse=normal(lse), deterministic=deterministic)
        assert all((grad == 0).all() for grad in grads)


@both_modes
@pytest.mark.parametrize("sizes", [(0, 3, 4, 9), (1, 0, 4, 9), (1, 3, 4, 0), (2, 3, 0, 9)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int, int], deterministic: bool) -> None:
    batch, seq, heads, s_kv = sizes
    inputs = make_inputs(batch, seq, s_kv, heads, 1, 3, device=DEVICE)
    sink = torch.zeros(heads, device=DEVICE)
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, attn_sink=sink)
    *grads, dist = OP(out, inputs.q, inputs.kv, out, lse, inputs.indices, attn_sink=sink, deterministic=deterministic)
    assert [grad.shape for grad in grads] == [inputs.q.shape, inputs.kv.shape, sink.shape]
    assert dist.shape == (0,)
    assert all((grad == 0).all() for grad in grads)


@both_modes
def test_keys_that_nobody_selected(deterministic: bool) -> None:
    """NaN and Inf in unselected rows have no effect, and their gradient is exactly 0."""
    inputs = make_inputs(2, 9, 500, 128, 1, 30, device=DEVICE)
    indices = spoil_indices(inputs.indices, 500)
    visible = reference.sparse_mla.visible_slots(indices, 500, False, 0, 1, None)
    poisoned = poison_unselected(inputs.kv, indices, visible)
    out, lse = FWD(inputs.q, poisoned, indices, causal=False)
    dq, dkv, *_ = OP(normal(out), inputs.q, poisoned, out, lse, indices, causal=False, deterministic=deterministic)
    assert dq.isfinite().all()
    assert dkv.isfinite().all()
    assert (dkv[poisoned.isnan() | poisoned.isinf()] == 0).all()
    assert (dkv[poisoned.isfinite()] != 0).any()


@both_modes
@pytest.mark.parametrize("where", ["dout", "q", "kv"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("heads", [64, 128])
def test_what_is_not_finite_is_seen(heads: int, where: str, value: float, deterministic: bool) -> None:
    """NaN and Inf reach the gradients of the keys of the affected queries, and no others."""
    inputs = make_inputs(1, 12, 400, heads, 1, 20, device=DEVICE)
    tensors = {"q": inputs.q.clone(), "kv": inputs.kv.clone()}
    if where in tensors:
        place = (0, 3, 5, 7) if where == "q" else (0, int(inputs.indices[0, 3, 0, 4]), 0, 7)
        tensors[where][place] = value
    out, lse = FWD(tensors["q"], tensors["kv"], inputs.indices, causal=False)
    dout = normal(out)
    if where == "dout":
        dout[0, 3, 5, 7] = value
    dq, dkv, *_ = OP(
        dout, tensors["q"], tensors["kv"], out, lse, inputs.indices, causal=False, deterministic=deterministic
    )
    concerned = torch.zeros(400, dtype=torch.bool, device=DEVICE)
    if where == "kv":
        rows = (inputs.indices[0, :, 0] == inputs.indices[0, 3, 0, 4]).any(-1)
        concerned[inputs.indices[0, rows, 0].flatten().long()] = True
    else:
        concerned[inputs.indices[0, 3, 0].long()] = True
    finite = dkv.isfinite().all(-1)[0, :, 0]
    assert finite[~concerned].all()
    assert not finite[concerned].any()
    assert not dq[0, 3].isfinite().all()


@both_modes
@pytest.mark.parametrize("heads", [3, 70])
def test_missing_heads_add_nothing_to_infinite_keys(heads: int, deterministic: bool) -> None:
    inputs = make_inputs(1, 12, 400, heads, 1, 20, device=DEVICE)
    q, kv = inputs.q.abs(), inputs.kv.clone()
    kv[0, int(inputs.indices[0, 3, 0, 4]), 0, 570] = -math.inf  # so are all its scores
    out, lse = FWD(q, kv, inputs.indices, causal=False)
    _, dkv, *_ = OP(normal(out), q, kv, out, lse, inputs.indices, causal=False, deterministic=deterministic)
    assert dkv.isfinite().all()


def test_infinite_sinks() -> None:
    inputs = make_inputs(1, 4, 100, 4, 1, 20, device=DEVICE)
    sink = torch.tensor([math.inf, -math.inf, 0.0, 5.0], device=DEVICE)
    dq, _, d_sink = check(inputs.q, inputs.kv, inputs.indices, causal=False, attn_sink=sink)
    assert (dq[:, :, 0] == 0).all()
    assert (d_sink[:2] == 0).all()


@both_modes
def test_views(deterministic: bool) -> None:
    inputs = make_inputs(2, 6, 90, 70, 2, 40, device=DEVICE)
    args = {"causal": False, "deterministic": deterministic}
    dense = check(inputs.q, inputs.kv, inputs.indices, **args)
    indices = torch.stack([inputs.indices, -inputs.indices])[0].transpose(0, 1).contiguous().transpose(0, 1)
    views = check(strided_copy(inputs.q, swap_leading=True), strided_copy(inputs.kv), indices, **args)
    assert torch.equal(dense[0], views[0])
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    dout = torch.full((1, 1, 1, 1), 0.5, dtype=torch.bfloat16, device=DEVICE).expand(out.shape)
    a, *_ = OP(dout, inputs.q, inputs.kv, out, lse, inputs.indices, **args)
    odd = torch.empty(out.numel() + 1, dtype=out.dtype, device=DEVICE)[1:].view(out.shape).copy_(dout)
    turned = lse.transpose(0, 1).contiguous().transpose(0, 1)
    b, *_ = OP(odd, inputs.q, inputs.kv, strided_copy(out), turned, inputs.indices, **args)
    assert torch.equal(a, b)


def busy_call(inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    """The gradients while other work on the GPU changes which CTA runs when."""
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    noise = torch.cuda.Stream()
    with torch.cuda.stream(noise):
        torch.cuda._sleep(random.Random().randrange(200_000))
        a = torch.ones(2048, 2048, device=DEVICE)
        for _ in range(3):
            a = a @ a * 1e-3
    result: tuple[Tensor, ...] = OP(normal(out), inputs.q, inputs.kv, out, lse, inputs.indices, causal=False, **options)
    torch.cuda.synchronize()
    return result


def test_deterministic_repeats_bitwise() -> None:
    inputs = make_inputs(1, 300, 15000, 128, 1, 200, device=DEVICE)
    inputs.indices %= 1000
    first = busy_call(inputs, deterministic=True)
    for _ in range(25):
        assert all(torch.equal(a, b) for a, b in zip(first, busy_call(inputs, deterministic=True), strict=True))
    # Without the flag the order of additions changes dkv; dq is not summed over queries.
    others = [busy_call(inputs) for _ in range(5)]
    assert not all(torch.equal(first[1], other[1]) for other in others)
    assert all(torch.equal(others[0][0], other[0]) for other in others)


# The last case takes several launches, with many slots of the key in each.
@pytest.mark.parametrize(
    ("queries", "keys", "slots_of_one"),
    [(512, 8192, 256), (512, 8192, 512), (512, 300_000, 0), (512, 300_000, 1), (2500, 8192, 100)],
    ids=str,
)
def test_deterministic_with_keys_that_very_many_or_few_slots_list(queries: int, keys: int, slots_of_one: int) -> None:
    """One key in 100 to 512 slots of each query, and long runs of keys that no query lists. These calls take about as
    long as others."""
    inputs = make_inputs(seq=queries, s_kv=keys, heads=16, topk=512, device=DEVICE, seed=1)
    indices = torch.full_like(inputs.indices, -1) if slots_of_one == 1 else inputs.indices
    indices[..., :slots_of_one] = 7
    check(inputs.q, inputs.kv, indices, causal=False, deterministic=True)

    out, lse = FWD(inputs.q, inputs.kv, indices, causal=False)
    args = (normal(out), inputs.q, inputs.kv, out, lse, indices)
    times = [time_ms(lambda mode=mode: OP(*args, causal=False, deterministic=mode)) for mode in (True, False)]
    assert times[0] <= 4 * times[1] + 0.5
    busy = [OP(*args, causal=False, deterministic=True) for _ in range(3)]
    assert all(torch.equal(a, b) for other in busy[1:] for a, b in zip(busy[0], other, strict=True))


def test_deterministic_sums_of_a_key_do_not_depend_on_other_sequences() -> None:
    """A key is in so many slots that it is summed in parts: the sum does not depend on the lists of other sequences."""
    inputs = make_inputs(batch=2, seq=64, s_kv=1000, heads=16, topk=512, device=DEVICE)
    inputs.indices[..., :200] = 7
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    dout = normal(out)

    def dkv_of_the_last() -> Tensor:
        args = (dout, inputs.q, inputs.kv, out, lse, inputs.indices)
        return OP(*args, causal=False, deterministic=True)[1][1].clone()

    expected = dkv_of_the_last()
    for unlisted in (1, 100, 400):
        inputs.indices[0, 0, 0, :unlisted] = -1
        assert torch.equal(dkv_of_the_last(), expected)


def test_keys_that_very_many_slots_list_in_a_graph() -> None:
    """The counters of the partial sums are reset in each replay."""
    inputs = make_inputs(seq=64, s_kv=1000, heads=16, topk=512, device=DEVICE)
    inputs.indices[..., :200] = 7
    inputs.indices[..., 200:400] = 8
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    dout = torch.zeros_like(out)

    def call() -> tuple[Tensor, Tensor, Tensor]:
        args = (dout, inputs.q, inputs.kv, out, lse, inputs.indices)
        return OP(*args, causal=False, deterministic=True)  # type: ignore[no-any-return]

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in range(3):
        dout.copy_(normal(out, seed))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, call(), strict=True))


@pytest.mark.parametrize("by", ["torch", "argument"])
def test_deterministic_gradients(by: str) -> None:
    inputs = make_inputs(1, 300, 1000, 64, 1, 200, device=DEVICE)
    expected = busy_call(inputs, deterministic=True)
    torch.use_deterministic_algorithms(by == "torch")
    try:
        q, kv = inputs.q.clone().requires_grad_(), inputs.kv.clone().requires_grad_()
        out = dsa_ext.sparse_mla(q, kv, inputs.indices, causal=False, deterministic=by == "argument")
        out.backward(normal(out.detach()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, (q.grad, kv.grad), expected))


def memory_beside_results(q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> int:
    out, lse = FWD(q, kv, indices)
    return workspace_bytes(lambda: OP(out, q, kv, out, lse, indices, **options))


@pytest.mark.parametrize("sizes", [(2, 300, 3000, 128, 2048), (1, 8192, 8192, 16, 512)], ids=str)
def test_deterministic_in_several_launches(sizes: tuple[int, ...]) -> None:
    """More rows of dkv than the workspace holds; launches do not end with batch elements."""
    batch, seq, s_kv, heads, topk = sizes
    inputs = make_inputs(batch, seq, s_kv, heads, 1, topk, device=DEVICE)
    indices = spoil_indices(inputs.indices, s_kv)
    check(inputs.q, inputs.kv, indices, causal=False, deterministic=True)
    extra = memory_beside_results(inputs.q, inputs.kv, indices, deterministic=True)
    assert extra <= 2**30 + batch * s_kv * 576 * 4 + 64 * 2**20


def test_memory_beside_the_results() -> None:
    """At S=8192: the fp32 sums of dkv, and little else."""
    heads, seq, s_kv = 64, 8192, 8192
    inputs = make_inputs(1, seq, s_kv, heads, 1, 64, device=DEVICE)
    sink = torch.zeros(heads, device=DEVICE)
    extra = memory_beside_results(inputs.q, inputs.kv, inputs.indices, attn_sink=sink)
    assert extra <= s_kv * 576 * 4 + 2 * 4 * seq * heads + 64 * 2**20


@both_modes
def test_queries_alone_have_the_same_gradients(deterministic: bool) -> None:
    """Queries of S=8192 with one tile each, so that nothing is split or summed in another order."""
    heads, seq = 64, 8192
    inputs = make_inputs(1, seq, seq, heads, 1, 64, device=DEVICE)
    sink = torch.zeros(heads, device=DEVICE)
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, attn_sink=sink)
    grads = OP(out, inputs.q, inputs.kv, out, lse, inputs.indices, attn_sink=sink, deterministic=deterministic)
    for run in (slice(0, 3), slice(4000, 4003), slice(seq - 3, seq)):
        alone = [t[:, run] for t in (out, inputs.q, out, lse, inputs.indices)]
        dq, *_ = OP(alone[0], alone[1], inputs.kv, *alone[2:], attn_sink=sink, q_start=run.start)
        assert torch.equal(dq, grads[0][:, run])


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.inputs import make_inputs
i = make_inputs(seq=70, s_kv=4000, heads=128, topk=300, device="cuda")
out, lse = torch.ops.dsa.sparse_mla_fwd(i.q, i.kv, i.indices, causal=False)
dout = torch.randn_like(out)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [
        torch.ops.dsa.sparse_mla_bwd(dout, i.q, i.kv, out, lse, i.indices, causal=False, deterministic=d)
        for d in (True, False)
    ]
dout.mul_(0.5)
for _ in range(3):
    graph.replay()
expected = [
    torch.ops.dsa.sparse_mla_bwd(dout, i.q, i.kv, out, lse, i.indices, causal=False, deterministic=d)
    for d in (True, False)
]
assert all(torch.equal(a, b) for a, b in zip(captured[0], expected[0]))
assert torch.equal(captured[1][0], expected[1][0])
assert (captured[1][1].float() - expected[1][1].float()).norm() <= 1e-3 * expected[1][1].float().norm()
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


def test_side_stream() -> None:
    """A gradient that is written late on a side stream, in several calls: another stream would read zeros."""
    inputs = make_inputs(1, 64, 1000, 128, 1, 128, device=DEVICE)
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices)
    dout = normal(out)
    expected = OP(dout, inputs.q, inputs.kv, out, lse, inputs.indices, deterministic=True)

    def call(late: Tensor) -> tuple[Tensor, ...]:
        for _ in range(5):
            got: tuple[Tensor, ...] = OP(late, inputs.q, inputs.kv, out, lse, inputs.indices, deterministic=True)
        return got

    got = written_late(dout, call)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.gpu_memory(24)
@both_modes
def test_more_than_2_to_the_31_key_elements(deterministic: bool) -> None:
    s_kv = 2**31 // 576 + 1000
    kv = torch.zeros(1, s_kv, 1, 576, dtype=torch.bfloat16, device=DEVICE)
    inputs = make_inputs(1, 5, 1000, 64, 1, 200, device=DEVICE)
    kv[:, :500] = inputs.kv[:, :500]
    kv[:, -500:] = inputs.kv[:, 500:]
    far = torch.where(inputs.indices < 500, inputs.indices, inputs.indices + (s_kv - 1000)).int()
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices, causal=False)
    args = {"causal": False, "deterministic": deterministic}
    expected = OP(normal(out), inputs.q, inputs.kv, out, lse, inputs.indices, **args)
    dq, dkv, *_ = OP(normal(out), inputs.q, kv, out, lse, far, **args)
    # Tiles are in another order when the sums fit in L2.
    torch.testing.assert_close(dq, expected[0], atol=1e-2, rtol=1e-2)
    near = torch.cat([dkv[:, :500], dkv[:, -500:]], dim=1)
    torch.testing.assert_close(near, expected[1], atol=1e-2, rtol=1e-2)
    assert (dkv[:, 500:-500] == 0).all()


def test_errors_on_the_device() -> None:
    inputs = make_inputs(device=DEVICE)
    out, lse = FWD(inputs.q, inputs.kv, inputs.indices)
    with pytest.raises(RuntimeError, match=r"dsa::sparse_mla_bwd: lse must be on the device of q, cuda:0, got cpu"):
        OP(out, inputs.q, inputs.kv, out, lse.cpu(), inputs.indices)
    with pytest.raises(RuntimeError, match=r"dout must be bfloat16 \[B, S, H, Dv\], got float32"):
        OP(out.float(), inputs.q, inputs.kv, out, lse, inputs.indices)
