"""indexer_scores without a GPU: its reference and gradients against indexer_logits; the operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_indexer_inputs

OP = torch.ops.dsa.indexer_scores.default
native, cpu, fake = callers("indexer_scores")
S, S_KV, HI, DI, K = 4, 16, 8, 64, 5


def make_indices(seq: int, s_kv: int, slots: int, seed: int = 0) -> Tensor:
    """Random ids, some of them padding; the first query has only padding."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(-2, s_kv + 2, (seq, slots), generator=generator, dtype=torch.int32)
    indices[:, -1:] = INT32_MAX
    indices[:1] = INT32_MIN
    return indices


def arguments(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    inputs = make_indexer_inputs(S, S_KV, HI, DI, dtype=dtype)
    tensors = {"q": inputs.q, "k": inputs.k, "weights": inputs.weights, "indices": make_indices(S, S_KV, K)}
    return {**tensors, **changes}


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(S, DI).bfloat16()}, "q must be bfloat16 [S, Hi, Di], got bfloat16 [4, 64]"),
    ({"q": torch.zeros(S, HI, DI).half()}, "q must be bfloat16 [S, Hi, Di], got float16 [4, 8, 64]"),
    ({"k": torch.zeros(S_KV, DI).half()}, "k must be bfloat16 [S_kv, Di], got float16 [16, 64]"),
    ({"k": torch.zeros(S_KV, 128).bfloat16()}, "k must be bfloat16 [S_kv, Di=64], got bfloat16 [16, 128]"),
    ({"weights": torch.zeros(S, HI).bfloat16()}, "weights must be float32 [S, Hi], got bfloat16 [4, 8]"),
    ({"weights": torch.zeros(HI, S)}, "weights must be float32 [S=4, Hi=8], got float32 [8, 4]"),
    ({"indices": torch.zeros(S, K).long()}, "indices must be int32 [S, K], got int64 [4, 5]"),
    ({"indices": torch.zeros(1, S, K).int()}, "indices must be int32 [S, K], got int32 [1, 4, 5]"),
    ({"indices": torch.zeros(K, S).int()}, "indices must be int32 [S=4, K], got int32 [5, 4]"),
    (
        {"q": torch.zeros(S, 12, DI).bfloat16(), "weights": torch.zeros(S, 12)},
        "q's heads must be 8, 16, 32 or 64, got 12",
    ),
    (
        {"q": torch.zeros(S, HI, 96).bfloat16(), "k": torch.zeros(S_KV, 96).bfloat16()},
        "q's head dimension must be 64 or 128, got 96",
    ),
]
NATIVE_ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"k": torch.zeros(S_KV, DI + 4).bfloat16()[:, :DI]},
        "k must have rows that start 16-byte aligned: strides in multiples of 8 elements, got stride 68 in dimension 0",
    ),
    (
        {"indices": torch.zeros(S, 2 * K).int()[:, ::2]},
        "indices must have stride 1 in its last dimension, got stride 2",
    ),
    ({"weights": torch.zeros(2 * HI, S).T[:, ::2]}, "q must be on a CUDA device, got cpu"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, "indexer_scores", arguments(**changes), message)


@pytest.mark.parametrize(("changes", "message"), NATIVE_ERRORS, ids=[text for _, text in NATIVE_ERRORS])
def test_native_errors(changes: dict[str, Any], message: str) -> None:
    assert_error(native, "indexer_scores", arguments(**changes), message)


def gathered_logits(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """The scores, gathered from the logits of all keys."""
    s_kv = len(k)
    logits = torch.einsum("shd,td->sht", q, k).relu().mul(weights[..., None]).sum(1)
    named = (indices >= 0) & (indices < s_kv)
    return logits.gather(1, torch.where(named, indices, 0).long()).masked_fill(~named, -torch.inf)


@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (64, 128)])
def test_values_and_gradients(heads: int, dim: int) -> None:
    inputs = make_indexer_inputs(6, 20, heads, dim, dtype=torch.float64)
    indices = make_indices(6, 20, 9)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.weights)]
    scores = dsa_ext.indexer_scores(*leaves, indices)
    expected = gathered_logits(*leaves, indices)
    torch.testing.assert_close(scores, expected)
    upstream = torch.randn(6, 9, dtype=torch.float64)
    got = torch.autograd.grad(scores, leaves, upstream.masked_fill(scores == -torch.inf, torch.nan))
    wanted = torch.autograd.grad(expected, leaves, upstream)
    torch.testing.assert_close(got, wanted)


def test_gradcheck() -> None:
    inputs = make_indexer_inputs(3, 7, 8, 64, dtype=torch.float64)
    indices = torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.weights)]
    assert torch.autograd.gradcheck(lambda *args: dsa_ext.indexer_scores(*args, indices), leaves, fast_mode=True)


def test_what_nobody_lists_has_no_effect() -> None:
    args = arguments(torch.float64)
    expected = dsa_ext.indexer_scores(**args)
    listed = torch.zeros(S_KV + 1, dtype=torch.bool)
    listed[args["indices"].clamp(-1, S_KV).long()] = True
    args["k"] = args["k"].masked_fill(~listed[:S_KV, None], torch.nan)
    leaves = [args[name].requires_grad_() for name in ("q", "k", "weights")]
    scores = dsa_ext.indexer_scores(**args)
    torch.testing.assert_close(scores, expected)
    gradients = torch.autograd.grad(scores.masked_fill(scores == -torch.inf, 0).sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][0] == 0).all()
    assert (gradients[1][~listed[:S_KV]] == 0).all()


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(torch.float64)
    upstream = torch.randn(S, K, dtype=torch.float64)
    whole = reference.indexer_scores(**args), *reference.indexer_scores_bwd(upstream, **args)
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 1)
    parts = reference.indexer_scores(**args), *reference.indexer_scores_bwd(upstream, **args)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 5, 0)])
def test_empty_tensors(sizes: tuple[int, int, int]) -> None:
    seq, s_kv, slots = sizes
    inputs = make_indexer_inputs(seq, s_kv, 8, 64, dtype=torch.bfloat16)
    scores = dsa_ext.indexer_scores(inputs.q.requires_grad_(), inputs.k, inputs.weights, make_indices(seq, s_kv, slots))
    assert scores.shape == (seq, slots)
    scores.sum().backward()


def test_opcheck() -> None:
    args = arguments()
    torch.library.opcheck(
        OP, (args["q"].requires_grad_(), args["k"].requires_grad_(), args["weights"], args["indices"])
    )


def test_compile() -> None:
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        scores = dsa_ext.indexer_scores(q, k, weights, indices)
        return dsa_ext.indexer_loss(scores, torch.ones_like(scores), valid=indices >= 0)

    args = arguments(torch.float32)
    leaves = [args[name].requires_grad_() for name in ("q", "k", "weights")]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(**args), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(loss(**args), leaves))


def test_flop_formula() -> None:
    with FlopCounterMode(display=False) as counter:
        dsa_ext.indexer_scores(**arguments())
    assert counter.get_flop_counts()["Global"][torch.ops.dsa.indexer_scores] == 2 * S * HI * K * DI
