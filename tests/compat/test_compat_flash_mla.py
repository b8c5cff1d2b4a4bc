"""dsa_ext.compat.flash_mla without a GPU: results against loops in float64, and what it does not serve."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import dsa_ext
from dsa_ext.compat import flash_mla
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_inputs


def prefill_inputs(
    rows: int = 5, heads: int = 3, keys: int = 30, slots: int = 12, d_qk: int = 576
) -> tuple[Tensor, ...]:
    """Packed q, kv and indices, with padding in every form."""
    inputs = make_inputs(seq=rows, s_kv=keys, heads=heads, topk=slots, d_qk=d_qk)
    indices = inputs.indices[0].clone()
    indices[0, 0, 1::3] = torch.tensor([-1, keys, INT32_MAX, INT32_MIN], dtype=torch.int32)
    indices[3] = -1
    return inputs.q[0], inputs.kv[0], indices


def attend(q: Tensor, keys: Tensor, scale: float, sink: float | None) -> tuple[Tensor, float, float]:
    """Output, largest score and lse of one head, as FlashMLA defines them."""
    if len(keys) == 0:
        return torch.zeros(512, dtype=torch.float64), -math.inf, math.inf
    scores = keys @ q * scale
    lse = scores.logsumexp(0)
    share = 1.0 if sink is None else float(torch.sigmoid(lse - sink))
    return scores.softmax(0) @ keys[:, :512] * share, float(scores.max()), float(lse)


def loops(q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor | None, lengths: Tensor | None) -> Any:
    q, kv = q.double(), kv.double()
    rows, heads, _ = q.shape
    out = torch.empty(rows, heads, 512, dtype=torch.float64)
    largest, lse = (torch.empty(rows, heads, dtype=torch.float64) for _ in range(2))
    for s in range(rows):
        ids = indices[s, 0, : None if lengths is None else max(0, int(lengths[s]))].long()
        keys = kv[ids[(ids >= 0) & (ids < len(kv))], 0]
        for h in range(heads):
            head_sink = None if sink is None else float(sink[h])
            out[s, h], largest[s, h], lse[s, h] = attend(q[s, h], keys, scale, head_sink)
    return out, largest, lse


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b, (rtol, atol) in zip(got, expected, ((2**-7, 1e-3), (3e-5, 1e-5), (3e-5, 1e-5)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)


@pytest.mark.parametrize("with_lengths", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_prefill(d_qk: int, with_sink: bool, with_lengths: bool) -> None:
    q, kv, indices = prefill_inputs(d_qk=d_qk)
    sink = torch.tensor([0.5, math.inf, -math.inf]) if with_sink else None
    lengths = torch.tensor([12, 3, 0, 5, -7], dtype=torch.int32) if with_lengths else None
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05, attn_sink=sink, topk_length=lengths)
    assert [t.dtype for t in got if t is not None] == [torch.bfloat16, torch.float32, torch.float32]
    assert_close(got, loops(q, kv, indices, 0.05, sink, lengths))  # type: ignore[arg-type]


def test_prefill_has_the_bits_of_sparse_mla() -> None:
    q, kv, indices = prefill_inputs(heads=8)
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)
    options: Any = {"causal": False, "sm_scale": 0.05, "return_lse": True, "return_max_logits": True}
    own = dsa_ext.sparse_mla(q, kv, indices, **options)
    assert torch.equal(out, own[0])
    assert torch.equal(largest, own[2])
    assert torch.equal(lse, own[1].masked_fill(own[1] == -math.inf, math.inf))


def test_prefill_by_keyword_with_layouts() -> None:
    """As SGLang calls it, with rows of larger tensors."""
    q, kv, indices = prefill_inputs()
    expected = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)
    wide = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (q, kv, indices)]
    got = flash_mla.flash_mla_sparse_fwd(q=wide[0], kv=wide[1], indices=wide[2], sm_scale=0.05, d_v=512)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_prefill_without_lse() -> None:
    q, kv, indices = prefill_inputs()
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05, use_legacy=True, return_log2_lse=False)
    assert torch.equal(out, flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)[0])
    assert largest is None
    assert lse is None


def test_results_have_no_gradient() -> None:
    q, kv, indices = prefill_inputs()
    assert not flash_mla.flash_mla_sparse_fwd(q.requires_grad_(), kv, indices, 0.05)[0].requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"out": torch.empty(0)}, "out of flash_mla_sparse_fwd"),
        ({"indexer_topk": 4}, "indexer_topk of flash_mla_sparse_fwd"),
        ({"return_log2_lse": True}, "return_log2_lse=True of flash_mla_sparse_fwd"),
    ],
)
def test_not_served_by_prefill(options: dict[str, Any], text: str) -> None:
    q, kv, indices = prefill_inputs()
    with pytest.raises(NotImplementedError, match=f"does not serve {text}"):
        flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05, **options)


def test_errors_name_the_argument() -> None:
    q, kv, indices = prefill_inputs()
    for args, text in (
        ((q.float().half(), kv, indices), "q must be bfloat16"),
        ((q, kv, indices.long()), r"indices must be int32 \[B, S, G, K\], got int64 \[1, 5, 1, 12\]"),
        ((q, kv[..., :500], indices), "kv must be bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=text):
            flash_mla.flash_mla_sparse_fwd(*args, 0.05)


def test_metadata() -> None:
    metadata, splits = flash_mla.get_mla_metadata(torch.ones(3), 128, 1, topk=2048)
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta)
    assert splits is None
    lengths = torch.ones(3, dtype=torch.int32)
    tensors = flash_mla.get_mla_decoding_metadata(lengths, 128, 1, h_q=128, is_fp8_kvcache=True, topk=2048)
    assert [(t.dtype, t.shape) for t in tensors] == [(torch.int32, (1, 8)), (torch.int32, (4,))]


def test_other_names() -> None:
    with pytest.raises(AttributeError, match=r"dsa_ext\.compat\.flash_mla does not serve flash_attn_varlen_func"):
        _ = flash_mla.flash_attn_varlen_func


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool) -> None:
    q, kv, indices = prefill_inputs()
    compiled = torch.compile(flash_mla.flash_mla_sparse_fwd, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    expected = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)
    got = compiled(q.requires_grad_(), kv, indices, 0.05)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not got[0].requires_grad
