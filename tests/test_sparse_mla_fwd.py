"""The reference of sparse_mla against loops in float64, and its promises at the edges. All on the CPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_inputs, poison_unselected, spoil_indices, strided_copy
from dsa_ext.testing.tolerances import forward_errors, similarity_error

# The reference takes any width; small ones keep the loops quick.
D_QK, D_V = 12, 8


def make_small(**sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs = make_inputs(d_qk=D_QK, dtype=torch.float64, **{"heads": 4, "s_kv": 16, "topk": 8, **sizes})
    return inputs.q, inputs.kv, spoil_indices(inputs.indices, inputs.kv.shape[1])


def visible_ids(
    indices: Tensor, s_kv: int, b: int, s: int, g: int, causal: bool, q_start: int, positions_per_key: int, length: Any
) -> list[int]:
    """The rule of visibility, for one row."""
    end = (q_start + s + 1) // positions_per_key if causal else s_kv
    row = indices[b, s, g].tolist()
    slots = row if length is None else row[: max(int(length[b, s]), 0)]
    return [i for i in slots if 0 <= i < min(s_kv, end)]


def brute_force(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = D_V,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One row and one head at a time, with Python's floats."""
    batch, seq, heads, d_qk = q.shape
    groups = kv.shape[2]
    scale = 1 / math.sqrt(d_qk) if sm_scale is None else sm_scale
    out = torch.zeros(batch, seq, heads, d_v, dtype=torch.float64)
    lse = torch.full((batch, seq, heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for s in range(seq):
            for h in range(heads):
                g = h // (heads // groups)
                ids = visible_ids(indices, kv.shape[1], b, s, g, causal, q_start, positions_per_key, topk_length)
                if not ids:
                    continue
                keys = [kv[b, i, g] for i in ids]
                scores = [scale * float(q[b, s, h] @ key) for key in keys]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                lse[b, s, h] = top + math.log(sum(weights))
                sink = -math.inf if attn_sink is None else float(attn_sink[h])
                if sink == math.inf:
                    continue
                total = sum(weights) + math.exp(sink - top)
                for weight, key in zip(weights, keys, strict=True):
                    out[b, s, h] += weight / total * key[:d_v]
    return out, lse


def lengths(batch: int, seq: int) -> Tensor:
    """Every length from -2 up, transposed in memory."""
    return (torch.arange(batch * seq, dtype=torch.int32) - 2).view(seq, batch).T


SINK = torch.tensor([-math.inf, -1.0, 2.0, math.inf], dtype=torch.float64)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all keys": {"causal": False},
    "chunk of a longer sequence": {"q_start": 9},
    "compressed keys": {"q_start": 20, "positions_per_key": 4},
    "lengths": {"topk_length": lengths(2, 6), "causal": False},
    "sink": {"attn_sink": SINK},
    "negative scale": {"sm_scale": -0.7},
    "zero scale": {"sm_scale": 0.0},
    "everything": {
        "sm_scale": 0.3,
        "q_start": 30,
        "positions_per_key": 3,
        "topk_length": lengths(2, 6),
        "attn_sink": SINK,
    },
}


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
    assert len(list(reference.sparse_mla.chunks(q, kv, indices, torch.zeros_like(indices).bool()))) == 4
    chunked = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V)
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(reference.sparse_mla_bwd(grads[0], q, kv, *whole, indices, dlse=grads[1]), whole_bwd)


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
    """The reference's forward and backward, tied together as the operator does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None, options: Any) -> Any:
        out, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, attn_sink=sink, **options)
        ctx.save_for_backward(q, kv, indices, sink, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        q, kv, indices, sink, out, lse = ctx.saved_tensors
        dq, dkv, d_sink = reference.sparse_mla_bwd(
            dout, q, kv, out, lse, indices, attn_sink=sink, dlse=dlse, **ctx.options
        )
        return dq, dkv, None, d_sink if sink is not None else None, None


def test_gradients_match_autograd_of_dense_attention() -> None:
    """Distinct ids that list every key: ordinary attention, differentiated by PyTorch."""
    q, kv = (t.requires_grad_() for t in make_small(seq=3, s_kv=8)[:2])
    indices = torch.stack([torch.randperm(8) for _ in range(3)]).int().view(1, 3, 1, 8)
    out, lse = reference.sparse_mla_fwd(q.detach(), kv.detach(), indices, d_v=D_V, causal=False)
    scores = torch.einsum("bshd,bkgd->bshk", q, kv) * D_QK**-0.5
    dense = torch.einsum("bshk,bkgd->bshd", scores.softmax(-1), kv[..., :D_V])
    torch.testing.assert_close(out, dense)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((dense, scores.logsumexp(-1)), (q, kv), (dout, dlse))
    dq, dkv, d_sink = reference.sparse_mla_bwd(
        dout, q.detach(), kv.detach(), out, lse, indices, causal=False, dlse=dlse
    )
    torch.testing.assert_close((dq, dkv), expected)
    assert d_sink.numel() == 0


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
    dq, dkv, _ = reference.sparse_mla_bwd(torch.ones_like(clean[0]), q, poisoned, *clean, indices)
    assert dq.isfinite().all()
    assert dkv.isfinite().all()


def test_a_nan_query_spoils_only_its_own_row_and_keys() -> None:
    q, kv, _ = make_small(seq=2)
    q[0, 0] = math.nan
    indices = torch.tensor([[1, 2, -1], [3, -1, 4]], dtype=torch.int32).view(1, 2, 1, 3)
    out, lse = reference.sparse_mla_fwd(q, kv, indices, d_v=D_V, causal=False)
    _, dkv, _ = reference.sparse_mla_bwd(torch.ones_like(out), q, kv, out, lse, indices, causal=False)
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


def test_tolerances_notice_a_wrong_result() -> None:
    inputs = make_inputs()
    out, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
    for wrong in ((out * 1.01, lse), (out, lse + 1e-3), (out.roll(1, -1), lse), (out, lse.masked_fill(lse < 0, -9.0))):
        with pytest.raises(AssertionError):
            forward_errors(*wrong, inputs.q, inputs.kv, inputs.indices).check()
    empty = inputs.indices.new_full(inputs.indices.shape, -1)
    with pytest.raises(AssertionError):
        forward_errors(out, lse, inputs.q, inputs.kv, empty).check()
    assert similarity_error(out, out) == 0
    assert similarity_error(out, -out) == 2


def test_lse_tolerance_with_many_keys_is_relative() -> None:
    inputs = make_inputs(seq=2, s_kv=2048, heads=4, topk=2048)
    out, lse = reference.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices, causal=False)
    assert ((lse - 8).abs() < 1).all()
    forward_errors(out, lse * (1 + 2e-5), inputs.q, inputs.kv, inputs.indices, causal=False).check()
    with pytest.raises(AssertionError):
        forward_errors(out, lse * (1 + 1e-4), inputs.q, inputs.kv, inputs.indices, causal=False).check()


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("scale", [None, -0.1])
def test_lse_tolerance_near_zero_is_the_resolution_of_fp32(scale: float | None, sign: int) -> None:
    """One visible key whose products with q cancel; a hidden key with large products does not widen the limit."""
    q = torch.ones(1, 1, 2, 576)
    kv = torch.ones(1, 2, 1, 576)
    kv[..., ::2] = -1
    kv[:, 1] *= 1e6
    indices = torch.tensor([0, 1], dtype=torch.int32).view(1, 1, 1, 2)
    out, lse = reference.sparse_mla_fwd(q, kv, indices, sm_scale=scale)
    assert (lse == 0).all()
    resolution = 2**-23 * 576 * (576**-0.5 if scale is None else abs(scale))
    forward_errors(out, lse + sign * (resolution + 0.9e-6), q, kv, indices, sm_scale=scale).check()
    with pytest.raises(AssertionError):
        forward_errors(out, lse + sign * 3 * resolution, q, kv, indices, sm_scale=scale).check()


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
    dq, dkv, _ = reference.sparse_mla_bwd(torch.ones_like(out), inputs.q, inputs.kv, out, lse, indices, **options)
    assert dq.shape == inputs.q.shape
    assert dkv.shape == inputs.kv.shape
    assert dq.isfinite().all()
    assert dkv.isfinite().all()
