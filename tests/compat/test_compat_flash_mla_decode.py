"""flash_mla_with_kvcache without a GPU: results against loops in float64, and what is not served."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import dsa_ext
from dsa_ext.compat import flash_mla

ROPE = {576: 64, 512: 0}


def dequantized(cache: Tensor, d_qk: int) -> Tensor:
    """Keys [slots, D] in float64 of a packed cache [blocks, page, 1, bytes]."""
    tokens = cache.flatten(0, 2)
    numbers = tokens[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = tokens[:, 512:528].contiguous().view(torch.float32).double()
    rope = tokens[:, 528:].contiguous().view(torch.bfloat16).double()
    keys = torch.cat([numbers * scales.repeat_interleave(128, 1), rope], 1)
    assert keys.shape[1] == d_qk
    return keys


def decode_inputs(d_qk: int = 576, page: int = 64, batch: int = 3, queries: int = 2, heads: int = 5) -> Any:
    """q, a packed cache whose unlisted slots hold NaN, and indices with padding."""
    generator = torch.Generator().manual_seed(page)
    slots = 4 * page
    q = torch.randn(batch, queries, heads, d_qk, generator=generator).bfloat16()
    cache = dsa_ext.pack_kv_fp8(torch.randn(4, page, 1, d_qk, generator=generator).bfloat16())
    indices = torch.randint(slots, (batch, queries, 9), generator=generator, dtype=torch.int32)
    indices[0, :, 2::4] = -1
    indices[1] = -1
    unlisted = torch.ones(slots, dtype=torch.bool)
    unlisted[indices[indices >= 0].long()] = False
    cache.view(slots, -1)[unlisted] = 255  # NaN as e4m3, fp32 and bf16
    return q, cache, indices


def loops(q: Tensor, keys: Tensor, indices: Tensor, scale: float, sink: Tensor | None, lengths: Tensor | None) -> Any:
    batch, queries, heads, _ = q.shape
    out = torch.zeros(batch, queries, heads, 512, dtype=torch.float64)
    lse = torch.full((batch, heads, queries), math.inf, dtype=torch.float64)
    for b in range(batch):
        for n in range(queries):
            ids = indices[b, n, : None if lengths is None else int(lengths[b])].long()
            listed = keys[ids[(ids >= 0) & (ids < len(keys))]]
            for h in range(heads if len(listed) else 0):
                scores = listed @ q[b, n, h].double() * scale
                lse[b, h, n] = scores.logsumexp(0)
                share = 1.0 if sink is None else torch.sigmoid(lse[b, h, n] - sink[h])
                out[b, n, h] = scores.softmax(0) @ listed[:, :512] * share
    return out, lse


def call(q: Tensor, cache: Tensor, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    metadata, splits = flash_mla.get_mla_metadata()
    if q.shape[3] == 512 and cache.element_size() == 1:
        options["kv_format"] = "V32_NO_ROPE"
    return flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, metadata, splits, is_fp8_kvcache=True, indices=indices, **options
    )


@pytest.mark.parametrize("page", [1, 2, 53, 64])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_decode(d_qk: int, page: int) -> None:
    q, cache, indices = decode_inputs(d_qk, page)
    keys = dequantized(cache, d_qk).nan_to_num()
    sink, lengths = torch.tensor([0.5, math.inf, -math.inf, 1, 2]), torch.tensor([9, 3, 4], dtype=torch.int32)
    for options in ({}, {"attn_sink": sink}, {"topk_length": lengths}):
        got = call(q, cache, indices, softmax_scale=0.03, **options)
        assert [t.dtype for t in got] == [torch.bfloat16, torch.float32]
        expected = loops(q, keys, indices, 0.03, options.get("attn_sink"), options.get("topk_length"))
        torch.testing.assert_close(got[0].double(), expected[0], rtol=2**-7, atol=2e-3)
        torch.testing.assert_close(got[1].double(), expected[1], rtol=3e-5, atol=1e-5)


def test_types_and_layouts_of_the_cache() -> None:
    q, cache, indices = decode_inputs()
    expected = call(q, cache, indices)
    for same in (cache.view(torch.int8), cache.view(torch.float8_e4m3fn)):
        assert all(torch.equal(a, b) for a, b in zip(call(q, same, indices), expected, strict=True))
    longer_pages = torch.cat([cache, cache], 1)[:, :64]
    assert all(torch.equal(a, b) for a, b in zip(call(q, longer_pages, indices), expected, strict=True))


def test_bf16_cache() -> None:
    q, cache, indices = decode_inputs()
    keys = dequantized(cache, 576).nan_to_num().bfloat16()
    out, lse = call(q, keys.view(4, 64, 1, 576), indices)
    expected = loops(q, keys.double(), indices, 576**-0.5, None, None)
    torch.testing.assert_close(out.double(), expected[0], rtol=2**-7, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected[1], rtol=3e-5, atol=1e-5)


@pytest.mark.parametrize("metadata", [None, (), torch.empty(0), flash_mla.FlashMLASchedMeta()], ids=str)
def test_metadata_of_any_type(metadata: Any) -> None:
    q, cache, indices = decode_inputs()
    got = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, metadata, metadata, indices=indices)
    assert all(torch.equal(a, b) for a, b in zip(got, call(q, cache, indices), strict=True))


def test_results_have_no_gradient() -> None:
    q, cache, indices = decode_inputs()
    assert not call(q.requires_grad_(), cache, indices)[0].requires_grad


def test_forward_mode_is_an_error() -> None:
    q, cache, indices = decode_inputs()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="sparse_mla_decode: forward-mode differentiation"):
        call(forward_ad.make_dual(q, torch.ones_like(q)), cache, indices)


def test_compiles() -> None:
    q, cache, indices = decode_inputs()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected = call(q, cache, indices)
    assert all(torch.equal(a, b) for a, b in zip(compiled(q, cache, indices), expected, strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"indices": None}, "dense decoding"),
        ({"extra_k_cache": torch.empty(0)}, "extra_k_cache"),
        ({"extra_indices_in_kvcache": torch.empty(0)}, "extra_k_cache"),
        ({"extra_topk_length": torch.empty(0)}, "extra_k_cache"),
        ({"descale_q": torch.empty(0)}, "descale_q"),
        ({"k_cache": torch.empty(4, 64, 1, 584, dtype=torch.uint8)}, "caches of DeepSeek-V4 "),
        ({"k_cache": torch.empty(4, 64, 1, 528, dtype=torch.uint8)}, "caches of 528 bytes per token without kv_format"),
    ],
)
def test_not_served(options: dict[str, Any], text: str) -> None:
    q, cache, indices = decode_inputs()
    args = {"q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "indices": indices} | options
    with pytest.raises(NotImplementedError, match=rf"^dsa_ext\.compat\.flash_mla does not serve {text}"):
        flash_mla.flash_mla_with_kvcache(**args)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"causal": True}, "causal must be False with indices, got True"),
        ({"kv_format": "V32_NO_ROPE"}, "k_cache must have 656 bytes per token, or 528 and"),
        ({"kv_format": "V3.2"}, "kv_format must be None, 'V32' or 'V32_NO_ROPE', got 'V3.2'"),
        (
            {"k_cache": torch.empty(4, 64, 1, 528, dtype=torch.uint8), "kv_format": "V32"},
            "k_cache must have 656 bytes per token, or 528 and kv_format='V32_NO_ROPE', got 528 and kv_format='V32'",
        ),
        ({"head_dim_v": 576}, r"\(Dqk, d_v\) must be"),
        ({"topk_length": torch.ones(3, dtype=torch.int64)}, "topk_length must be int32"),
        ({"topk_length": torch.ones(3, 1, dtype=torch.int32)}, r"topk_length must be int32 .*, got int32 \[3, 1\]"),
        ({"topk_length": 4}, "topk_length must be int32 of one dimension, got 4"),
        ({"q": None}, "flash_mla_with_kvcache: q must be a tensor, got NoneType"),
        ({"k_cache": [1]}, "k_cache must be a tensor, got list"),
        ({"indices": 3}, "indices must be a tensor, got int"),
        ({"k_cache": torch.zeros(4, 64, 656, dtype=torch.uint8)}, r"k_cache must be \[blocks, page, 1, columns\], got"),
        ({"k_cache": torch.zeros(4, 64, 1, 656).bool()}, "k_cache must be uint8, int8, float8_e4m3fn or bfloat16, got"),
        ({"k_cache": torch.zeros(4, 64, 1, 576).half()}, r"k_cache must be .*, got float16 \[4, 64, 1, 576\]"),
        (
            {"k_cache": torch.zeros(4, 64, 1, 576).bfloat16(), "kv_format": "V32"},
            "kv_format must be None with a cache in bfloat16, got 'V32'",
        ),
    ],
)
def test_errors(options: dict[str, Any], text: str) -> None:
    q, cache, indices = decode_inputs()
    args = {"q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "indices": indices} | options
    with pytest.raises(RuntimeError, match=text):
        flash_mla.flash_mla_with_kvcache(**args)


def test_queries_of_one_dimension_are_an_error() -> None:
    q, cache, indices = decode_inputs()
    lengths = torch.ones(len(q), dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"flash_mla_with_kvcache: q must be \[B, N, H, D\], got bfloat16 \["):
        flash_mla.flash_mla_with_kvcache(q.flatten(), cache, None, None, indices=indices, topk_length=lengths)
