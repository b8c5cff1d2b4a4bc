"""Lists that end in padding: the same bits as with topk_length, and little time for what is behind the last key."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_gpu import OP as DECODE
from decode_gpu import check
from sparse_mla_gpu_inputs import DEVICE, make_gpu
from torch import Tensor

from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, Inputs, make_cache
from dsa_ext.testing.timing import time_ms

pytestmark = pytest.mark.gpu
OPS = torch.ops.dsa
#: Where the last key of a list may be: nowhere, at either end, around tiles of 64 slots.
FROM_BEGIN = (0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 2047, 2048)
#: The same, counted from the end: around the 32 slots searched first and the steps of 256 that follow.
FROM_END = (0, 1, 31, 32, 33, 287, 288, 289, 543, 544, 545, 1823, 1824, 1825)


def trimmed(indices: Tensor, s_kv: int) -> tuple[Tensor, Tensor]:
    """Lists [..., K] that end in ids that are no keys, after holes and their last key, and where these ends begin."""
    topk = indices.shape[-1]
    ends = [*FROM_BEGIN, *(topk - n for n in FROM_END)]
    lengths = torch.tensor([n for n in ends if 0 <= n <= topk], device=DEVICE, dtype=torch.int32)
    rows = indices.shape[:-1].numel()
    lengths = lengths.repeat(rows // len(lengths) + 1)[:rows].view(indices.shape[:-1])
    slots = torch.arange(topk, device=DEVICE)
    padding = torch.tensor([-1, s_kv, INT32_MIN, INT32_MAX, -7], device=DEVICE, dtype=torch.int32)[slots % 5]
    holes = (slots % 3 == 1) & (slots + 1 != lengths[..., None])
    keys = indices.remainder(s_kv).int()
    return torch.where(holes | (slots >= lengths[..., None]), padding, keys), lengths


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("topk", [1, 100, 1100, 2048])
@pytest.mark.parametrize(("heads", "seq"), [(128, 40), (64, 150), (32, 80), (16, 150), (5, 80)], ids=str)
def test_attention(heads: int, seq: int, topk: int) -> None:
    """Queries enough that the forward pass splits no list into parts, whose ends would depend on the length."""
    inputs = make_gpu(seq=seq, s_kv=3000, heads=heads, topk=topk)
    indices, lengths = trimmed(inputs.indices, 3000)
    q, kv, options = inputs.q, inputs.kv, {"causal": False, "topk_length": lengths[..., 0]}
    args = forward_and_dout(inputs, indices, lengths[..., 0])
    out, lse = args[3:5]
    assert_same(OPS.sparse_mla_fwd(q, kv, indices, causal=False), (out, lse))
    dist = OPS.attn_dist(q, kv, indices, lse, **options)
    assert_same((OPS.attn_dist(q, kv, indices, lse, causal=False),), (dist,))
    assert_same(
        OPS.sparse_mla_bwd(*args, causal=False, deterministic=True),
        OPS.sparse_mla_bwd(*args, **options, deterministic=True),
    )


def forward_and_dout(inputs: Inputs, indices: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
    """The tensors that sparse_mla_bwd takes."""
    out, lse = OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, causal=False, topk_length=lengths)
    dout = torch.randn(out.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1)).to(out.dtype)
    return dout, inputs.q, inputs.kv, out, lse, indices


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("s_kv", [3000, 40000], ids=["sums in L2", "sorted lists"])
@pytest.mark.parametrize(("heads", "seq"), [(128, 281), (128, 3), (64, 281), (64, 3)], ids=str)
def test_gradients(heads: int, seq: int, s_kv: int, groups: int) -> None:
    """Additions to dkv, whose order differs; more halves of items than SMs, and an odd number of queries."""
    inputs = make_gpu(seq=seq, s_kv=s_kv, heads=heads * groups, groups=groups, topk=2048)
    indices, lengths = trimmed(inputs.indices, s_kv)
    longest = lengths.amax(2)
    args = forward_and_dout(inputs, indices, longest)
    for return_dist in (False, True):
        got = OPS.sparse_mla_bwd(*args, causal=False, return_dist=return_dist)
        expected = OPS.sparse_mla_bwd(*args, causal=False, topk_length=longest, return_dist=return_dist)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * float(b.float().abs().amax()) if b.numel() else 0)


@pytest.mark.parametrize("seq", [3, 40, 150])
@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"per_head_block": True}], ids=str)
def test_attn_dist(seq: int, options: dict[str, Any]) -> None:
    """Queries whose lists are divided into pieces too; slots behind the last key are written."""
    inputs = make_gpu(seq=seq, s_kv=3000, heads=256, groups=2, topk=2048)
    indices, lengths = trimmed(inputs.indices, 3000)
    longest = lengths.amax(2)
    lse = OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, causal=False, topk_length=longest)[1]
    args = (inputs.q, inputs.kv, indices, lse)
    got = OPS.attn_dist(*args, causal=False, **options)
    assert torch.equal(got, OPS.attn_dist(*args, causal=False, topk_length=longest, **options))
    assert (got[..., (indices < 0) | (indices >= 3000)] == 0).all()


def test_keys_hidden_by_position() -> None:
    """The end of a list is also what causal masking or bounds hide."""
    seq, s_kv = 300, 2000
    inputs = make_gpu(seq=seq, s_kv=s_kv, heads=64, topk=1024)
    indices = torch.arange(1024, device=DEVICE, dtype=torch.int32).expand(1, seq, 1, 1024)
    lengths = torch.arange(1, seq + 1, device=DEVICE, dtype=torch.int32)[None]
    expected = OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, causal=False, topk_length=lengths)
    assert_same(OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, causal=True), expected)
    bounds = {"starts": torch.zeros_like(lengths), "ends": lengths}
    assert_same(OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, causal=False, **bounds), expected)


@pytest.mark.parametrize("topk", [1, 100, 1100, 2048])
@pytest.mark.parametrize("packed", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("heads", [128, 64, 32, 16])
def test_decode(heads: int, packed: bool, topk: int) -> None:
    inputs = make_cache(75, 2, 80, 64, heads, topk, packed=packed, device=DEVICE)
    indices, lengths = trimmed(inputs.indices, 80 * 64)
    args = {"q": inputs.q, "kv_cache": inputs.kv_cache, "indices": indices, "batch_invariant": True}
    assert_same(DECODE(**args), DECODE(**args, topk_length=lengths))


@pytest.mark.parametrize("packed", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("heads", [128, 64, 32, 16])
def test_decode_in_parts(heads: int, packed: bool) -> None:
    """Lists that are split into parts: of all slots, or of those up to the last key."""
    for batch in (1, 3, 9, 20):
        inputs = make_cache(batch, 2, 80, 64, heads, 2048, packed=packed, device=DEVICE)
        check(inputs.q, inputs.kv_cache, trimmed(inputs.indices, 80 * 64)[0])


@pytest.mark.timing
@pytest.mark.parametrize("packed", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("heads", [128, 64, 16])
def test_decode_of_short_lists_is_short(heads: int, packed: bool) -> None:
    """128 of 2048 slots with keys take less than half of the time of 2048."""
    inputs = make_cache(128, 1, 400, 64, heads, 2048, packed=packed, device=DEVICE)
    short = torch.where(torch.arange(2048, device=DEVICE) < 128, inputs.indices, -1)
    assert_half("decode", lambda ids: DECODE(inputs.q, inputs.kv_cache, ids), short, inputs.indices)


@pytest.mark.timing
@pytest.mark.parametrize("heads", [128, 64, 16])
def test_attention_of_short_lists_is_short(heads: int) -> None:
    """The same; attn_dist of few heads does not search for the end of a list."""
    inputs = make_gpu(seq=1024, s_kv=4096, heads=heads, topk=2048)
    short = torch.where(torch.arange(2048, device=DEVICE) < 128, inputs.indices, -1)
    q, kv = inputs.q, inputs.kv
    out, lse = OPS.sparse_mla_fwd(q, kv, inputs.indices, causal=False)
    assert_half("forward", lambda ids: OPS.sparse_mla_fwd(q, kv, ids, causal=False), short, inputs.indices)
    if heads >= 64:
        assert_half("attn_dist", lambda ids: OPS.attn_dist(q, kv, ids, lse, causal=False), short, inputs.indices)
    args = (out, q, kv, out, lse)
    assert_half("backward", lambda ids: OPS.sparse_mla_bwd(*args, ids, causal=False), short, inputs.indices)


def assert_half(name: str, run: Callable[[Tensor], object], short: Tensor, full: Tensor) -> None:
    short_ms, full_ms = time_ms(lambda: run(short)), time_ms(lambda: run(full))
    assert short_ms < full_ms / 2, f"{name}: {short_ms:.3f} ms, with full lists {full_ms:.3f} ms"
