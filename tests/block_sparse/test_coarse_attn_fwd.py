"""coarse_attn without a GPU: its reference and gradients against dense attention; the operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_sparse_errors import HEAD_ERRORS, zeros
from callers import assert_error, callers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.reference.block_sparse import BLOCK, blocks
from dsa_ext.testing.block_inputs import N_KV, N_Q, B, D, H, make_heads

OP = "coarse_attn_fwd"
native, cpu, fake = callers(OP)


def dense(q: Tensor, k: Tensor, v: Tensor, sm_scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    share = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(share, 1) for t in (k, v))
    logits = q @ k.mT * (q.shape[3] ** -0.5 if sm_scale is None else sm_scale)
    probs = logits.softmax(-1)
    means = [probs[:, :, i : i + BLOCK].mean(2) for i in range(0, q.shape[2], BLOCK)]
    return probs @ v, logits.logsumexp(-1), torch.stack(means, 2)


def check_against_dense(leaves: list[Tensor], sm_scale: float | None = None) -> None:
    for leaf in leaves:
        leaf.requires_grad_()
    results = torch.ops.dsa.coarse_attn_fwd(*leaves, sm_scale=sm_scale)
    expected = dense(*leaves, sm_scale)
    torch.testing.assert_close(results, expected)
    assert not results[2].requires_grad
    upstream = [torch.randn_like(t) for t in results[:2]]
    got = torch.autograd.grad(results[:2], leaves, upstream)
    torch.testing.assert_close(got, torch.autograd.grad(expected[:2], leaves, upstream))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"batch": 2, "dim": 128, "n_q": 64, "n_kv": 64},
        {"heads": 3, "kv_heads": 1, "n_q": 1, "n_kv": 65},
        {"heads": 2, "kv_heads": 2, "n_q": 129, "n_kv": 1},
    ],
)
def test_values_and_gradients(shape: dict[str, int]) -> None:
    check_against_dense(make_heads(**shape))


@pytest.mark.parametrize("sm_scale", [0.3, -0.2, 0.0])
def test_scale(sm_scale: float) -> None:
    check_against_dense(make_heads(), sm_scale)


@settings(max_examples=25, deadline=None)
@given(n_q=st.integers(1, 130), n_kv=st.integers(1, 200), share=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_any_sizes(n_q: int, n_kv: int, share: int, seed: int) -> None:
    check_against_dense(make_heads(1, 2 * share, 2, n_q, n_kv, 64, seed=seed))


def test_gradcheck() -> None:
    leaves = [t.requires_grad_() for t in make_heads(heads=2, kv_heads=1, n_q=3, n_kv=70)]

    def sums(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = torch.ops.dsa.coarse_attn_fwd(*leaves)
        return out, lse

    assert torch.autograd.gradcheck(sums, leaves, fast_mode=True)


def test_gradients_of_one_result() -> None:
    leaves = [t.requires_grad_() for t in make_heads()]
    for i in (0, 1):
        got = torch.autograd.grad(torch.ops.dsa.coarse_attn_fwd(*leaves)[i].sum(), leaves)
        expected = torch.autograd.grad(dense(*leaves)[i].sum(), leaves, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(got, expected)


def test_scores_sum_to_one_and_select_blocks() -> None:
    q, k, v = make_heads(n_q=300)
    out, scores = dsa_ext.coarse_attn(q, k, v)
    assert out.shape == q.shape
    torch.testing.assert_close(scores.sum(-1), torch.ones_like(scores[..., 0]))
    index, _ = dsa_ext.block_select(scores.float(), "topk", topk=5)
    assert index.shape == (B, H, blocks(300), 5)


def test_large_scores() -> None:
    q, k, v = make_heads()
    check_against_dense([q * 1e3, k, v])


def test_layouts() -> None:
    """[B, N, H, D] in memory: the same values, and results in the same layout."""
    heads = make_heads(batch=2)
    expected = torch.ops.dsa.coarse_attn_fwd(*heads)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in heads]
    results = torch.ops.dsa.coarse_attn_fwd(*turned)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    assert results[0].stride() == turned[0].stride()
    for gradient, leaf in zip(torch.autograd.grad(results[0].sum(), turned), turned, strict=True):
        assert gradient.stride() == leaf.stride()


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)])
def test_empty_tensors(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, n_q, n_kv = sizes
    leaves = [t.requires_grad_() for t in make_heads(batch, heads, max(heads, 1), n_q, n_kv)]
    out, lse, scores = torch.ops.dsa.coarse_attn_fwd(*leaves)
    assert scores.shape == (batch, heads, blocks(n_q), n_kv)
    assert not out.any()
    assert (lse == -torch.inf).all()
    (out.sum() + lse.exp().sum()).backward()
    assert not any(leaf.grad is None or leaf.grad.any() for leaf in leaves)


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = make_heads(n_q=300)
    whole = reference.coarse_attn_fwd(*heads)
    monkeypatch.setattr(reference.block_sparse, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(reference.coarse_attn_fwd(*heads), whole)


@pytest.mark.parametrize("keys", [1, 2, 65])
def test_gradients_of_large_scores(keys: int) -> None:
    """They are finite, since the gradients compute scores as the output does, in products of the same sizes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 3, rows, 64, generator=generator).bfloat16() for rows in (12, keys, keys, 12))
    leaves = [(q * 1e27).requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    out, _ = dsa_ext.coarse_attn(*leaves)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out, leaves, dout))


def arguments(**changes: Any) -> dict[str, Any]:
    return {**dict(zip("qkv", make_heads(dtype=torch.bfloat16), strict=True)), **changes}


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), HEAD_ERRORS, ids=[text for _, text in HEAD_ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, OP, arguments(**changes), message)


def test_rows_must_be_aligned() -> None:
    q = zeros(B, H, N_Q, D + 1)[..., 1:]
    with pytest.raises(RuntimeError, match=f"^dsa::{OP}: q"):
        native(**arguments(q=q))


def test_opcheck() -> None:
    leaves = [t.requires_grad_() for t in arguments().values()]
    torch.library.opcheck(torch.ops.dsa.coarse_attn_fwd.default, tuple(leaves))
    torch.library.opcheck(torch.ops.dsa.coarse_attn_fwd.default, (*leaves, 0.3))


def test_compile() -> None:
    torch._dynamo.reset()
    leaves = [t.requires_grad_() for t in make_heads(dtype=torch.float32)]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, scores = dsa_ext.coarse_attn(q, k, v)
        return out.square().sum() + scores.amax()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(loss(*leaves), leaves))


def test_flop_formula() -> None:
    leaves = [t.requires_grad_() for t in make_heads(dtype=torch.float32)]
    with FlopCounterMode(display=False) as counter:
        dsa_ext.coarse_attn(*leaves)[0].sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.dsa.coarse_attn_fwd] == 4 * B * H * N_Q * N_KV * D
    assert counts[torch.ops.dsa.block_sparse_attn_bwd] == 10 * B * H * N_Q * blocks(N_KV) * BLOCK * D
