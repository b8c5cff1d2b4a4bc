"""sparse_mla_decode of fp8 keys with more than 32 heads: a CTA with up to 64 heads alone, and pairs of CTAs with more.

With batch_invariant every item has up to 64 heads and all keys of a token. Otherwise small calls have other items.
"""

import pytest
import torch
from decode_gpu import OP, check, check_one_graph, make_gpu, same_bits, scales_of_any_size, with_scales
from sparse_mla_gpu_inputs import DEVICE

from dsa_ext.testing.inputs import CacheInputs, strided_cache, strided_copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("heads", [64, 65, 127, 128]),
    pytest.mark.parametrize("d_qk", [576, 512]),
]

BLOCKS, PAGE, TOPK, BATCH = 40, 16, 70, 300  # more tokens than SMs
SLOT = 17  # that only every other token lists

#: Bytes of a packed key, and what they are replaced by: NaN in e4m3, NaN and infinity as a scale.
NOT_FINITE = [(100, [0x7F]), (511, [0xFF])]
NOT_FINITE += [(512 + 4 * group, [0, 0, *high]) for group in range(4) for high in ((0xC0, 0x7F), (0x80, 0x7F))]


def inputs_of(heads: int, d_qk: int, batch: int = BATCH, seed: int = 0) -> CacheInputs:
    inputs = make_gpu(batch, 1, BLOCKS, PAGE, heads, TOPK, d_qk, seed=seed)
    inputs.indices.masked_fill_(inputs.indices == SLOT, SLOT + 1)
    inputs.indices[1::2, 0, 5] = SLOT
    return inputs


def every_length() -> torch.Tensor:
    """From -1 to TOPK, [BATCH, 1]."""
    return torch.arange(BATCH, device=DEVICE, dtype=torch.int32)[:, None] % (TOPK + 2) - 1


def test_values_that_are_not_finite_stay_with_their_tokens(heads: int, d_qk: int) -> None:
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    clean = OP(q, cache, ids, batch_invariant=True)
    assert not clean[0].isnan().any()
    rope = [(600, [0xC0, 0x7F])] if d_qk == 576 else []  # NaN in bf16
    for first, values in NOT_FINITE + rope:
        replaced = cache.clone()
        replaced.view(-1, cache.shape[-1])[SLOT, first : first + len(values)] = torch.tensor(values).to(replaced)
        out, lse = OP(q, replaced, ids, batch_invariant=True)
        assert out[1::2].isnan().all()
        assert lse[1::2].isnan().all()
        assert same_bits((out[::2], lse[::2]), (clean[0][::2], clean[1][::2]))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_scales_of_any_size(heads: int, d_qk: int, batch_invariant: bool) -> None:
    q, cache, ids = vars(inputs_of(heads, d_qk, 3)).values()
    x = torch.rand(BLOCKS * PAGE, 4, device=DEVICE)
    for scales in scales_of_any_size(x).values():
        check(q, with_scales(cache, scales), ids, batch_invariant=batch_invariant)
    for magnitude in (2.0**110, 2.0**60, 2.0**-60, 2.0**-98):
        scaled = (q.float() * magnitude).bfloat16()
        check(scaled, with_scales(cache, x / 100 / magnitude), ids, batch_invariant=batch_invariant)


def test_pairs_have_the_bits_of_ctas_alone(heads: int, d_qk: int) -> None:
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    out, lse = OP(q, cache, ids, batch_invariant=True)
    for part in (slice(0, 64), slice(64, heads)):
        if part.stop - part.start > 32:  # with fewer heads, another kernel adds in another order
            alone = OP(q[:, :, part], cache, ids, batch_invariant=True)
            assert same_bits((out[:, :, part], lse[:, :, part]), alone)
    assert same_bits(OP(strided_copy(q), strided_cache(cache), ids, batch_invariant=True), (out, lse))


@pytest.mark.parametrize("sm_scale", [0.0, -0.04])
def test_scale_of_scores(heads: int, d_qk: int, sm_scale: float) -> None:
    check(**vars(inputs_of(heads, d_qk)), sm_scale=sm_scale, batch_invariant=True)


def test_large_queries_whose_scores_are_not(heads: int, d_qk: int) -> None:
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    for power in (60, 100, 112, 118):
        check(q * 2.0**power, cache, ids, sm_scale=2.0 ** (-5 - power), batch_invariant=True)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_one_graph_for_any_contents(heads: int, d_qk: int, batch_invariant: bool) -> None:
    inputs = [inputs_of(heads, d_qk, seed=seed) for seed in (0, 1, 0)]
    inputs[1].indices.masked_fill_(torch.rand_like(inputs[1].indices, dtype=torch.float32) < 0.2, -1)
    lengths = [every_length().roll(shift, 0) for shift in (0, 7, BATCH // 2)]
    check_one_graph(inputs, lengths, batch_invariant)


def test_the_lengths_of_others_do_not_matter(heads: int, d_qk: int) -> None:
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    out, lse = OP(q, cache, ids, batch_invariant=True)
    lengths = every_length()
    lengths[::3] = TOPK
    others = OP(q, cache, ids, topk_length=lengths, batch_invariant=True)
    assert same_bits((others[0][::3], others[1][::3]), (out[::3], lse[::3]))


def test_lengths(heads: int, d_qk: int) -> None:
    """Also those that leave a CTA of a pair without a key in a tile, and parts without keys."""
    q, cache, ids = vars(inputs_of(heads, d_qk)).values()
    check(q, cache, ids, topk_length=every_length(), batch_invariant=True)
    many = make_gpu(2, 1, BLOCKS, 64, heads, 2048, d_qk)
    for pair in ((0, 1), (16, 17), (31, 33), (64, 65), (2047, 2048)):
        lengths = torch.tensor(pair, device=DEVICE, dtype=torch.int32)[:, None]
        for batch_invariant in (True, False):
            check(**vars(many), topk_length=lengths, batch_invariant=batch_invariant)


@pytest.mark.gpu_memory(12)
def test_large_caches_and_pages(heads: int, d_qk: int) -> None:
    """Pages beyond 2^32 bytes, and one page of more than 2^20 slots."""
    small = make_gpu(40, 1, 10, 64, heads, 300, d_qk)
    row = small.kv_cache.shape[-1]
    blocks = 2**33 // (64 * row) + 10
    cache = torch.zeros(blocks, 64, 1, row, dtype=torch.uint8, device=DEVICE)
    cache[:5], cache[-5:] = small.kv_cache[:5], small.kv_cache[5:]
    far = torch.where(small.indices < 320, small.indices, small.indices + (blocks - 10) * 64).int()
    expected = OP(**vars(small), batch_invariant=True)
    for view in (cache, cache.view(1, -1, 1, row)):
        assert same_bits(OP(small.q, view, far, batch_invariant=True), expected)


def test_several_streams_at_once(heads: int, d_qk: int) -> None:
    small = make_gpu(40, 1, 10, 64, heads, 300, d_qk)
    expected = OP(**vars(small), batch_invariant=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 3]):
            results.append(OP(**vars(small), batch_invariant=i % 2 == 0))
    torch.cuda.synchronize()
    assert all(same_bits(result, expected) for result in results[::2])
    assert all(same_bits(result, results[1]) for result in results[1::2])
