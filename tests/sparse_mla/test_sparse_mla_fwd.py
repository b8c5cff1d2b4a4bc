"""sparse_mla_fwd without a GPU: its reference against loops in float64; the operator: errors, fake tensors, export."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers, to_fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_mla_cases import D_QK, D_V, OPTIONS, brute_force, make_small
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_inputs, poison_unselected, strided_copy
from dsa_ext.testing.tolerances import forward_errors


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_matches_brute_force(name: str, groups: int) -> None:
    q, kv, indices = make_small(batch=2, seq=6, groups=groups)
    expected, expected_lse = brute_force(q, kv, indices, **OPTIONS[name])
    out, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, **OPTIONS[name])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-13)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, kv, indices = make_small(batch=2, seq=7, groups=2)
    whole = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    grads = torch.randn_like(whole[0]), torch.randn_like(whole[1])
    whole_bwd = reference.sparse_mla_bwd(grads[0], q, kv, *whole, indices, dlse=grads[1])
    monkeypatch.setattr(reference.sparse_mla, "_CHUNK_ELEMENTS", 2 * 2 * 8 * (2 * D_QK + 2 * 4))
    assert len(list(reference.sparse_mla.query_chunks(q, kv, indices, torch.zeros_like(indices).bool()))) == 4
    chunked = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(reference.sparse_mla_bwd(grads[0], q, kv, *whole, indices, dlse=grads[1]), whole_bwd)


@pytest.mark.parametrize("sink", [None, -math.inf, 0.5, math.inf])
def test_rows_without_a_visible_key(sink: float | None) -> None:
    q, kv, indices = make_small(seq=4)
    indices[:] = torch.tensor([INT32_MIN, -1, 16, INT32_MAX], dtype=torch.int32).repeat(2)
    attn_sink = None if sink is None else torch.full((4,), sink, dtype=torch.float64)
    out, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, causal=False, attn_sink=attn_sink)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    arriving = torch.ones_like(out), torch.full_like(lse, math.inf)
    grads = reference.sparse_mla_bwd(arriving[0], q, kv, out, lse, indices, attn_sink=attn_sink, dlse=arriving[1])
    assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("sink", [-math.inf, math.inf])
def test_infinite_sinks(sink: float) -> None:
    q, kv, indices = make_small(seq=4)
    attn_sink = torch.full((4,), sink, dtype=torch.float64)
    plain, plain_lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    out, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, attn_sink=attn_sink)
    assert torch.equal(lse, plain_lse)
    assert torch.equal(out, plain if sink < 0 else torch.zeros_like(plain))
    grads = reference.sparse_mla_bwd(torch.ones_like(out), q, kv, out, lse, indices, attn_sink=attn_sink)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[2] == 0).all()


def test_a_repeated_id_counts_as_often_as_it_is_listed() -> None:
    q, kv, _ = make_small(seq=1)
    once = torch.tensor([3, 5, 7], dtype=torch.int32).view(1, 1, 1, 3)
    twice = torch.tensor([3, 5, 7, 5], dtype=torch.int32).view(1, 1, 1, 4)
    copied = torch.cat([kv, kv[:, 5:6]], dim=1)
    as_own_key = torch.tensor([3, 5, 7, 16], dtype=torch.int32).view(1, 1, 1, 4)
    results = [
        reference.sparse_mla_fwd(q, keys, ids, d_v=D_V, causal=False)
        for keys, ids in ((kv, once), (kv, twice), (copied, as_own_key))
    ]
    torch.testing.assert_close(results[1], results[2])
    assert (results[1][1] > results[0][1]).all()


@pytest.mark.parametrize("s_kv", [5, 17, 64])
def test_unselected_rows_may_hold_anything(s_kv: int) -> None:
    q, kv, indices = make_small(batch=2, seq=5, s_kv=s_kv, topk=3, groups=2)
    visible = reference.sparse_mla.visible_slots(indices, s_kv, True, 0, 1, None)
    poisoned = poison_unselected(kv, indices, visible)
    assert not poisoned.isfinite().all()
    clean = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    results = reference.sparse_mla_fwd(q, poisoned, indices, d_v=D_V)
    assert all(torch.equal(a, b) for a, b in zip(results, clean, strict=True))
    dq, dkv, *_ = reference.sparse_mla_bwd(torch.ones_like(clean[0]), q, poisoned, *clean, indices)
    assert dq.isfinite().all()
    assert dkv.isfinite().all()


def test_a_nan_query_spoils_only_its_own_row_and_keys() -> None:
    q, kv, _ = make_small(seq=2)
    q[0, 0] = math.nan
    indices = torch.tensor([[1, 2, -1], [3, -1, 4]], dtype=torch.int32).view(1, 2, 1, 3)
    out, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, causal=False)
    _, dkv, *_ = reference.sparse_mla_bwd(torch.ones_like(out), q, kv, out, lse, indices, causal=False)
    assert out[0, 1].isfinite().all()
    assert dkv[0, 1:3].isnan().any()
    assert dkv[0, [0, *range(3, 16)]].isfinite().all()


def test_bf16_meets_the_tolerances_with_any_strides() -> None:
    inputs = make_inputs(batch=2, seq=5, s_kv=40, heads=6, groups=2, topk=24)
    dense = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
    forward_errors(*dense, inputs.q, inputs.kv, inputs.indices).check()
    q, kv = strided_copy(inputs.q, swap_leading=True), strided_copy(inputs.kv)
    assert not q.is_contiguous()
    strided = reference.sparse_mla_fwd(q, kv, inputs.indices)
    assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_edges(data: st.DataObject) -> None:
    """Odd sizes, any ids, lengths and positions, empty tensors among them."""
    draw = data.draw
    batch, seq, groups = draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(1, 3))
    heads, s_kv, topk = groups * draw(st.integers(0, 3)), draw(st.integers(0, 9)), draw(st.integers(1, 7))
    inputs = make_inputs(batch, seq, s_kv, heads, groups, topk, D_QK, dtype=torch.float64)
    ids = st.one_of(st.integers(-2, s_kv + 1), st.sampled_from([INT32_MIN, INT32_MAX]))
    count = batch * seq * groups * topk
    drawn = draw(st.lists(ids, min_size=count, max_size=count))
    indices = torch.tensor(drawn, dtype=torch.int32).view(batch, seq, groups, topk)
    row_lengths = draw(st.lists(st.integers(-1, topk + 1), min_size=batch * seq, max_size=batch * seq))
    options = {
        "causal": draw(st.booleans()),
        "q_start": draw(st.integers(0, 2**40)) if draw(st.booleans()) else draw(st.integers(0, 10)),
        "positions_per_key": draw(st.integers(1, 5)),
        "topk_length": torch.tensor(row_lengths, dtype=torch.int32).view(batch, seq) if draw(st.booleans()) else None,
        "attn_sink": torch.linspace(-3, 3, heads, dtype=torch.float64) if draw(st.booleans()) else None,
        "d_v": D_V,
    }
    out, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, indices, **options)
    expected, expected_lse = brute_force(inputs.q, inputs.kv, indices, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    del options["d_v"]
    dq, dkv, *_ = reference.sparse_mla_bwd(torch.ones_like(out), inputs.q, inputs.kv, out, lse, indices, **options)
    assert dq.shape == inputs.q.shape
    assert dkv.shape == inputs.kv.shape
    assert dq.isfinite().all()
    assert dkv.isfinite().all()


OP = torch.ops.dsa.sparse_mla_fwd.default
BWD = torch.ops.dsa.sparse_mla_bwd.default
native, cpu, fake = callers("sparse_mla_fwd")
B, S, S_KV, H, G, K, D = 1, 4, 16, 8, 1, 5, 576
BOUNDS = {"starts": torch.zeros(B, S).int(), "ends": torch.full((B, S), S_KV).int()}


def arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments of small size, bf16, with every tensor given."""
    inputs = make_inputs(B, S, S_KV, H, G, K, D)
    return {
        "q": inputs.q,
        "kv": inputs.kv,
        "indices": inputs.indices,
        "topk_length": torch.full((B, S), K, dtype=torch.int32),
        "attn_sink": torch.zeros(H),
        **changes,
    }


