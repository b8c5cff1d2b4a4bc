"""block_sparse_attn without a GPU: its reference and gradients against dense attention; the operator."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_sparse_errors import HEAD_ERRORS
from callers import assert_error, callers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.reference.block_sparse import BLOCK, blocks
from dsa_ext.testing.block_inputs import N_KV, N_Q, B, BlockInputs, D, H, M, make_block_inputs

OP = "block_sparse_attn_fwd"
native, cpu, fake = callers(OP)


def times_visible(x: BlockInputs) -> Tensor:
    """How many slots list each key for each query: [B, H, Nq, Nkv]."""
    batch, heads, n_q, _ = x.q.shape
    n_kv = x.k.shape[2]
    times = torch.zeros(batch, heads, n_q, n_kv, dtype=x.q.dtype)
    for b in range(batch):
        for h in range(heads):
            for block in range(blocks(n_q)):
                for slot in range(min(int(x.q2k_num[b, h, block]), x.q2k_index.shape[3])):
                    j = int(x.q2k_index[b, h, block, slot])
                    if 0 <= j < blocks(n_kv):
                        end = min(j * BLOCK + min(max(int(x.kv_block_size[j]), 0), BLOCK), n_kv)
                        times[b, h, block * BLOCK : (block + 1) * BLOCK, j * BLOCK : end] += 1
    return times


def dense(x: BlockInputs, sm_scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Dense attention with that mask; a key that is listed twice counts twice."""
    share = x.q.shape[1] // x.k.shape[1]
    k, v = (t.repeat_interleave(share, 1) for t in (x.k, x.v))
    times = times_visible(x)
    scale = x.q.shape[3] ** -0.5 if sm_scale is None else sm_scale
    scores = (x.q @ k.mT * scale + times.log()).masked_fill(times == 0, -torch.inf)
    sees = (times > 0).any(-1, keepdim=True)
    probs = scores.masked_fill(~sees, 0).softmax(-1).masked_fill(~sees, 0)
    return probs @ v, scores.masked_fill(~sees, 0).logsumexp(-1).masked_fill(~sees[..., 0], -torch.inf)


def check_against_dense(x: BlockInputs, sm_scale: float | None = None) -> None:
    leaves = x.leaves()
    out, lse = dsa_ext.block_sparse_attn(*leaves, *x.lists(), sm_scale=sm_scale, return_lse=True)
    expected = dense(x, sm_scale)
    torch.testing.assert_close((out, lse), expected)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    sees = lse != -torch.inf
    # Gradients of rows without a visible key have no effect.
    nan = upstream[0].masked_fill(~sees[..., None], torch.nan), upstream[1].masked_fill(~sees, torch.nan)
    got = torch.autograd.grad((out, lse), leaves, nan)
    zero = upstream[0].masked_fill(~sees[..., None], 0), upstream[1].masked_fill(~sees, 0)
    finite = expected[0], expected[1].masked_fill(~sees, 0)
    torch.testing.assert_close(got, torch.autograd.grad(finite, leaves, zero))


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"batch": 2, "dim": 128, "n_q": 64, "n_kv": 64, "slots": 1},
        {"heads": 3, "kv_heads": 1, "n_q": 1, "n_kv": 65, "slots": 5},
        {"heads": 2, "kv_heads": 2, "n_q": 129, "n_kv": 700, "slots": 11},
    ],
)
def test_values_and_gradients(shape: dict[str, int]) -> None:
    check_against_dense(make_block_inputs(**shape))


def test_scale() -> None:
    check_against_dense(make_block_inputs(), sm_scale=0.3)


@settings(max_examples=25, deadline=None)
@given(
    n_q=st.integers(1, 130), n_kv=st.integers(1, 200), slots=st.integers(1, 5), share=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_any_lists(n_q: int, n_kv: int, slots: int, share: int, seed: int) -> None:
    check_against_dense(make_block_inputs(1, 2 * share, 2, n_q, n_kv, 64, slots, seed=seed))


def test_all_keys_are_valid_by_default() -> None:
    x = make_block_inputs()
    x.kv_block_size.fill_(BLOCK)
    expected = dsa_ext.block_sparse_attn(x.q, x.k, x.v, *x.lists(), return_lse=True)
    got = dsa_ext.block_sparse_attn(x.q, x.k, x.v, x.q2k_index, x.q2k_num, return_lse=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_keys_that_nobody_sees_have_no_effect() -> None:
    x = make_block_inputs(slots=2)
    expected = dsa_ext.block_sparse_attn(x.q, x.k, x.v, *x.lists())
    seen = (times_visible(x) > 0).flatten(0, 1).flatten(0, 1).any(0)
    assert 0 < seen.sum() < N_KV
    x.k.masked_fill_(~seen[:, None], torch.nan)
    x.v.masked_fill_(~seen[:, None], torch.inf)
    out = dsa_ext.block_sparse_attn(*(leaves := x.leaves()), *x.lists())
    torch.testing.assert_close(out, expected)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient[:, :, ~seen] == 0).all() for gradient in gradients[1:])


