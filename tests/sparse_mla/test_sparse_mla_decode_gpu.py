"""The kernel of sparse_mla_decode against the reference in float64 on the same GPU, and its other promises."""

import itertools
import math
from typing import Any

import pytest
import torch
from decode_gpu import OP, check, make_gpu, scales_of_any_size, with_scales
from sparse_mla_gpu_inputs import DEVICE, Case, run_cases
from streams import check_replays, check_script, written_late
from torch import Tensor

import dsa_ext
from dsa_ext.reference.decode import used_slots
from dsa_ext.testing.inputs import (
    INT32_MAX,
    INT32_MIN,
    poison_cache,
    spoil_indices,
    strided_cache,
    strided_copy,
)
from dsa_ext.testing.timing import host_us

pytestmark = pytest.mark.gpu

#: Microseconds of the host for one eager call.
HOST_LIMIT = 14


def poisoned(kv_cache: Tensor, indices: Tensor, topk_length: Tensor | None = None) -> Tensor:
    """The cache with NaN in all slots that no token lists."""
    slots = kv_cache.shape[0] * kv_cache.shape[1]
    used = used_slots(indices, topk_length) & (indices >= 0) & (indices < slots)
    return poison_cache(kv_cache, indices[used])


AXES: dict[str, list[Any]] = {
    "packed": [True, False],
    "d_qk": [576, 512],
    "heads": [128, 1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127],
    "tokens": [1, 2, 3, 6, 11],
    "batch": [3, 1, 2, 7, 64, 133, 321],
    "page": [64, 1, 2, 53, 61, 69, 576],
    "slots": [1000, 0, 1, 63, 8192],
    "topk": [128, 1, 5, 63, 64, 65, 129, 640, 2048],
    "lengths": [False, True],
    "sink": [False, True],
    "sm_scale": [None, 0.05, -0.04, 0.0],
    "spoiled": [True, False],
    "strided": [False, True],
    "batch_invariant": [False, True],
}