# What is wrong, and the message without the operator's name. Every implementation says the same.
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(S, H, D).bfloat16()}, "q must be bfloat16 [B, S, H, Dqk], got bfloat16 [4, 8, 576]"),
    ({"q": torch.zeros(B, S, H, D).half()}, "q must be bfloat16 [B, S, H, Dqk], got float16 [1, 4, 8, 576]"),
    ({"kv": torch.zeros(B, S_KV, G, D).half()}, "kv must be bfloat16 [B, S_kv, G, Dqk], got float16 [1, 16, 1, 576]"),
    ({"kv": torch.zeros(B, S_KV, D).bfloat16()}, "kv must be bfloat16 [B, S_kv, G, Dqk], got bfloat16 [1, 16, 576]"),
    (
        {"kv": torch.zeros(B, S_KV, G, 512).bfloat16()},
        "kv must be bfloat16 [B=1, S_kv, G, Dqk=576], got bfloat16 [1, 16, 1, 512]",
    ),
    (
        {"kv": torch.zeros(2, S_KV, G, D).bfloat16()},
        "kv must be bfloat16 [B=1, S_kv, G, Dqk=576], got bfloat16 [2, 16, 1, 576]",
    ),
    ({"indices": torch.zeros(B, S, K).long()}, "indices must be int32 [B, S, G, K], got int64 [1, 4, 5]"),
    ({"indices": torch.zeros(B, S, G, K).long()}, "indices must be int32 [B, S, G, K], got int64 [1, 4, 1, 5]"),
    (
        {"indices": torch.zeros(B, S - 1, 2, K).int()},
        "indices must be int32 [B=1, S=4, G=1, K], got int32 [1, 3, 2, 5]",
    ),
    ({"indices": torch.zeros(B, S, G, 0).int()}, "indices must have at least one slot per row, got int32 [1, 4, 1, 0]"),
    ({"topk_length": torch.zeros(B, S)}, "topk_length must be int32 [B, S], got float32 [1, 4]"),
    ({"topk_length": torch.zeros(S, B).int()}, "topk_length must be int32 [B=1, S=4], got int32 [4, 1]"),
    ({"starts": torch.zeros(B, S).int()}, "starts and ends must be given together"),
    ({"ends": torch.zeros(B, S).int()}, "starts and ends must be given together"),
    ({"starts": torch.zeros(S).int()}, "starts must be int32 [B, S], got int32 [4]"),
    ({**BOUNDS, "ends": torch.zeros(B, S)}, "ends must be int32 [B, S], got float32 [1, 4]"),
    ({**BOUNDS, "ends": torch.zeros(B, S + 1).int()}, "ends must be int32 [B=1, S=4], got int32 [1, 5]"),
    ({**BOUNDS, "q_start": 5}, "q_start must be 0 with starts and ends, got 5"),
    ({**BOUNDS, "positions_per_key": 2}, "positions_per_key must be 1 with starts and ends, got 2"),
    ({"attn_sink": torch.zeros(H).bfloat16()}, "attn_sink must be float32 [H], got bfloat16 [8]"),
    ({"attn_sink": torch.zeros(1)}, "attn_sink must be float32 [H=8], got float32 [1]"),
    (
        {"kv": torch.zeros(B, S_KV, 3, D).bfloat16(), "indices": torch.zeros(B, S, 3, K).int()},
        "q's heads must be a multiple of kv's groups, at most 128 per group, got 8 heads and 3 groups",
    ),
    (
        {"q": torch.zeros(B, S, 129, D).bfloat16(), "attn_sink": torch.zeros(129)},
        "q's heads must be a multiple of kv's groups, at most 128 per group, got 129 heads and 1 groups",
    ),
    (
        {"kv": torch.zeros(B, S_KV, 0, D).bfloat16(), "indices": torch.zeros(B, S, 0, K).int()},
        "q's heads must be a multiple of kv's groups, at most 128 per group, got 8 heads and 0 groups",
    ),
    (
        {"q": torch.zeros(B, S, H, 192).bfloat16(), "kv": torch.zeros(B, S_KV, G, 192).bfloat16()},
        "(Dqk, d_v) must be (576, 512) or (512, 512), got (192, 512)",
    ),
    ({"d_v": 576}, "(Dqk, d_v) must be (576, 512) or (512, 512), got (576, 576)"),
    ({"sm_scale": float("nan")}, "sm_scale must be from -2^127 to 2^127, got nan"),
    ({"sm_scale": float("-inf")}, "sm_scale must be from -2^127 to 2^127, got -inf"),
    ({"sm_scale": 1e39}, "sm_scale must be from -2^127 to 2^127, got 1e+39"),
    ({"sm_scale": -3e38}, "sm_scale must be from -2^127 to 2^127, got -3e+38"),
    ({"q_start": -1}, "q_start must be from 0 to 2^62, got -1"),
    ({"q_start": 2**63 - 1}, "q_start must be from 0 to 2^62, got 9223372036854775807"),
    ({"positions_per_key": 0}, "positions_per_key must be at least 1, got 0"),
]


