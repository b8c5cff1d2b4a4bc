"""sparse_mla_decode of fp8 keys with up to 32 heads, whose kernel has heads as columns.

With batch_invariant every item has all heads, in a block of 16 or 32, and all keys of a token. Otherwise small calls
have other items.
"""

import math

import pytest
import torch
from decode_gpu import OP, check, check_one_graph, make_gpu, same_bits, scales_of_any_size, with_scales
from sparse_mla_gpu_inputs import DEVICE

import dsa_ext
from dsa_ext.testing.inputs import CacheInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("heads", [9, 16, 17, 32]),
    pytest.mark.parametrize("d_qk", [576, 512]),
]


def inputs_of(heads: int, d_qk: int, batch: int = 5, topk: int = 300, seed: int = 0) -> CacheInputs:
    """More than two tiles of 64 keys for each token, the last one not full."""
    return make_gpu(batch, 1, 10, 64, heads, topk, d_qk, seed=seed)


def test_long_lists(heads: int, d_qk: int) -> None:
    """32 tiles an item, more items than SMs; the bits do not depend on the batch."""
    inputs = make_gpu(140, 1, 64, 64, heads, 2048, d_qk)
    q, cache, ids = vars(inputs).values()
    check(q, cache, ids)
    whole = check(q, cache, ids, batch_invariant=True)
    assert same_bits(OP(q, cache, ids, batch_invariant=True), whole)
    for some in (slice(0, 1), slice(135, 138)):
        part = OP(q[some], cache, ids[some], batch_invariant=True)
        assert same_bits(part, (whole[0][some], whole[1][some]))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_scales_of_any_size(heads: int, d_qk: int, batch_invariant: bool) -> None:
    """Also with queries that make up for it, and the rope part of the keys scaled alike."""
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    spread = torch.rand(cache.shape[0] * cache.shape[1], 4, device=DEVICE)
    for name, scales in scales_of_any_size(spread).items():
        for power in (0, -100, 98):
            shifted = with_scales(cache, scales * 2.0**power)
            if not (scales * 2.0**power).isfinite().all():
                continue
            rope = shifted[..., 528:].view(torch.bfloat16)
            shifted[..., 528:] = (rope * 2.0**power).view(torch.uint8)
            try:
                check(q * 2.0**-power, shifted, ids, batch_invariant=batch_invariant)
            except AssertionError as error:
                raise AssertionError(f"{name}, times 2^{power}: {error}") from error


@pytest.mark.parametrize("sign", [1, -1])
def test_large_queries_whose_scores_are_not(heads: int, d_qk: int, sign: int) -> None:
    """Sums of products with keys that are not scaled would be infinite; powers of two change no bit."""
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    expected = OP(q, cache, ids, sign * 2.0**-5)
    assert expected[0].isfinite().all()
    for power in (100, 108, 112, 118):
        assert same_bits(OP(q * 2.0**power, cache, ids, sign * 2.0 ** (-5 - power)), expected), power
    equal = torch.full_like(q, 2.0**127)
    rows = torch.full((*cache.shape[:3], d_qk), 2.0**-9, device=DEVICE).bfloat16()
    check(equal, dsa_ext.pack_kv_fp8(rows), ids, sm_scale=sign * 2.0**-127)


def test_values_that_are_not_finite_stay_with_their_tokens(heads: int, d_qk: int) -> None:
    """NaN in e4m3 and in a scale, infinite scales, NaN in the rope part; in the first tile and in the last."""
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    ids = ids % (cache.shape[0] * cache.shape[1] - 1)
    nan, inf = ([*torch.tensor([x]).view(torch.uint8)] for x in (math.nan, -math.inf))
    spoiled = [(100, [0x7F]), (511, [0xFF]), (516, nan), (524, inf)] + [(600, [0xC0, 0x7F])] * (d_qk == 576)
    clean = OP(q, cache, ids, batch_invariant=True)
    for place in (5, ids.shape[2] - 1):
        ids_of_one = ids.clone()
        ids_of_one[1, 0, place] = cache.shape[0] * cache.shape[1] - 1
        for begin, content in spoiled:
            replaced = cache.clone()
            replaced[-1, -1, 0, begin : begin + len(content)] = torch.tensor(content, device=DEVICE, dtype=torch.uint8)
            for batch_invariant in (True, False):
                out, lse = OP(q, replaced, ids_of_one, batch_invariant=batch_invariant)
                assert out[1].isnan().any(-1).all(), begin
                assert lse[1].isnan().all(), begin
                others = [0, 2, 3, 4]
                assert out[others].isfinite().all()
                if batch_invariant:
                    assert same_bits((out[others], lse[others]), (clean[0][others], clean[1][others]))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_one_graph_for_any_contents(heads: int, d_qk: int, batch_invariant: bool) -> None:
    first, second = (inputs_of(heads, d_qk, seed=seed) for seed in (0, 1))
    lengths = [torch.full((5, 1), length, dtype=torch.int32, device=DEVICE) for length in (131, 300, 0)]
    check_one_graph([second, first, second], lengths, batch_invariant)


def test_reads_what_the_call_before_wrote(heads: int, d_qk: int) -> None:
    """The kernel starts while the one before it runs."""
    q, cache, ids = vars(inputs_of(heads, d_qk, batch=132)).values()
    keys = torch.randn(4, *cache.shape[:3], d_qk, device=DEVICE).bfloat16()
    packed = [dsa_ext.pack_kv_fp8(rows) for rows in keys]
    torch.cuda.synchronize()
    expected = [OP(q, rows, ids) for rows in packed]
    torch.cuda.synchronize()
    results = [OP(q, dsa_ext.pack_kv_fp8(keys[i % 4]), ids) for i in range(24)]
    for i, result in enumerate(results):
        assert same_bits(result, expected[i % 4]), i
