"""torch.ops.dsa.sparse_mla_fwd as an operator: errors, fake tensors, autograd, compile, export. All without a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from callers import assert_error, callers, to_fake_cuda
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import ops, reference
from dsa_ext.testing.inputs import make_inputs, spoil_indices

OP = torch.ops.dsa.sparse_mla_fwd.default
BWD = torch.ops.dsa.sparse_mla_bwd.default
native, cpu, fake = callers("sparse_mla_fwd")

B, S, S_KV, H, G, K, D = 1, 4, 16, 8, 1, 5, 576
FAR = 2**31


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
    ({"indices": torch.zeros(B, S, G, 0).int()}, "indices must have at least one slot a row, got int32 [1, 4, 1, 0]"),
    ({"topk_length": torch.zeros(B, S)}, "topk_length must be int32 [B, S], got float32 [1, 4]"),
    ({"topk_length": torch.zeros(S, B).int()}, "topk_length must be int32 [B=1, S=4], got int32 [4, 1]"),
    ({"attn_sink": torch.zeros(H).bfloat16()}, "attn_sink must be float32 [H], got bfloat16 [8]"),
    ({"attn_sink": torch.zeros(1)}, "attn_sink must be float32 [H=8], got float32 [1]"),
    (
        {"kv": torch.zeros(B, S_KV, 3, D).bfloat16(), "indices": torch.zeros(B, S, 3, K).int()},
        "q's heads must be a multiple of kv's groups, at most 128 a group, got 8 heads and 3 groups",
    ),
    (
        {"q": torch.zeros(B, S, 129, D).bfloat16(), "attn_sink": torch.zeros(129)},
        "q's heads must be a multiple of kv's groups, at most 128 a group, got 129 heads and 1 groups",
    ),
    (
        {"kv": torch.zeros(B, S_KV, 0, D).bfloat16(), "indices": torch.zeros(B, S, 0, K).int()},
        "q's heads must be a multiple of kv's groups, at most 128 a group, got 8 heads and 0 groups",
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

# What only a kernel cannot take.
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
        {"kv": torch.zeros(D).bfloat16().as_strided((B, FAR, G, D), (0, 0, 0, 1))},
        "kv must have sizes below 2^31, got bfloat16 [1, 2147483648, 1, 576]",
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
        dq, dkv, d_sink = BWD(out, q, kv, out, lse, indices)
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


def test_gradcheck_of_the_operator() -> None:
    inputs = make_inputs(1, 2, 6, 4, 2, 3, 576, dtype=torch.float64)
    indices = spoil_indices(inputs.indices, 6)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.kv, sink)]

    def call(q: Tensor, kv: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dsa_ext.sparse_mla(q, kv, indices, causal=False, attn_sink=sink, return_lse=True)
        return out, lse[:, 1:]  # the first query sees nothing; differences of -inf are NaN

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_partial_gradients() -> None:
    """Only some inputs want a gradient; only one result gets one."""
    args = arguments(q=make_inputs().q[:, :S, :H].detach().requires_grad_())
    out, lse = torch.ops.dsa.sparse_mla_fwd(**args)
    (from_lse,) = torch.autograd.grad(lse.sum(), args["q"], retain_graph=True)
    (from_out,) = torch.autograd.grad(out.sum(), args["q"])
    assert from_lse.abs().sum() > 0
    assert from_out.abs().sum() > 0
    assert args["kv"].grad is None


def test_second_derivatives_are_refused() -> None:
    inputs = make_inputs(dtype=torch.float32)
    out = dsa_ext.sparse_mla(inputs.q.requires_grad_(), inputs.kv, inputs.indices)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs.q, create_graph=True)
    with pytest.raises(RuntimeError, match="dsa::sparse_mla_bwd: second derivatives"):
        dq.sum().backward()


def loss(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor) -> Tensor:
    out, lse = dsa_ext.sparse_mla(q, kv, indices, causal=False, attn_sink=sink, return_lse=True)
    return out.square().mean() + lse.sum() * 0.1


def gradients(function: Callable[..., Tensor], seq: int) -> list[Tensor]:
    inputs = make_inputs(seq=seq, topk=8, dtype=torch.float32, seed=seq)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.kv, torch.linspace(-1, 1, 16))]
    result = function(leaves[0], leaves[1], inputs.indices, leaves[2])
    return [result, *torch.autograd.grad(result, leaves)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend=backend)
    for seq in (3, 5, 7):
        torch.testing.assert_close(gradients(compiled, seq), gradients(loss, seq))
    assert backend.frame_count == (1 if dynamic else 3)


def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(gradients(compiled, 4), gradients(loss, 4))


def keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is OP else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing(selective: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A selective checkpoint that keeps the operator's results does not run it again."""
    expected = gradients(loss, 4)
    options = {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)} if selective else {}
    calls = []
    operator = ops.OPERATORS["sparse_mla_fwd"]
    forward = operator.reference
    monkeypatch.setattr(operator, "reference", lambda *args: calls.append(0) or forward(*args))
    torch.testing.assert_close(gradients(partial(checkpoint, loss, use_reentrant=False, **options), 4), expected)
    assert len(calls) == (1 if selective else 2)


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
    """The public function goes below autograd then, and no further: modes and the profiler see the operator."""
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