def test_layouts() -> None:
    """[B, N, H, D] in memory: the same values, and results in the same layout."""
    x = make_block_inputs(batch=2)
    expected = dsa_ext.block_sparse_attn(x.q, x.k, x.v, *x.lists())
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (x.q, x.k, x.v)]
    out = dsa_ext.block_sparse_attn(*turned, *x.lists())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert out.stride() == turned[0].stride()
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), turned), turned, strict=True):
        assert gradient.stride() == leaf.stride()


@pytest.mark.parametrize("sizes", [(0, 2, 5, 5), (1, 0, 5, 5), (1, 2, 0, 5), (1, 2, 5, 0)])
def test_empty_tensors(sizes: tuple[int, int, int, int]) -> None:
    batch, heads, n_q, n_kv = sizes
    x = make_block_inputs(batch, heads, 1 if heads == 0 else heads, n_q, n_kv)
    out, lse = dsa_ext.block_sparse_attn(*x.leaves(), *x.lists(), return_lse=True)
    assert out.shape == x.q.shape
    assert lse.shape == x.q.shape[:3]
    assert (lse == -torch.inf).all() or n_kv > 0
    out.sum().backward()


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_block_inputs()

    def everything() -> tuple[Tensor, ...]:
        out, lse = reference.block_sparse_attn_fwd(x.q, x.k, x.v, *x.lists())
        return out, lse, *reference.block_sparse_attn_bwd(out, x.q, x.k, x.v, out, lse, *x.lists(), dlse=lse)

    whole = everything()
    monkeypatch.setattr(reference.block_sparse, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(everything(), whole, equal_nan=True)


def arguments(**changes: Any) -> dict[str, Any]:
    return {**vars(make_block_inputs(dtype=torch.bfloat16)), **changes}


ERRORS: list[tuple[dict[str, Any], str]] = [
    *HEAD_ERRORS,
    (
        {"q2k_index": torch.zeros(B, H, 2, M)},
        "q2k_index must be int32 [B, H, Mq, M], got float32 [1, 4, 2, 3]",
    ),
    (
        {"q2k_index": torch.zeros(B, H, 3, M).int()},
        "q2k_index must be int32 [B=1, H=4, Mq=2, M], got int32 [1, 4, 3, 3]",
    ),
    (
        {"q2k_index": torch.zeros(B, H, 2, 0).int()},
        "q2k_index must have at least one slot per row, got int32 [1, 4, 2, 0]",
    ),
    ({"q2k_num": torch.zeros(B, H, 1).int()}, "q2k_num must be int32 [B=1, H=4, Mq=2], got int32 [1, 4, 1]"),
    ({"kv_block_size": torch.zeros(3).int()}, "kv_block_size must be int32 [Mkv=4], got int32 [3]"),
    ({"kv_block_size": torch.zeros(4)}, "kv_block_size must be int32 [Mkv], got float32 [4]"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, OP, arguments(**changes), message)


def test_opcheck() -> None:
    args = arguments()
    leaves = [args.pop(name).requires_grad_() for name in ("q", "k", "v")]
    torch.library.opcheck(torch.ops.dsa.block_sparse_attn_fwd.default, (*leaves, *args.values()))
    torch.library.opcheck(torch.ops.dsa.block_sparse_attn_fwd.default, (*leaves, args["q2k_index"], args["q2k_num"]))


def test_compile() -> None:
    torch._dynamo.reset()
    x = make_block_inputs(dtype=torch.float32)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = dsa_ext.block_sparse_attn(q, k, v, *x.lists(), return_lse=True)
        return out.square().sum() + lse.clamp(min=-1).sum()

    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*x.leaves()), x.leaves())
    torch.testing.assert_close(got, torch.autograd.grad(loss(*x.leaves()), x.leaves()))


def test_flop_formula() -> None:
    x = make_block_inputs(dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        dsa_ext.block_sparse_attn(*x.leaves(), *x.lists()).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    product = 2 * B * H * N_Q * M * BLOCK * D
    assert counts[torch.ops.dsa.block_sparse_attn_fwd] == 2 * product
    assert counts[torch.ops.dsa.block_sparse_attn_bwd] == 5 * product