def make_grid(samples: int) -> list[Case]:
    """A base case, the base case with each value of each axis, and a seeded sample of the whole product."""
    base = {name: values[0] for name, values in AXES.items()}
    cases = [base | {name: value} for name, values in AXES.items() for value in values]
    generator = torch.Generator().manual_seed(0)

    def chosen(values: list[Any]) -> Any:
        return values[int(torch.randint(len(values), (), generator=generator))]

    cases += [{name: chosen(values) for name, values in AXES.items()} for _ in range(samples)]
    for case in cases:
        while case["batch"] * case["tokens"] * case["topk"] * case["heads"] > 2**25:
            case["batch"] = -(-case["batch"] // 2)
    return list({repr(case): case for case in cases}.values())


def run_case(case: Case) -> None:
    batch, tokens, heads, page, topk = (case[name] for name in ("batch", "tokens", "heads", "page", "topk"))
    blocks = -(-case["slots"] // page)
    inputs = make_gpu(batch, tokens, blocks, page, heads, topk, case["d_qk"], packed=case["packed"], seed=topk)
    indices = spoil_indices(inputs.indices, blocks * page) if case["spoiled"] else inputs.indices
    options: dict[str, Any] = {"sm_scale": case["sm_scale"], "batch_invariant": case["batch_invariant"]}
    if case["lengths"]:
        spread = torch.tensor([topk, 0, -3, topk + 7, 1, topk // 2, INT32_MAX, INT32_MIN], device=DEVICE)
        options["topk_length"] = spread.repeat(batch * tokens // 8 + 1)[: batch * tokens].view(batch, tokens).int()
    if case["sink"]:
        sinks = torch.tensor([1.0, -math.inf, 7.5, math.inf, -2.0], device=DEVICE)
        options["attn_sink"] = sinks.repeat(heads // 5 + 1)[:heads]
    cache = poisoned(inputs.kv_cache, indices, options.get("topk_length"))
    q = inputs.q
    if case["strided"] and blocks:
        cache, q = strided_cache(cache), strided_copy(q, swap_leading=True)
    check(q, cache, indices, **options)


def test_first_contact() -> None:
    inputs = make_gpu(1, 1, 2, 64, 64, 64)
    check(inputs.q, inputs.kv_cache, inputs.indices, batch_invariant=True)


@pytest.mark.parametrize("part", range(8))
def test_grid(part: int) -> None:
    """In every case, slots that no token lists hold NaN."""
    run_cases(make_grid(samples=160)[part::8], run_case)


@pytest.mark.parametrize("value", [INT32_MIN, -1, 128, INT32_MAX])
@pytest.mark.parametrize("packed", [True, False])
def test_padding_alone(value: int, packed: bool) -> None:
    inputs = make_gpu(2, 2, 2, 64, 128, 2048, packed=packed)
    cache = poison_cache(inputs.kv_cache, inputs.indices[:0])
    indices = torch.full_like(inputs.indices, value)
    for invariant, inf_if_empty in itertools.product((False, True), repeat=2):
        out, lse = check(inputs.q, cache, indices, batch_invariant=invariant, inf_if_empty=inf_if_empty)
        assert (out == 0).all()
        assert (lse == (math.inf if inf_if_empty else -math.inf)).all()


@pytest.mark.parametrize("packed", [True, False])
def test_one_valid_id_anywhere(packed: bool) -> None:
    """out is the value of the only key, and its score is that of the unpacked key."""
    inputs = make_gpu(200, 1, 2, 64, 128, 200, packed=packed)
    indices = torch.full_like(inputs.indices, -1)
    diagonal = torch.arange(200, device=DEVICE)
    indices[diagonal, 0, diagonal] = (diagonal % 128).int()
    check(inputs.q, inputs.kv_cache, indices)


@pytest.mark.parametrize("packed", [True, False])
def test_large_scores(packed: bool) -> None:
    """Scores of several thousand: all exponentials but one underflow, and nothing overflows."""
    inputs = make_gpu(3, 2, 16, 64, 64, 600, packed=False)
    for kv in (
        inputs.kv_cache * 8,
        torch.linspace(0.1, 3, 1024, device=DEVICE).view(16, 64, 1, 1).expand(-1, -1, -1, 576),
    ):
        cache = dsa_ext.pack_kv_fp8(kv.bfloat16()) if packed else kv.bfloat16().contiguous()
        ids = torch.arange(600, device=DEVICE, dtype=torch.int32).expand_as(inputs.indices).contiguous()
        for indices in (inputs.indices, ids, ids.flip(-1).contiguous()):
            check(inputs.q.abs() * 8, cache, indices, sm_scale=1.0)


def test_scales_of_any_size() -> None:
    """Scales that are no powers of two, negative, tiny, huge, zero, denormal, and different in every block."""
    inputs = make_gpu(4, 2, 8, 64, 48, 200)
    generator = torch.Generator(DEVICE).manual_seed(1)
    spread = torch.rand(8 * 64, 4, generator=generator, device=DEVICE)
    for name, scales in scales_of_any_size(spread).items():
        try:
            check(inputs.q, with_scales(inputs.kv_cache, scales), inputs.indices)
            check(inputs.q * 2.0**100, with_scales(inputs.kv_cache, scales * 2.0**-100), inputs.indices)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_nan_stays_with_the_tokens_that_list_it() -> None:
    """In e4m3, in a scale, in the rope part; infinite scales give NaN too."""
    inputs = make_gpu(1, 3, 4, 4, 20, 2)
    indices = torch.tensor([[[0, 1], [5, 2], [7, -1]]], dtype=torch.int32, device=DEVICE)
    clean = OP(inputs.q, inputs.kv_cache, indices)
    nan, inf = (torch.tensor([value], device=DEVICE).view(torch.uint8) for value in (math.nan, math.inf))
    spoiled = [(100, nan[:1] * 0 + 0x7F), (511, nan[:1] * 0 + 0xFF), (516, nan), (524, inf), (600, nan[2:])]
    for begin, content in spoiled:
        cache = inputs.kv_cache.clone()
        cache[1, 1, 0, begin : begin + len(content)] = content
        out, lse = OP(inputs.q, cache, indices)
        assert out[0, 1].isnan().all(), begin
        assert lse[0, 1].isnan().all(), begin
        for got, expected in zip((out, lse), clean, strict=True):
            assert torch.equal(got[0, ::2], expected[0, ::2])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_number_of_e4m3(batch_invariant: bool) -> None:
    """Each column holds another number; each head's query picks one column, and each value is read back."""
    cache = torch.zeros(1, 128, 1, 528, dtype=torch.uint8, device=DEVICE)
    codes = torch.arange(256, device=DEVICE, dtype=torch.int32)
    codes = codes[(codes & 127) != 127].to(torch.uint8)[:254]
    cache[0, :, 0, 512:528] = torch.ones(4, device=DEVICE).view(torch.uint8)
    cache[0, 0, 0, :254], cache[0, 0, 0, 256:510] = codes, codes
    q = torch.zeros(1, 1, 128, 512, dtype=torch.bfloat16, device=DEVICE)
    heads = torch.arange(128, device=DEVICE)
    values = codes.view(torch.float8_e4m3fn).float()
    indices = torch.zeros(1, 1, 1, dtype=torch.int32, device=DEVICE)
    for offset in (0, 128, 256, 384):
        q.zero_()
        q[0, 0, heads, heads + offset] = 1
        out, lse = OP(q, cache, indices, sm_scale=1.0, batch_invariant=batch_invariant)
        row = torch.cat([values, values.new_zeros(2), values, values.new_zeros(2)])
        torch.testing.assert_close(lse[0, 0], row[offset : offset + 128], rtol=1e-6, atol=0)
        assert torch.equal(out[0, 0].float(), row.expand(128, 512))


@pytest.mark.parametrize(("packed", "d_qk"), list(itertools.product((True, False), (576, 512))))
def test_strided_views(packed: bool, d_qk: int) -> None:
    inputs = make_gpu(3, 2, 9, 20, 65, 70, d_qk, packed=packed)
    indices = spoil_indices(inputs.indices, 180)
    expected = check(inputs.q, inputs.kv_cache, indices)
    wide = torch.full((2, 3, 4, 77), 3, device=DEVICE, dtype=torch.int32).transpose(0, 1)[:, :, 2, 3:73]
    wide.copy_(indices)
    lengths = torch.full((2, 6), 70, device=DEVICE, dtype=torch.int32)[:, ::2].T
    sink = torch.full((130,), -math.inf, device=DEVICE)[::2]
    views = [
        (strided_copy(inputs.q), strided_cache(inputs.kv_cache), indices),
        (inputs.q.transpose(1, 2).contiguous().transpose(1, 2), inputs.kv_cache, wide),
        (inputs.q, inputs.kv_cache.transpose(0, 1).contiguous().transpose(0, 1), indices),
    ]
    for q, cache, ids in views:
        for got, exact in zip(OP(q, cache, ids, topk_length=lengths, attn_sink=sink), expected, strict=True):
            assert torch.equal(got, exact)


@pytest.mark.parametrize(("heads", "packed"), list(itertools.product((16, 64, 128), (True, False))))
@pytest.mark.parametrize("batch", [1, 150])
def test_repeats_are_bitwise_equal(heads: int, packed: bool, batch: int) -> None:
    inputs = make_gpu(batch, 2, 100, 64, heads, 2048, packed=packed)
    first = OP(inputs.q, inputs.kv_cache, inputs.indices)
    for _ in range(25):
        for got, expected in zip(OP(inputs.q, inputs.kv_cache, inputs.indices), first, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize(("heads", "packed"), list(itertools.product((1, 16, 40, 128), (True, False))))
def test_batch_invariance(heads: int, packed: bool) -> None:
    """A token has the same bits in any batch, at any position of it, with any neighbors."""
    inputs = make_gpu(128, 2, 300, 64, heads, 2048, packed=packed)
    options = {"batch_invariant": True, "attn_sink": torch.linspace(-3, 3, heads, device=DEVICE)}
    out, lse = OP(inputs.q, inputs.kv_cache, inputs.indices, **options)
    for rows in (slice(0, 1), slice(77, 78), slice(100, 128), slice(3, 128, 5)):
        part = OP(inputs.q[rows], inputs.kv_cache, inputs.indices[rows], **options)
        assert torch.equal(part[0], out[rows])
        assert torch.equal(part[1], lse[rows])
    one = OP(inputs.q[5:6, 1:], inputs.kv_cache, inputs.indices[5:6, 1:], **options)
    assert torch.equal(one[0][0, 0], out[5, 1])
    other = make_gpu(128, 2, 300, 64, heads, 2048, packed=packed, seed=9)
    q, indices = other.q.clone(), other.indices.clone()
    q[100, 1], indices[100, 1] = inputs.q[5, 0], inputs.indices[5, 0]
    assert torch.equal(OP(q, inputs.kv_cache, indices, **options)[0][100, 1], out[5, 0])
    # The same pages in reverse order, in a cache with others around them.
    pages = inputs.kv_cache.flip(0)
    moved = torch.cat([torch.zeros_like(pages[:7]), pages, torch.zeros_like(pages[:3])])
    page, row = inputs.indices // 64, inputs.indices % 64
    slots = torch.where(page.clamp(0, 299) == page, (306 - page) * 64 + row, -1)
    for got, expected in zip(OP(inputs.q[:9], moved, slots[:9], **options), (out[:9], lse[:9]), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("batch", "packed"), list(itertools.product((1, 90), (True, False))))
def test_side_stream(batch: int, packed: bool) -> None:
    inputs = make_gpu(batch, 1, 40, 64, 128, 2048, packed=packed)
    expected, _ = OP(inputs.q, inputs.kv_cache, inputs.indices)
    for name in ("q", "kv_cache", "indices"):
        args = dict(vars(inputs))
        out, _ = written_late(args[name], lambda late, n=name, a=args: OP(**{**a, n: late}))
        assert torch.equal(out, expected), name


@pytest.mark.parametrize(("batch", "packed"), list(itertools.product((1, 40), (True, False))))
def test_replays_take_other_contents(batch: int, packed: bool) -> None:
    """Contents, lists and lengths change between the capture and the replay, and nothing else."""
    inputs, later = (make_gpu(batch, 2, 40, 64, 64, 1000, packed=packed, seed=seed) for seed in (1, 2))
    lengths = torch.full((batch, 2), 1000, dtype=torch.int32, device=DEVICE)
    args = (inputs.q.clone(), inputs.kv_cache.clone(), inputs.indices.clone())

    def change() -> tuple[Tensor, Tensor]:
        for tensor, value in zip(args, vars(later).values(), strict=True):
            tensor.copy_(value)
        lengths.copy_(torch.arange(2 * batch, device=DEVICE).view(batch, 2) * 37 % 1001)
        return check(*args, topk_length=lengths)

    check_replays(torch.cuda.Stream(), lambda: OP(*args, topk_length=lengths), change)


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.inputs import make_cache
fp8 = [(1, 128), (70, 16), (140, 33), (300, 64), (300, 128)]
calls = [(*call, True) for call in fp8] + [(1, 64, False), (140, 128, False)]
inputs = [make_cache(batch, 1, 64, 64, heads, 2048, packed=packed, device="cuda") for batch, heads, packed in calls]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [torch.ops.dsa.sparse_mla_decode(**vars(i)) for i in inputs]
for i in inputs:
    i.q.mul_(0.5)
for _ in range(3):
    graph.replay()
for i, results in zip(inputs, captured):
    for got, expected in zip(results, torch.ops.dsa.sparse_mla_decode(**vars(i))):
        assert torch.equal(got, expected)
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


def test_calls_one_after_another() -> None:
    """Each call reads what the one before wrote, although its kernel may start earlier."""
    inputs = make_gpu(2, 1, 40, 64, 128, 2048)
    q = inputs.q.clone()
    rope = q[..., 512:].clone()
    for _ in range(6):
        expected = torch.cat([OP(q, inputs.kv_cache, inputs.indices)[0], rope], -1)
        torch.cuda.synchronize()
        q = expected
    again = inputs.q.clone()
    for _ in range(6):
        again[..., :512] = OP(again, inputs.kv_cache, inputs.indices)[0]
    assert torch.equal(again, q)


def test_packing_and_decoding_one_after_another() -> None:
    kv = torch.randn(64, 64, 1, 576, device=DEVICE).bfloat16()
    inputs = make_gpu(1, 1, 64, 64, 128, 2048)
    expected = None
    for _ in range(20):
        out, _ = OP(inputs.q, dsa_ext.pack_kv_fp8(kv), inputs.indices)
        expected = out if expected is None else expected
        assert torch.equal(out, expected)


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}], ids=str)
def test_compile(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: dsa_ext.sparse_mla_decode(*args), fullgraph=True, **options)
    for batch in (1, 3) if options.get("dynamic") else (2, 2, 2):
        inputs = make_gpu(batch, 2, 20, 64, 32, 500)
        args = (inputs.q, inputs.kv_cache, inputs.indices)
        torch.compiler.cudagraph_mark_step_begin()
        for got, expected in zip(compiled(*args), OP(*args), strict=True):
            assert torch.equal(got, expected)


def test_autocast() -> None:
    inputs = make_gpu(2, 2, 20, 64, 32, 500)
    expected = OP(inputs.q, inputs.kv_cache, inputs.indices)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = OP(inputs.q.float(), inputs.kv_cache, inputs.indices)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_opcheck(packed: bool) -> None:
    inputs = make_gpu(2, 2, 20, 10, 16, 40, packed=packed)
    lengths = torch.tensor([[0, 3], [20, 50]], dtype=torch.int32, device=DEVICE)
    sink = torch.linspace(-1, 1, 16, device=DEVICE)
    for options in ({}, {"attn_sink": sink, "topk_length": lengths, "sm_scale": 0.1}):
        torch.library.opcheck(OP, tuple(vars(inputs).values()), options)


@pytest.mark.gpu_memory(14)
@pytest.mark.parametrize("packed", [True, False])
def test_more_than_2_to_the_31_elements_of_q_and_out(packed: bool) -> None:
    """The first and the last tokens, which lie on both sides of the limits of 32 bits."""
    tokens, some = 2**31 // (128 * 512) + 40, 3
    inputs = make_gpu(1, 1, 10, 64, 128, 32, packed=packed)
    q = torch.randn(tokens, 1, 128, 576, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.randint(640, (tokens, 1, 32), device=DEVICE, dtype=torch.int32)
    results = OP(q, inputs.kv_cache, ids, batch_invariant=True)
    for rows in (slice(some), slice(-some, None)):
        expected = check(q[rows], inputs.kv_cache, ids[rows], batch_invariant=True)
        assert all(torch.equal(a[rows], b) for a, b in zip(results, expected, strict=True))


@pytest.mark.gpu_memory(14)
@pytest.mark.parametrize("packed", [True, False])
def test_more_than_2_to_the_32_bytes_of_keys(packed: bool) -> None:
    """Slots near both ends of a large cache."""
    small = make_gpu(2, 2, 10, 64, 64, 300, packed=packed)
    blocks = 2**33 // (64 * small.kv_cache.shape[3] * small.kv_cache.element_size()) + 10
    cache = torch.full((blocks, 64, 1, small.kv_cache.shape[3]), 0, device=DEVICE, dtype=small.kv_cache.dtype)
    cache[:5], cache[-5:] = small.kv_cache[:5], small.kv_cache[5:]
    far = torch.where(small.indices < 320, small.indices, small.indices + (blocks - 10) * 64).int()
    for got, expected in zip(OP(small.q, cache, far), OP(small.q, small.kv_cache, small.indices), strict=True):
        assert torch.equal(got, expected)


def test_errors_on_the_device() -> None:
    inputs = make_gpu()
    with pytest.raises(RuntimeError, match=r"sparse_mla_decode: kv_cache must be on the device of q, cuda:0, got cpu"):
        OP(inputs.q, inputs.kv_cache.cpu(), inputs.indices)
    with pytest.raises(RuntimeError, match=r"attn_sink must be on the device of q, cuda:0, got cpu"):
        OP(inputs.q, inputs.kv_cache, inputs.indices, attn_sink=torch.zeros(16))


@pytest.mark.timing
def test_host_overhead() -> None:
    """One eager call costs the host at most 14 microseconds, or 3.5 times an elementwise operator on a slower host."""
    inputs = make_gpu(1, 1, 4, 64, 16, 64)
    operator, elementwise = host_us(
        lambda: OP(inputs.q, inputs.kv_cache, inputs.indices), lambda: torch.add(inputs.indices, 1)
    )
    print(f"host: sparse_mla_decode {operator:.1f} us, torch.add {elementwise:.1f} us")
    assert operator <= max(HOST_LIMIT, 3.5 * elementwise)
