"""dsa_ext.compat.deep_gemm without a GPU: results against the formula in float64, and what it does not serve."""

import math
import re

import pytest
import torch
from torch import Tensor

import dsa_ext
from dsa_ext.compat import deep_gemm
from dsa_ext.ops._checks import describe
from dsa_ext.testing.inputs import make_indexer_inputs
from dsa_ext.testing.paged_inputs import make_paged_inputs

FP8 = torch.float8_e4m3fn


def prefill_inputs(rows: int = 9, keys: int = 50) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    inputs = make_indexer_inputs(rows, keys, 8, 64, dtype=FP8)
    starts = torch.arange(rows, dtype=torch.int32) * 3
    ends = (starts + 10).clamp(max=keys)
    ends[2], starts[3] = 0, -4
    assert inputs.k_scale is not None
    return inputs.q, (inputs.k, inputs.k_scale), inputs.weights, starts, ends


def expected_logits(q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    products = torch.einsum("shd,nd->shn", q.double(), kv[0].double()).relu()
    logits = torch.einsum("shn,sh->sn", products, weights.double()) * kv[1].double()
    place = torch.arange(logits.shape[1])
    return logits.masked_fill((place < starts[:, None]) | (place >= ends[:, None]), -math.inf)


def test_prefill() -> None:
    args = prefill_inputs()
    logits = deep_gemm.fp8_mqa_logits(*args)
    torch.testing.assert_close(logits.double(), expected_logits(*args), rtol=1e-4, atol=1e-4)
    assert logits.stride(1) == 1
    assert torch.equal(logits, dsa_ext.indexer_logits(args[0], args[1][0], *args[2:], k_scale=args[1][1]))
    assert torch.equal(deep_gemm.fp8_fp4_mqa_logits((args[0], None), *args[1:]), logits)


def test_prefill_by_keyword() -> None:
    q, kv, weights, starts, ends = prefill_inputs()
    bounds = {"cu_seq_len_k_start": starts, "cu_seq_len_k_end": ends}
    logits = deep_gemm.fp8_mqa_logits(q=q, kv=kv, weights=weights, **bounds, clean_logits=False, max_seqlen_k=0)
    seen = expected_logits(q, kv, weights, starts, ends) > -math.inf
    assert torch.equal(logits[seen], deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends)[seen])


@pytest.mark.parametrize("columns", [1, 10, 70])
def test_rows_from_their_first_key(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "_LOGITS", 200)  # several parts
    q, kv, weights, starts, ends = prefill_inputs()
    whole = deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends)
    rows = deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends, False, columns)
    assert rows.shape == (len(q), columns)
    for s, (first, end) in enumerate(zip(starts.clamp(min=0).tolist(), ends.tolist(), strict=True)):
        seen = whole[s, first : max(first, min(end, first + columns))]
        assert torch.equal(rows[s, : len(seen)], seen)
    with pytest.raises(RuntimeError, match="clean_logits must be False with max_seqlen_k"):
        deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends, True, columns)


def test_rows_from_their_first_key_without_keys() -> None:
    q, kv, weights, starts, ends = prefill_inputs()
    empty = kv[0][:0], kv[1][:0]
    assert deep_gemm.fp8_mqa_logits(q, empty, weights, starts, ends, False, 7).shape == (9, 7)


def test_paged() -> None:
    inputs = make_paged_inputs(batch=3, queries=2, keys=150)
    inputs.context_lens[1] = 0
    cache = inputs.k_cache.unsqueeze(2)
    tables = (inputs.context_lens, inputs.block_table, None)
    logits = deep_gemm.fp8_paged_mqa_logits(inputs.q, cache, inputs.weights, *tables, 192, clean_logits=True)
    expected = dsa_ext.indexer_logits_paged(**vars(inputs), max_len=192)
    assert torch.equal(logits, expected)
    assert logits.shape == (6, 192)
    each = (inputs.context_lens[:, None] + torch.tensor([-1, 0])).int()
    tables = (each, inputs.block_table, None)
    pair = (inputs.q, None)
    again = deep_gemm.fp8_fp4_paged_mqa_logits(pair, cache, inputs.weights, *tables, 192, clean_logits=True)
    assert torch.equal(again, expected)
    shorter = deep_gemm.fp8_paged_mqa_logits(inputs.q, cache, inputs.weights, *tables, 100, clean_logits=True)
    assert torch.equal(shorter, expected[:, :100])


def test_errors() -> None:
    (q, kv, *rest), inputs = prefill_inputs(), make_paged_inputs()
    keys = describe(kv[0])
    for bad, got in ((kv[0], keys), ((kv[0],), f"({keys})"), ([kv[0], None], f"[{keys}, None]"), (3, "3")):
        message = f"fp8_mqa_logits: kv must be two tensors, keys and their scales, got {got}"
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            deep_gemm.fp8_mqa_logits(q, bad, *rest)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="fp8_mqa_logits: max_seqlen_k must be an integer from 0 on, got -1"):
        deep_gemm.fp8_mqa_logits(q, kv, *rest, False, -1)
    with pytest.raises(RuntimeError, match="fp8_mqa_logits: cu_seq_len_k_end must be a tensor, got NoneType"):
        deep_gemm.fp8_mqa_logits(q, kv, *rest[:2], None)  # type: ignore[arg-type]
    tables = (inputs.weights, inputs.context_lens, inputs.block_table, None)
    for cache in (inputs.k_cache, inputs.k_cache[:, :, None].expand(-1, -1, 2, -1)):
        with pytest.raises(RuntimeError, match=r"fp8_paged_mqa_logits: kv_cache must be \[blocks, page, 1, columns\]"):
            deep_gemm.fp8_paged_mqa_logits(inputs.q, cache, *tables, 64)


