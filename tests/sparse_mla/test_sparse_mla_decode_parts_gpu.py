"""sparse_mla_decode where the keys of a token are split over SMs, and the parts are combined."""

import itertools
import math

import pytest
import torch
from decode_gpu import OP, check, make_gpu
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
    """Four groups of threads combine a row where many SMs are free, and one group elsewhere. The columns of parts have
    another order in fp8 with 64 heads in an item: here one token of 128 heads with 29 parts and more, five tokens of 64
    and 128 heads with many keys, and 32 tokens. In the second call some parts have no key."""
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
