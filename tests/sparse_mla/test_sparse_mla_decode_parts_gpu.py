"""sparse_mla_decode where the keys of a token are split over SMs, and the parts are combined."""

import itertools
import math

import pytest
import torch
from decode_gpu import OP, check, make_gpu, with_scales
from sparse_mla_gpu_inputs import DEVICE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("batch", "heads"), [(1, 128), (1, 64), (1, 16), (2, 128), (3, 1), (12, 40), (40, 128)])
@pytest.mark.parametrize("packed", [True, False])
def test_split_keys(batch: int, heads: int, packed: bool) -> None:
    """The keys of few tokens are split over many SMs."""
    inputs = make_gpu(batch, 1, 800, 64, heads, 4096, packed=packed)
    sink = torch.linspace(-5, 5, heads, device=DEVICE)
    lengths = torch.arange(batch, device=DEVICE, dtype=torch.int32).view(batch, 1) * 777 % 4097
    check(inputs.q, inputs.kv_cache, inputs.indices)
    check(inputs.q, inputs.kv_cache, inputs.indices, topk_length=lengths, attn_sink=sink, inf_if_empty=True)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("packed", [True, False])
def test_any_number_of_parts(heads: int, packed: bool) -> None:
    """512 threads combine a row where many SMs are free, and 128 elsewhere. With 64 heads of packed keys in an item,
    parts are fp16, in another order: here one token of 128 heads with 29 parts and more, five tokens of 64 and 128
    heads with many keys, and 32 tokens. In the second call some parts have no key."""
    numbers_of_tiles = (2, 3, 7, 8, 9, 15, 16, 17, 20, 22, 24, 25, 29, 31, 32)
    for batch, tiles in [*itertools.product((1, 5), numbers_of_tiles), (32, 32)]:
        inputs = make_gpu(batch, 1, 40, 64, heads, 64 * tiles, packed=packed, seed=tiles)
        lengths = torch.full((batch, 1), 32 * tiles + 5, device=DEVICE, dtype=torch.int32)
        check(inputs.q, inputs.kv_cache, inputs.indices)
        check(inputs.q, inputs.kv_cache, inputs.indices, topk_length=lengths)


@pytest.mark.parametrize("tokens", [1, 8])
def test_extreme_parts_of_many_heads(tokens: int) -> None:
    """NaN in a query or a key, and infinite sinks, where the keys of 128 heads are split."""
    inputs = make_gpu(tokens, 1, 40, 64, 128, 2048)
    clean_out, clean_lse = OP(inputs.q, inputs.kv_cache, inputs.indices)
    q = inputs.q.clone()
    q[0, 0, 5, 3] = math.nan
    out, lse = OP(q, inputs.kv_cache, inputs.indices)
    assert out[0, 0, 5].isnan().all()
    assert lse[0, 0, 5].isnan()
    others = torch.arange(128, device=DEVICE) != 5
    for got, clean in ((out, clean_out), (lse, clean_lse)):
        assert torch.equal(got[0, 0, others], clean[0, 0, others])
        assert torch.equal(got[1:], clean[1:])

    cache = inputs.kv_cache.clone()
    slot = int(inputs.indices[0, 0, 700])
    cache.view(-1, cache.shape[-1])[slot, 100] = 0x7F  # NaN in e4m3
    out, lse = OP(inputs.q, cache, inputs.indices)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan().all()

    sink = torch.linspace(-5, 5, 128, device=DEVICE)
    sink[3], sink[4] = -math.inf, math.inf
    out, _ = check(inputs.q, inputs.kv_cache, inputs.indices, attn_sink=sink)
    assert (out[:, :, 4] == 0).all()
    assert torch.equal(out[:, :, 3], clean_out[:, :, 3])


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tokens", [1, 8])
def test_parts_of_any_magnitude(tokens: int, heads: int) -> None:
    """Parts are fp16 in units of their own for each 128 columns of a row: groups of columns, and heads, may differ by
    any factor. Queries do not see the groups with large scales."""
    inputs = make_gpu(tokens, 1, 40, 64, heads, 2048)
    q = inputs.q.clone()
    q[..., :384] = 0
    slots = inputs.kv_cache.shape[0] * inputs.kv_cache.shape[1]
    spread = torch.rand(slots, 4, device=DEVICE) / 100 + 0.01
    for powers in ((0, 30, 60, 0), (100, -10, 90, 0), (-90, 20, 0, -60), (-110, -100, -90, -30)):
        scales = spread * torch.exp2(torch.tensor(powers, device=DEVICE))
        check(q, with_scales(inputs.kv_cache, scales), inputs.indices)


@pytest.mark.parametrize("heads", [64, 128])
def test_an_infinite_sum_stays_with_its_column(heads: int) -> None:
    """The unit of a part is that of its finite numbers: next to a column whose sum is infinite, the other 127 are as
    exact as ever. All scores are 0, and one key is 0 in the first 128 columns but one."""
    inputs = make_gpu(1, 1, 40, 64, heads, 2048)
    q = inputs.q.clone()
    q[..., 5] = 0
    cache = inputs.kv_cache.clone()
    key = cache.view(-1, cache.shape[-1])[int(inputs.indices[0, 0, 700])]
    key[:128] = 0
    key[512:516] = torch.tensor([3e38], device=DEVICE).view(torch.uint8)
    clean_out, clean_lse = check(q, cache, inputs.indices, sm_scale=0.0)
    key[5] = 0x3E  # 1.75
    out, lse = OP(q, cache, inputs.indices, sm_scale=0.0)
    assert torch.equal(lse, clean_lse)
    assert (out[..., 5] == math.inf).all()
    out[..., 5] = clean_out[..., 5]
    assert torch.equal(out, clean_out)


@pytest.mark.parametrize("heads", [64, 128])
def test_columns_of_different_magnitudes(heads: int) -> None:
    """Of 128 columns that share a scale, those of keys with small scales keep their digits next to a column in which
    one key alone, with a large scale, is not 0: down to 2^-30 of the largest number. All scores are 0."""
    inputs = make_gpu(1, 1, 40, 64, heads, 2048)
    cache = inputs.kv_cache.clone()
    keys = cache.view(-1, cache.shape[-1])
    keys[int(inputs.indices[0, 0, 700]), :128] = 0
    keys[int(inputs.indices[0, 0, 700]), 3] = 0x78  # 256
    scales = torch.ones(len(keys), 4, device=DEVICE) / 64
    for power in (-90, 0, 20):
        powers = torch.full((len(keys),), power, device=DEVICE)
        powers[int(inputs.indices[0, 0, 700])] += 30
        scaled = scales.clone()
        scaled[:, 0] *= torch.exp2(powers.float())
        check(inputs.q, with_scales(cache, scaled), inputs.indices, sm_scale=0.0)
