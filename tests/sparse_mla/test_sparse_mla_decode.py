"""sparse_mla_decode without a GPU: its reference against loops in float64; the operator: errors and fake tensors."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers, to_fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_mla_cases import brute_force
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.reference.decode import used_slots
from dsa_ext.testing.calls import ORDINARY
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_cache, poison_cache, spoil_indices, strided_cache
from dsa_ext.testing.tolerances import check

OP = torch.ops.dsa.sparse_mla_decode.default


def unpacked(kv_cache: Tensor) -> Tensor:
    """All slots of a cache in float64 [slots, D]."""
    rows = kv_cache.flatten(0, 2)
    return reference.unpack_kv_fp8(rows, torch.float64) if rows.dtype == torch.uint8 else rows.double()


def expected(q: Tensor, kv_cache: Tensor, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """One row and one head at a time, with Python's floats."""
    kv = unpacked(kv_cache)[None, :, None].expand(len(q), -1, -1, -1)
    return brute_force(q.double(), kv, indices[:, :, None], d_v=512, causal=False, **options)


@pytest.mark.parametrize(("packed", "d_qk", "page"), list(itertools.product((False, True), (576, 512), (1, 7))))
def test_matches_brute_force(packed: bool, d_qk: int, page: int) -> None:
    inputs = make_cache(2, 3, 14 // page, page, 2, 9, d_qk, packed=packed, dtype=torch.float64)
    indices = spoil_indices(inputs.indices, 14)
    lengths = torch.tensor([[9, 0, 4], [-3, 100, 1]], dtype=torch.int32)
    sink = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    for options in ({}, {"topk_length": lengths}, {"attn_sink": sink, "sm_scale": -0.03, "topk_length": lengths}):
        out, lse = OP(inputs.q, inputs.kv_cache, indices, **options)
        exact, exact_lse = expected(inputs.q, inputs.kv_cache, indices, **options)
        torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, exact_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("packed", [False, True])
def test_more_slots_than_ids(packed: bool) -> None:
    """A cache with more slots than int32 can name, all of them the same memory."""
    inputs = make_cache(1, 2, 1, 1, 3, 4, packed=packed, dtype=torch.float64)
    ids = torch.tensor([0, INT32_MAX, -1, 17], dtype=torch.int32).expand(1, 2, 4)
    same = torch.tensor([0, 0, -1, 0], dtype=torch.int32).expand(1, 2, 4)
    for blocks in (2**31, 2**31 + 5, 2**32 + 1):
        cache = inputs.kv_cache.expand(blocks, -1, -1, -1)
        for a, b in zip(OP(inputs.q, cache, ids), OP(inputs.q, inputs.kv_cache, same), strict=True):
            torch.testing.assert_close(a, b)


def test_equals_sparse_mla_over_unpacked_keys() -> None:
    inputs = make_cache(1, 4, 3, 20, 5, 30)
    kv = unpacked(inputs.kv_cache)[None, :, None]
    out, lse = dsa_ext.sparse_mla_decode(inputs.q.double(), inputs.kv_cache, inputs.indices)
    sparse = dsa_ext.sparse_mla(inputs.q.double(), kv, inputs.indices[:, :, None], causal=False, return_lse=True)
    torch.testing.assert_close((out, lse), sparse)


@pytest.mark.parametrize("packed", [False, True])
def test_slots_that_nobody_lists_may_hold_anything(packed: bool) -> None:
    inputs = make_cache(2, 2, 9, 5, 3, 7, packed=packed)
    indices = spoil_indices(inputs.indices, 45)
    lengths = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32)
    args = {"indices": indices, "topk_length": lengths}
    clean = OP(inputs.q, inputs.kv_cache, **args)
    used = used_slots(indices, lengths) & (indices >= 0) & (indices < 45)
    poisoned = poison_cache(inputs.kv_cache, indices[used])
    assert unpacked(poisoned).isnan().any()
    for cache in (poisoned, strided_cache(poisoned)):
        for a, b in zip(OP(inputs.q, cache, **args), clean, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("sink", [None, -math.inf, 0.5, math.inf])
def test_tokens_without_a_key(sink: float | None) -> None:
    inputs = make_cache(1, 2, 4, 4, 4, 4)
    attn_sink = None if sink is None else torch.full((4,), sink)
    for ids in (torch.tensor([INT32_MIN, -1, 16, INT32_MAX], dtype=torch.int32).expand(1, 2, 4), inputs.indices):
        lengths = torch.tensor([[0, INT32_MIN]], dtype=torch.int32) if ids is inputs.indices else None
        for inf_if_empty in (False, True):
            options = {"topk_length": lengths, "attn_sink": attn_sink, "inf_if_empty": inf_if_empty}
            out, lse = OP(inputs.q, inputs.kv_cache, ids, **options)
            assert (out == 0).all()
            assert (lse == (math.inf if inf_if_empty else -math.inf)).all()


def test_inf_if_empty_concerns_tokens_without_a_key_only() -> None:
    args = changed(topk_length=torch.tensor([[0, 3, 8], [8, 0, 1]], dtype=torch.int32))
    out, lse = OP(**args)
    args["inf_if_empty"] = True
    assert torch.equal(OP(**args)[0], out)
    infinite = OP(**args)[1]
    assert torch.equal(infinite, lse.masked_fill(args["topk_length"][..., None] == 0, math.inf))
    check("sparse_mla_decode", (out, infinite), args)
    with pytest.raises(AssertionError, match="lse"):
        check("sparse_mla_decode", (out, lse), args)


def test_a_nan_stays_with_the_tokens_that_list_it() -> None:
    inputs = make_cache(1, 3, 4, 4, 2, 2)
    indices = torch.tensor([[[0, 1], [5, 2], [7, -1]]], dtype=torch.int32)
    for byte, value in ((100, 0x7F), (515, 0x7F), (600, 0xFF)):
        cache = inputs.kv_cache.clone()
        cache[1, 1, 0, byte : byte + 2] = value  # an e4m3 NaN, a scale of NaN, a rope part of NaN
        cache[1, 1, 0, 512:516] = torch.tensor([0, 0, 0xC0, 0x7F], dtype=torch.uint8) if byte == 515 else 0
        out, lse = OP(inputs.q, cache, indices)
        assert out[0, 1].isnan().all()
        assert lse[0, 1].isnan().all()
        assert out[0, [0, 2]].isfinite().all()


def test_lengths_of_sequences() -> None:
    inputs = make_cache(3, 2, 4, 4, 2, 8)
    lengths = torch.tensor([3, 8, 0], dtype=torch.int32)
    of_tokens = lengths[:, None].expand(3, 2).contiguous()
    args = (inputs.q, inputs.kv_cache, inputs.indices)
    got = dsa_ext.sparse_mla_decode(*args, topk_length=lengths)
    assert all(
        torch.equal(a, b) for a, b in zip(got, dsa_ext.sparse_mla_decode(*args, topk_length=of_tokens), strict=True)
    )
    for count in (1, 2, 6):
        with pytest.raises(RuntimeError, match=rf"topk_length must be int32 \[B, N\], got int32 \[{count}\]"):
            dsa_ext.sparse_mla_decode(*args, topk_length=lengths.repeat(2)[:count])
    with pytest.raises(RuntimeError, match=r"q must be bfloat16 \[B, N, H, Dqk\], got bfloat16 \[576\]"):
        dsa_ext.sparse_mla_decode(args[0][0, 0, 0], *args[1:], topk_length=lengths)


@pytest.mark.parametrize("page", [1, 53, 61, 64, 69, 576])
@pytest.mark.parametrize("packed", [False, True])
def test_bf16_meets_the_tolerances(page: int, packed: bool) -> None:
    inputs = make_cache(2, 2, 700 // page + 1, page, 6, 48, packed=packed)
    args = {"q": inputs.q, "kv_cache": inputs.kv_cache, "indices": spoil_indices(inputs.indices, 700)}
    check("sparse_mla_decode", OP(**args), args)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_edges(data: st.DataObject) -> None:
    """Odd sizes, any ids and lengths, empty tensors among them."""
    draw = data.draw
    batch, tokens, heads = draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    blocks, page, topk = draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    inputs = make_cache(batch, tokens, blocks, page, heads, topk, packed=draw(st.booleans()), dtype=torch.float64)
    ids = st.one_of(st.integers(-2, blocks * page + 1), st.sampled_from([INT32_MIN, INT32_MAX]))
    count = batch * tokens * topk
    indices = torch.tensor(draw(st.lists(ids, min_size=count, max_size=count)), dtype=torch.int32)
    lengths = draw(st.lists(st.integers(-1, topk + 1), min_size=batch * tokens, max_size=batch * tokens))
    args = (inputs.q, inputs.kv_cache, indices.view(batch, tokens, topk))
    options = {"topk_length": torch.tensor(lengths, dtype=torch.int32).view(batch, tokens)}
    options["topk_length"] = options["topk_length"] if draw(st.booleans()) else None
    for got, exact in zip(OP(*args, **options), expected(*args, **options), strict=True):
        torch.testing.assert_close(got, exact)


# ---- errors


def changed(**changes: Any) -> dict[str, Any]:
    return ORDINARY["sparse_mla_decode"]() | changes


BF16_CACHE = torch.zeros(4, 10, 1, 576, dtype=torch.bfloat16)
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q without tokens": (
        {"q": torch.zeros(2, 8, 576).bfloat16()},
        "q must be bfloat16 [B, N, H, Dqk], got bfloat16 [2, 8, 576]",
    ),
    "width": (
        {"q": torch.zeros(2, 3, 8, 64).bfloat16()},
        "(Dqk, d_v) must be (576, 512) or (512, 512), got (64, 512)",
    ),
    "d_v": ({"d_v": 576}, "(Dqk, d_v) must be (576, 512) or (512, 512), got (576, 576)"),
    "bytes": (
        {"kv_cache": torch.zeros(4, 10, 1, 528, dtype=torch.uint8)},
        "kv_cache must be uint8 [blocks, page, G=1, bytes=656], got uint8 [4, 10, 1, 528]",
    ),
    "columns": (
        {"kv_cache": BF16_CACHE[..., :512]},
        "kv_cache must be bfloat16 or uint8 [blocks, page, G=1, Dqk=576], got bfloat16 [4, 10, 1, 512]",
    ),
    "groups": (
        {"kv_cache": BF16_CACHE.expand(4, 10, 2, 576)},
        "kv_cache must be bfloat16 or uint8 [blocks, page, G=1, Dqk=576], got bfloat16 [4, 10, 2, 576]",
    ),
    "dtype of the cache": (
        {"kv_cache": BF16_CACHE.half()},
        "kv_cache must be bfloat16 or uint8 [blocks, page, G, Dqk], got float16 [4, 10, 1, 576]",
    ),
    "dtype of ids": (
        {"indices": torch.zeros(2, 3, 24, dtype=torch.int64)},
        "indices must be int32 [B, N, K], got int64 [2, 3, 24]",
    ),
    "tokens of ids": (
        {"indices": torch.zeros(2, 1, 24, dtype=torch.int32)},
        "indices must be int32 [B=2, N=3, K], got int32 [2, 1, 24]",
    ),
    "no slots": (
        {"indices": torch.zeros(2, 3, 0, dtype=torch.int32)},
        "indices must have at least one slot per row, got int32 [2, 3, 0]",
    ),
    "lengths": (
        {"topk_length": torch.zeros(2, dtype=torch.int32)},
        "topk_length must be int32 [B, N], got int32 [2]",
    ),
    "sink": ({"attn_sink": torch.zeros(9)}, "attn_sink must be float32 [H=8], got float32 [9]"),
    "heads": ({"q": torch.zeros(2, 3, 129, 576).bfloat16()}, "q must have at most 128 heads, got 129"),
    "scale": ({"sm_scale": 1e39}, "sm_scale must be from -2^127 to 2^127, got 1e+39"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("caller", range(3), ids=["native", "cpu", "fake"])
def test_errors(name: str, caller: int) -> None:
    changes, message = ERRORS[name]
    assert_error(callers("sparse_mla_decode")[caller], "sparse_mla_decode", changed(**changes), message)


STRIDES: dict[str, tuple[dict[str, Any], str]] = {
    "columns": (
        {"kv_cache": torch.zeros(4, 10, 1, 2 * 656, dtype=torch.uint8)[..., ::2]},
        "kv_cache must have stride 1 in its last dimension, got stride 2",
    ),
    "ids": (
        {"indices": torch.zeros(2, 3, 48, dtype=torch.int32)[..., ::2]},
        "indices must have stride 1 in its last dimension, got stride 2",
    ),
}


@pytest.mark.parametrize("name", STRIDES)
def test_layouts_that_the_kernel_cannot_read(name: str) -> None:
    changes, message = STRIDES[name]
    assert_error(callers("sparse_mla_decode")[0], "sparse_mla_decode", changed(**changes), message)


def test_a_cache_whose_rows_are_not_aligned() -> None:
    cache = torch.zeros(4, 10, 1, 664, dtype=torch.uint8)[..., :656]
    with pytest.raises(RuntimeError, match="kv_cache must have rows that start 16-byte aligned"):
        callers("sparse_mla_decode")[0](**changed(kv_cache=cache))


# ---- the operator


@pytest.mark.parametrize("run", callers("sparse_mla_decode")[1:], ids=["cpu", "fake"])
def test_results(run: Callable[..., Any]) -> None:
    out, lse = run(**changed())
    assert (out.shape, out.dtype) == ((2, 3, 8, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 3, 8), torch.float32)
    assert out.is_contiguous()
    assert lse.is_contiguous()


def test_flops() -> None:
    args = changed()
    with FlopCounterMode(display=False) as counter:
        OP(**args)
    assert counter.get_total_flops() == 2 * 6 * 8 * 24 * (576 + 512)


def test_no_gradient() -> None:
    args = changed()
    out, lse = dsa_ext.sparse_mla_decode(args["q"].requires_grad_(), args["kv_cache"], args["indices"])
    assert not out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    args = ORDINARY["sparse_mla_decode"](packed=packed)
    lengths = torch.tensor([[24, 0, 3], [9, 30, -1]], dtype=torch.int32)
    torch.library.opcheck(OP, tuple(args.values()), {"topk_length": lengths, "attn_sink": torch.linspace(-1, 1, 8)})


def test_symbolic_sizes() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        args = {name: mode.from_tensor(to_fake_cuda(value)) for name, value in changed().items()}
        out, _ = OP(**args)
        assert out.shape[3] == 512
