"""sparse_mla_bwd without a GPU: its reference against finite differences and autograd; the operator; gradients through
sparse_mla_fwd, eager, compiled and checkpointed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from callers import callers
from sparse_mla_cases import D_QK, D_V, OPTIONS, make_small
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dsa_ext
from dsa_ext import ops, reference
from dsa_ext.testing.inputs import make_inputs, spoil_indices

FWD = torch.ops.dsa.sparse_mla_fwd.default
OP = torch.ops.dsa.sparse_mla_bwd.default
native, cpu, fake = callers("sparse_mla_bwd")
B, S, S_KV, H, G, K, D, DV = 1, 4, 16, 8, 1, 5, 576, 512
TENSORS = ("dout", "q", "kv", "out", "lse", "indices")


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_by_finite_differences(name: str) -> None:
    """gradcheck of out and lse together, with respect to q, kv and the sink."""
    q, kv, indices = make_small(batch=2, seq=6, groups=2, topk=5)
    options = dict(OPTIONS[name])
    sink = options.pop("attn_sink", None)
    finite_sink = None if sink is None else torch.tensor([-1.0, 0.5, 2.0, 9.0], dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, kv, finite_sink) if t is not None]

    def call(q: Tensor, kv: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = Reference.apply(q, kv, indices, sink, options)
        return out, lse.masked_fill(lse == -torch.inf, 0)  # differences of -inf are NaN

    assert torch.autograd.gradcheck(call, leaves)


class Reference(torch.autograd.Function):
    """The forward and backward of the reference as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None, options: Any) -> Any:
        out, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, attn_sink=sink, **options)
        ctx.save_for_backward(q, kv, indices, sink, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        q, kv, indices, sink, out, lse = ctx.saved_tensors
        dq, dkv, d_sink, _ = reference.sparse_mla_bwd(
            dout, q, kv, out, lse, indices, attn_sink=sink, dlse=dlse, **ctx.options
        )
        return dq, dkv, None, d_sink if sink is not None else None, None


def test_gradients_match_autograd_of_dense_attention() -> None:
    """Lists of every key: ordinary attention, differentiated by PyTorch."""
    q, kv = (t.requires_grad_() for t in make_small(seq=3, s_kv=8)[:2])
    indices = torch.stack([torch.randperm(8) for _ in range(3)]).int().view(1, 3, 1, 8)
    out, lse = reference.sparse_mla_fwd(q.detach(), kv.detach(), indices, d_v=D_V, causal=False)
    scores = torch.einsum("bshd,bkgd->bshk", q, kv) * D_QK**-0.5
    dense = torch.einsum("bshk,bkgd->bshd", scores.softmax(-1), kv[..., :D_V])
    torch.testing.assert_close(out, dense)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((dense, scores.logsumexp(-1)), (q, kv), (dout, dlse))
    dq, dkv, d_sink, _ = reference.sparse_mla_bwd(
        dout, q.detach(), kv.detach(), out, lse, indices, causal=False, dlse=dlse
    )
    torch.testing.assert_close((dq, dkv), expected)
    assert d_sink.numel() == 0


def arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments of small size, bf16, with every tensor given."""
    inputs = make_inputs(B, S, S_KV, H, G, K, D)
    out, lse = torch.ops.dsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
    return {
        "dout": torch.ones_like(out),
        "q": inputs.q,
        "kv": inputs.kv,
        "out": out,
        "lse": lse,
        "indices": inputs.indices,
        "topk_length": torch.full((B, S), K, dtype=torch.int32),
        "attn_sink": torch.zeros(H),
        "dlse": torch.ones_like(lse),
        **changes,
    }


ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"dout": torch.zeros(B, S, H, D).bfloat16()},
        "dout must be bfloat16 [B=1, S=4, H=8, Dv=512], got bfloat16 [1, 4, 8, 576]",
    ),
    ({"dout": torch.zeros(B, S, H, DV)}, "dout must be bfloat16 [B, S, H, Dv], got float32 [1, 4, 8, 512]"),
    ({"out": torch.zeros(B, S, DV).bfloat16()}, "out must be bfloat16 [B, S, H, Dv], got bfloat16 [1, 4, 512]"),
    ({"lse": torch.zeros(B, S, 7)}, "lse must be float32 [B=1, S=4, H=8], got float32 [1, 4, 7]"),
    ({"dlse": torch.zeros(B, S, H).double()}, "dlse must be float32 [B, S, H], got float64 [1, 4, 8]"),
    ({"kv": torch.zeros(B, S_KV, G, D).half()}, "kv must be bfloat16 [B, S_kv, G, Dqk], got float16 [1, 16, 1, 576]"),
    ({"d_v": 256}, "(Dqk, d_v) must be (576, 512) or (512, 512), got (576, 256)"),
    ({"sm_scale": float("nan")}, "sm_scale must be from -2^127 to 2^127, got nan"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        call(**arguments(**changes))
    assert f"dsa::sparse_mla_bwd: {message}" in str(error.value)


def test_native_checks_end_at_the_device() -> None:
    with pytest.raises(RuntimeError, match="dsa::sparse_mla_bwd: q must be on a CUDA device, got cpu"):
        native(**arguments())


@pytest.mark.parametrize("sink", [False, True])
def test_fake_tensors_on_a_cuda_device(sink: bool) -> None:
    args = arguments() if sink else arguments(attn_sink=None)
    dq, dkv, d_sink, dist = fake(**args)
    assert (dist.shape, dist.dtype) == ((0,), torch.float32)
    assert (dq.shape, dq.dtype, dq.device.type) == ((B, S, H, D), torch.bfloat16, "cuda")
    assert (dkv.shape, dkv.dtype) == ((B, S_KV, G, D), torch.bfloat16)
    assert (d_sink.shape, d_sink.dtype) == ((H,) if sink else (0,), torch.float32)


@pytest.mark.parametrize("heads", [8, 64, 65])
@pytest.mark.parametrize("sink", [False, True])
def test_dist(heads: int, sink: bool) -> None:
    """What attn_dist gives for each block of heads, also where a sink takes a share of the attention."""
    torch.manual_seed(0)
    q, kv = torch.randn(B, S, heads, D), torch.randn(B, S_KV, G, D)
    indices = torch.randint(-1, S_KV, (B, S, G, 7), dtype=torch.int32)
    attn_sink = torch.randn(heads) if sink else None
    q, kv = q.bfloat16(), kv.bfloat16()
    out, lse = torch.ops.dsa.sparse_mla_fwd(q, kv, indices, attn_sink=attn_sink)
    args = dict(zip(TENSORS, (torch.randn_like(out), q, kv, out, lse, indices), strict=True)) | {"attn_sink": attn_sink}
    *gradients, dist = OP(**args, return_dist=True)
    assert torch.equal(dist, torch.ops.dsa.attn_dist(q, kv, indices, lse, per_head_block=True))
    assert fake(**args, return_dist=True)[3].shape == dist.shape == (-(-heads // 64), B, S, G, 7)
    torch.testing.assert_close((*gradients,), OP(**args)[:3])


def test_opcheck() -> None:
    args = arguments()
    positional = [args.pop(name) for name in TENSORS]
    torch.library.opcheck(OP, positional, args)
    torch.library.opcheck(OP, positional, {"return_dist": True})
    torch.library.opcheck(OP, positional, {"deterministic": True, "causal": False})


def test_expanded_gradients() -> None:
    """The gradient of out.sum() is one expanded element."""
    args = arguments(attn_sink=None, dlse=None)
    dense = OP(**args)
    expanded = OP(**{**args, "dout": torch.ones((), dtype=torch.bfloat16).expand(B, S, H, DV)})
    assert all(torch.equal(a, b) for a, b in zip(dense, expanded, strict=True))


def test_gradcheck_of_the_operator() -> None:
    inputs = make_inputs(1, 2, 6, 4, 2, 3, 576, dtype=torch.float64)
    indices = spoil_indices(inputs.indices, 6)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.kv, sink)]

    def call(q: Tensor, kv: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dsa_ext.sparse_mla(q, kv, indices, causal=False, attn_sink=sink, return_lse=True)
        return out, lse[:, 1:]  # the first query sees nothing; differences of -inf are NaN

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


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


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("squeezed", [False, True])
def test_no_batch_is_a_batch_of_one(groups: int, squeezed: bool) -> None:
    """Results and gradients."""
    inputs = make_inputs(seq=5, s_kv=40, heads=4, groups=groups, topk=12, dtype=torch.float64)
    q, kv, indices = inputs.q.requires_grad_(), inputs.kv.requires_grad_(), inputs.indices
    length = torch.tensor([[0, 3, 12, 7, 12]], dtype=torch.int32)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    options: dict[str, Any] = {"q_start": 20, "sm_scale": 0.1, "attn_sink": sink}
    expected = dsa_ext.sparse_mla(q, kv, indices, **options, topk_length=length, return_lse=True)
    rows = [q[0], kv[0], indices[0]]
    if squeezed and groups == 1:
        rows[1:] = [rows[1][:, 0], rows[2][:, 0]]
    options["topk_length"] = length[0]
    out, lse = dsa_ext.sparse_mla(*rows, **options, return_lse=True)
    torch.testing.assert_close((out, lse), (expected[0][0], expected[1][0]), rtol=0, atol=0)
    assert torch.equal(dsa_ext.sparse_mla(*rows, **options), out)
    grads = [torch.autograd.grad(o.sin().sum(), (q, kv), retain_graph=True) for o in (out, expected[0])]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


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
    return CheckpointPolicy.MUST_SAVE if op is FWD else CheckpointPolicy.PREFER_RECOMPUTE


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
