"""dsa_ext.compat on a GPU: the bits of the operators, no further kernels, little host time, graphs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dsa_ext
from dsa_ext.compat import deep_gemm, flash_mla
from dsa_ext.testing.inputs import make_indexer_inputs, make_inputs
from dsa_ext.testing.paged_inputs import make_paged_inputs
from dsa_ext.testing.timing import host_us
from dsa_ext.testing.tolerances import bits

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
#: Microseconds of the host that a call may take in addition to the call of the operator's public function.
HOST_LIMIT = 3
Call = Callable[[], Any]


def prefill(rows: int = 3, heads: int = 128) -> tuple[Call, Call]:
    inputs = make_inputs(seq=rows, s_kv=500, heads=heads, topk=256, device="cuda")
    q, kv, indices = inputs.q[0], inputs.kv[0], inputs.indices[0]
    indices[rows // 2] = -1
    own: Any = {"causal": False, "sm_scale": 0.05, "return_lse": True, "return_max_logits": True}
    return lambda: flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05), lambda: dsa_ext.sparse_mla(
        q, kv, indices, **own
    )


def decode(batch: int = 3, heads: int = 128) -> tuple[Call, Call]:
    q = torch.randn(batch, 1, heads, 576, device="cuda").bfloat16()
    cache = dsa_ext.pack_kv_fp8(torch.randn(20, 64, 1, 576, device="cuda").bfloat16())
    indices = torch.randint(20 * 64, (batch, 1, 256), device="cuda", dtype=torch.int32)
    indices[batch // 2] = -1
    metadata = flash_mla.get_mla_metadata()
    return (
        lambda: flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, *metadata, 0.05, indices=indices),
        lambda: dsa_ext.sparse_mla_decode(q, cache, indices, sm_scale=0.05),
    )


def logits() -> tuple[Call, Call]:
    inputs = make_indexer_inputs(30, 500, 64, 128, dtype=FP8, device="cuda")
    kv, rest = (inputs.k, inputs.k_scale), (inputs.weights, inputs.ks, inputs.ke)
    return lambda: deep_gemm.fp8_mqa_logits(inputs.q, kv, *rest), lambda: dsa_ext.indexer_logits(
        inputs.q, inputs.k, *rest, k_scale=inputs.k_scale
    )


def paged_logits() -> tuple[Call, Call]:
    inputs = make_paged_inputs(4, 2, 500, 64, 128, device="cuda")
    tables, cache = (inputs.context_lens, inputs.block_table), inputs.k_cache.unsqueeze(2)
    return (
        lambda: deep_gemm.fp8_paged_mqa_logits(inputs.q, cache, inputs.weights, *tables, None, 512, clean_logits=True),
        lambda: dsa_ext.indexer_logits_paged(**vars(inputs), max_len=512),
    )


CALLS = {"prefill": prefill, "decode": decode, "logits": logits, "paged_logits": paged_logits}
all_calls = pytest.mark.parametrize("name", CALLS)


def tensors(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def inf_if_empty(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)


@all_calls
def test_bits_of_the_operators(name: str) -> None:
    call, operator = CALLS[name]()
    got, expected = tensors(call()), tensors(operator())
    if name == "prefill":
        expected = (expected[0], expected[2], inf_if_empty(expected[1]))
    elif name == "decode":
        expected = (expected[0], inf_if_empty(expected[1]).transpose(1, 2))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(bits(a.contiguous()), bits(b.contiguous()))


def kernels(call: Call) -> list[str]:
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sorted(event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA)


@all_calls
def test_no_further_kernel(name: str) -> None:
    call, operator = CALLS[name]()
    expected = kernels(operator)
    if not expected:
        pytest.skip("the profiler records no kernels on this machine")
    assert len(kernels(call)) == len(expected)


@pytest.mark.timing
@all_calls
def test_host_time(name: str) -> None:
    call, operator = CALLS[name]()
    with torch.inference_mode():
        x = torch.zeros(8, device="cuda")
        ours, compat, elementwise = host_us(operator, call, lambda: torch.add(x, 1))
    print(f"host: {name} {ours:.1f} us, through dsa_ext.compat {compat:.1f} us, torch.add {elementwise:.1f} us")
    assert compat - ours <= max(HOST_LIMIT, elementwise)


@all_calls
def test_graph(name: str) -> None:
    call, _ = CALLS[name]()
    expected = tensors(call())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tensors(call())
    for result in captured:
        result.zero_()
    graph.replay()
    assert all(torch.equal(bits(a.contiguous()), bits(b.contiguous())) for a, b in zip(captured, expected, strict=True))


def test_rows_from_their_first_key() -> None:
    inputs = make_indexer_inputs(300, 5000, 32, 128, dtype=FP8, device="cuda")
    starts = torch.arange(300, device="cuda", dtype=torch.int32) * 7
    ends = starts + torch.arange(300, device="cuda", dtype=torch.int32)
    args: Any = (inputs.q, (inputs.k, inputs.k_scale), inputs.weights, starts, ends)
    whole, rows = deep_gemm.fp8_mqa_logits(*args), deep_gemm.fp8_mqa_logits(*args, False, 299)
    seen = whole > -math.inf
    assert torch.equal(rows[torch.arange(299, device="cuda") < (ends - starts)[:, None]], whole[seen])


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_prefill_against_the_cpu(heads: int) -> None:
    inputs = make_inputs(seq=7, s_kv=300, heads=heads, topk=130)
    inputs.indices[0, 3] = 300
    sink, lengths = torch.randn(heads), torch.tensor([130, 4, 0, 9, 64, 65, -1], dtype=torch.int32)
    args = (inputs.q[0], inputs.kv[0], inputs.indices[0], 0.05, 512, sink, lengths)
    expected = flash_mla.flash_mla_sparse_fwd(*args)
    got = flash_mla.flash_mla_sparse_fwd(*(x.cuda() if isinstance(x, Tensor) else x for x in args))  # type: ignore[arg-type]
    for a, b, atol in zip(got, expected, (2e-2, 1e-4, 1e-4), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-2 if atol == 2e-2 else 3e-5, atol=atol)  # type: ignore[union-attr]


def test_decode_batch_invariant() -> None:
    """enable_batch_invariant reaches the operator: a sequence has the same bits alone as among 150."""
    q = torch.randn(150, 1, 128, 576, device="cuda").bfloat16()
    cache = dsa_ext.pack_kv_fp8(torch.randn(40, 64, 1, 576, device="cuda").bfloat16())
    indices = torch.randint(40 * 64, (150, 1, 2048), device="cuda", dtype=torch.int32)
    options = {"softmax_scale": 0.05, "enable_batch_invariant": True}
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, None, None, indices=indices, **options)
    for b in (0, 70, 149):
        one = flash_mla.flash_mla_with_kvcache(q[b : b + 1], cache, None, None, indices=indices[b : b + 1], **options)
        assert torch.equal(one[0][0], out[b])
        assert torch.equal(one[1][0], lse[b])