# What the reference takes, but no kernel.
NATIVE_ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"q": torch.zeros(B, S, H, 2 * D).bfloat16()[..., ::2]},
        "q must have stride 1 in its last dimension, got stride 2",
    ),
    (
        {"kv": torch.zeros(B, S_KV, G, D + 4).bfloat16()[..., :D]},
        "kv must have rows that start 16-byte aligned: strides in multiples of 8 elements, got stride 580 in "
        "dimension 1",
    ),
    (
        {"q": torch.zeros(B, S, H, D + 8).bfloat16()[..., 3 : D + 3]},
        "q must start 16-byte aligned, got an address that is 6 bytes past a multiple of 16",
    ),
    (
        {"indices": torch.zeros(B, S, G, 2 * K).int()[..., ::2]},
        "indices must have stride 1 in its last dimension, got stride 2",
    ),
    (
        {"kv": torch.zeros(B, S_KV, G, D, device="meta").bfloat16()},
        "kv must be on the device of q, cpu, got meta",
    ),
    ({}, "q must be on a CUDA device, got cpu"),  # the last check: all others passed
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, "sparse_mla_fwd", arguments(**changes), message)


@pytest.mark.parametrize(("changes", "message"), NATIVE_ERRORS, ids=[text for _, text in NATIVE_ERRORS])
def test_native_errors(changes: dict[str, Any], message: str) -> None:
    assert_error(native, "sparse_mla_fwd", arguments(**changes), message)