@pytest.mark.parametrize(("rows", "keys"), [(None, None), (0, None), (None, 0)])
def test_errors_with_rows_from_their_first_key(rows: int | None, keys: int | None) -> None:
    """Also where there is nothing to compute, and in calls that compute rows in parts."""
    q, kv, weights, starts, ends = prefill_inputs()
    q, weights, starts, ends = (x[:rows] for x in (q, weights, starts, ends))
    kv = (kv[0][:keys], kv[1][:keys])
    for name, bad in (
        ("weights", torch.cat([weights, weights[:1]]) if len(q) else torch.ones(3)),
        ("starts", ends[:-1]),
    ):
        if name == "starts" and not len(q):
            continue
        args = {"weights": weights, "starts": starts} | {name: bad}
        with pytest.raises(RuntimeError, match=r"fp8_mqa_logits: .* must be as long as q"):
            deep_gemm.fp8_mqa_logits(q, kv, args["weights"], args["starts"], ends, False, 5)
    with pytest.raises(RuntimeError, match="weights must be float32"):
        deep_gemm.fp8_mqa_logits(q, kv, weights.double(), starts, ends, False, 5)
    with pytest.raises(RuntimeError, match="fp8_mqa_logits: q must be"):
        deep_gemm.fp8_mqa_logits(q[..., 0], kv, weights, starts, ends, False, 5)
    with pytest.raises(RuntimeError, match=r"fp8_mqa_logits: kv\[0\] must be \[S_kv, Di\], got float8_e4m3fn \[\]"):
        deep_gemm.fp8_mqa_logits(q, (torch.zeros((), dtype=FP8), kv[1]), weights, starts, ends, False, 5)
    with pytest.raises(RuntimeError, match="fp8_mqa_logits: max_seqlen_k must be an integer from 0 on, got None"):
        deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends, False, None)  # type: ignore[arg-type]
    for bad in ((q,), (None, None), None):
        with pytest.raises(RuntimeError, match=r"fp8_fp4_mqa_logits: q must be a tensor, or \(values, None\)"):
            deep_gemm.fp8_fp4_mqa_logits(bad, kv, weights, starts, ends)  # type: ignore[arg-type]


def test_results_have_no_gradient() -> None:
    q, kv, weights, *bounds = prefill_inputs()
    expected = deep_gemm.fp8_mqa_logits(q, kv, weights, *bounds)
    weights.requires_grad_()
    logits = deep_gemm.fp8_mqa_logits(q, kv, weights, *bounds)
    assert torch.equal(logits, expected)
    assert not logits.requires_grad
    assert not deep_gemm.fp8_mqa_logits(q, kv, weights, *bounds, False, 7).requires_grad
    compiled = torch.compile(deep_gemm.fp8_mqa_logits, backend="aot_eager", fullgraph=True)
    assert not compiled(q, kv, weights, *bounds).requires_grad
    inputs = make_paged_inputs()
    args = (inputs.weights.requires_grad_(), inputs.context_lens, inputs.block_table, None, 64)
    assert not deep_gemm.fp8_paged_mqa_logits(inputs.q, inputs.k_cache.unsqueeze(2), *args).requires_grad


def test_bf16_logits() -> None:
    args = prefill_inputs()
    logits = deep_gemm.fp8_fp4_mqa_logits((args[0], None), *args[1:], logits_dtype=torch.bfloat16)
    assert torch.equal(logits, deep_gemm.fp8_mqa_logits(*args).bfloat16())
    with pytest.raises(RuntimeError, match=r"logits_dtype must be float32 or bfloat16, got torch\.float16"):
        deep_gemm.fp8_fp4_mqa_logits((args[0], None), *args[1:], logits_dtype=torch.float16)


def test_not_served() -> None:
    args, inputs = prefill_inputs(), make_paged_inputs()
    with pytest.raises(NotImplementedError, match="does not serve fp4 queries"):
        deep_gemm.fp8_fp4_mqa_logits((args[0], torch.ones(1)), *args[1:])
    cache, tables = inputs.k_cache.unsqueeze(2), (inputs.context_lens, inputs.block_table, None)
    with pytest.raises(NotImplementedError, match="does not serve indices of fp8_paged_mqa_logits"):
        deep_gemm.fp8_paged_mqa_logits(inputs.q, cache, inputs.weights, *tables, 64, indices=inputs.context_lens)
    with pytest.raises(AttributeError, match=r"dsa_ext\.compat\.deep_gemm does not serve fp8_gemm_nt"):
        _ = deep_gemm.fp8_gemm_nt
    with pytest.raises(RuntimeError, match="head dimension must be 64 or 128, got 32"):
        deep_gemm.fp8_mqa_logits(args[0][..., :32], (args[1][0][:, :32], args[1][1]), *args[2:])


def test_metadata_and_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "_num_sms", None)
    deep_gemm.set_num_sms(66)
    assert deep_gemm.get_num_sms() == 66
    metadata = deep_gemm.get_paged_mqa_logits_metadata(torch.ones(3, 1, dtype=torch.int32), 64, deep_gemm.get_num_sms())
    assert metadata.dtype == torch.int32
    assert metadata.shape == (67, 2)


def test_modes_with_rows_from_their_first_key() -> None:
    """Compiled for any sizes, and in a vmap over weights."""
    q, kv, weights, *bounds = prefill_inputs()

    def call(weights: Tensor) -> Tensor:
        return deep_gemm.fp8_mqa_logits(q, kv, weights, *bounds, False, 7)

    expected = call(weights)
    compiled = torch.compile(call, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(weights), expected)
    assert torch.equal(torch.vmap(call)(torch.stack([weights, weights]))[1], expected)