def test_native_checks_pass_views_that_kernels_take() -> None:
    """Transposed and sliced q and kv, odd strides in dimensions of size 1, strided lengths and sinks."""
    changes = {
        "q": torch.zeros(S, 3, H, D + 64).bfloat16().transpose(0, 1)[1:2, ..., 64:],
        "kv": torch.zeros(S_KV * D).bfloat16().as_strided((1, S_KV, 1, D), (3, D, 5, 1)),
        "indices": torch.zeros(S, B, G, 64).int().transpose(0, 1)[..., 3 : K + 3],
        "topk_length": torch.zeros(S, B).int().T,
        "attn_sink": torch.zeros(2 * H)[::2],
    }
    assert_error(native, "sparse_mla_fwd", arguments(**changes), "q must be on a CUDA device, got cpu")


@pytest.mark.parametrize("name", ["kv", "indices"])
def test_errors_without_a_batch(name: str) -> None:
    args = arguments()
    rows = {"kv": args["kv"][0], "indices": args["indices"][0], name: args[name]}
    with pytest.raises(RuntimeError, match=rf"^dsa::sparse_mla_fwd: {name} must be \[.*\] when q is \[S, H, D\], got "):
        dsa_ext.sparse_mla(args["q"][0], **rows)


def test_a_mix_of_devices() -> None:
    args = arguments()
    with FakeTensorMode(allow_non_fake_inputs=True):
        args["q"] = to_fake_cuda(args["q"])
        with pytest.raises(RuntimeError, match="kv must be on the device of q, cuda:0, got cpu"):
            torch.ops.dsa.sparse_mla_fwd(**args)


@pytest.mark.parametrize("sizes", [(0, 4, 8), (1, 0, 8), (1, 4, 0), (1, 4, 8)])
@pytest.mark.parametrize("s_kv", [0, 3])
def test_empty_tensors(sizes: tuple[int, int, int], s_kv: int) -> None:
    batch, seq, heads = sizes
    inputs = make_inputs(batch, seq, s_kv, heads, 1, K, D)
    out, lse = torch.ops.dsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, causal=False)
    assert out.shape == (batch, seq, heads, 512)
    assert lse.shape == (batch, seq, heads)
    if s_kv == 0:
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_fake_tensors_on_a_cuda_device() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 33, 64, 576, dtype=torch.bfloat16, device="cuda")
        kv = torch.empty(2, 1000, 2, 576, dtype=torch.bfloat16, device="cuda")
        indices = torch.empty(2, 33, 2, 100, dtype=torch.int32, device="cuda")
        out, lse = dsa_ext.sparse_mla(q, kv, indices, return_lse=True)
        assert (out.shape, out.dtype, out.device.type) == ((2, 33, 64, 512), torch.bfloat16, "cuda")
        assert (lse.shape, lse.dtype, lse.device.type) == ((2, 33, 64), torch.float32, "cuda")
        dq, dkv, d_sink, _ = BWD(out, q, kv, out, lse, indices)
        assert (dq.shape, dkv.shape, d_sink.shape) == (q.shape, kv.shape, (0,))
        assert (dkv.dtype, dkv.device.type) == (torch.bfloat16, "cuda")


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "all keys, scaled": {"causal": False, "sm_scale": 0.1},
    "chunk": {"q_start": 7, "positions_per_key": 2},
    "lengths": {"topk_length": torch.tensor([[0, 2, 5, 9]], dtype=torch.int32)},
    "sink": {"attn_sink": torch.linspace(-2, 2, H)},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", VARIANTS)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    args = make_inputs(B, S, S_KV, H, G, K, D, dtype=dtype)
    options = VARIANTS[name]
    leaves = [args.q.requires_grad_(), args.kv.requires_grad_()]
    torch.library.opcheck(OP, (*leaves, args.indices), options)
    with torch.no_grad():
        out, lse = OP(*leaves, args.indices, **options)
    detached = [t.detach() for t in leaves]
    gradients = torch.randn_like(out), torch.randn_like(lse)
    torch.library.opcheck(BWD, (gradients[0], *detached, out, lse, args.indices), {**options, "dlse": gradients[1]})


def test_partial_gradients() -> None:
    """Only some inputs require a gradient; only one result gets one."""
    args = arguments(q=make_inputs().q[:, :S, :H].detach().requires_grad_())
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    (from_lse,) = torch.autograd.grad(lse.sum(), args["q"], retain_graph=True)
    (from_out,) = torch.autograd.grad(out.sum(), args["q"])
    assert from_lse.abs().sum() > 0
    assert from_out.abs().sum() > 0
    assert args["kv"].grad is None


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
            return dsa_ext.sparse_mla(q, kv, indices, q_start=3)

    inputs = make_inputs(seq=6)
    seq = torch.export.Dim("seq", min=2, max=1024)
    shapes = {"q": {1: seq}, "kv": None, "indices": {1: seq}}
    program = torch.export.export(Module(), (inputs.q, inputs.kv, inputs.indices), dynamic_shapes=shapes)
    assert OP in [node.target for node in program.graph.nodes]
    other = make_inputs(seq=9)
    result = program.module()(other.q, other.kv, other.indices)
    assert torch.equal(result, dsa_ext.sparse_mla(other.q, other.kv, other.indices, q_start=3))


def test_compile_without_a_batch() -> None:
    inputs = make_inputs(seq=5, s_kv=40, heads=4, topk=12, dtype=torch.float64)
    rows = inputs.q[0], inputs.kv[0, :, 0], inputs.indices[0, :, 0]
    compiled = torch.compile(dsa_ext.sparse_mla, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*rows), dsa_ext.sparse_mla(*rows))


def test_flop_formula() -> None:
    inputs = make_inputs(batch=2, seq=3, heads=16, topk=32, d_qk=576)
    leaves = inputs.q.requires_grad_(), inputs.kv.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        dsa_ext.sparse_mla(*leaves, inputs.indices).sum().backward()
    slots = 2 * 3 * 16 * 32
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.dsa.sparse_mla_fwd] == 2 * slots * (576 + 512)
    assert counts[torch.ops.dsa.sparse_mla_bwd] == 2 * slots * (3 * 576 + 2 * 512)


def test_calls_without_gradients_are_seen() -> None:
    """The public function skips only the autograd layer then: dispatch modes and the profiler see the operator."""
    inputs = make_inputs()
    with FlopCounterMode(display=False) as counter, torch.profiler.profile() as profile:
        dsa_ext.sparse_mla(inputs.q, inputs.kv, inputs.indices)
    assert counter.get_flop_counts()["Global"][torch.ops.dsa.sparse_mla_fwd] > 0
    assert "dsa::sparse_mla_fwd" in [event.key for event in profile.key_averages()]


def test_public_function_is_the_operator() -> None:
    args = arguments()
    q, kv, indices = (args.pop(name) for name in ("q", "kv", "indices"))
    options = {**args, "sm_scale": 0.2, "causal": False, "q_start": 1, "positions_per_key": 2}
    expected = reference.sparse_mla_fwd(q, kv, indices, **options)
    out, lse = dsa_ext.sparse_mla(q, kv, indices, return_lse=True, **options)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert torch.equal(dsa_ext.sparse_mla(q, kv, indices, **options), expected[0])
    assert lse.dtype == torch.float32
