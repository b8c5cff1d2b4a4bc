"""Lists that end in padding: the same bits as with topk_length, and little time for what is behind the last key."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bwd_gpu import normal
from decode_gpu import OP as DECODE
from decode_gpu import check
from sparse_mla_gpu_inputs import DEVICE, make_bounds, make_gpu
from streams import written_late
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, Inputs, make_cache
from dsa_ext.testing.timing import time_ms

pytestmark = pytest.mark.gpu
OPS = torch.ops.dsa
#: Slots of a call from which on the lengths of lists are found; of sparse_mla_decode.
FEWEST_SLOTS, FEWEST_DECODE_SLOTS = 2**21, 2**18
#: Where the last key of a list may be: nowhere, at either end, around tiles of 64 slots.
FROM_BEGIN = (0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 513, 2047, 2048)
#: The same, counted from the end: around the 32 slots read first and the steps of 256 that follow.
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


def enough_queries(topk: int) -> int:
    """So many that the lengths of their lists are found."""
    return FEWEST_SLOTS // topk + 1


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("heads", "topk"), [(128, 1023), (128, 1024), (128, 2048), (64, 2048), (32, 5000), (16, 2048), (5, 100)], ids=str
)
def test_attention(heads: int, topk: int) -> None:
    inputs = make_gpu(seq=enough_queries(topk), s_kv=3000, heads=heads, topk=topk)
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
    return normal(out), inputs.q, inputs.kv, out, lse, indices


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("s_kv", [3000, 40000], ids=["sums in L2", "sorted lists"])
@pytest.mark.parametrize("heads", [128, 64, 16])
def test_gradients(heads: int, s_kv: int, groups: int) -> None:
    """Additions to dkv, whose order differs."""
    inputs = make_gpu(seq=enough_queries(2048), s_kv=s_kv, heads=heads * groups, groups=groups, topk=2048)
    indices, lengths = trimmed(inputs.indices, s_kv)
    longest = lengths.amax(2)
    args = forward_and_dout(inputs, indices, longest)
    for return_dist in (False, True):
        dq, dkv, _, dist = OPS.sparse_mla_bwd(*args, causal=False, return_dist=return_dist)
        expected = OPS.sparse_mla_bwd(*args, causal=False, topk_length=longest, return_dist=return_dist)
        assert_same((dq, dist), (expected[0], expected[3]))
        assert float((dkv.float() - expected[1].float()).norm() / expected[1].float().norm()) < 2**-9


@pytest.mark.parametrize("heads", [256, 32])
@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"per_head_block": True}], ids=str)
def test_attn_dist(heads: int, options: dict[str, Any]) -> None:
    """Slots behind the last key are written."""
    inputs = make_gpu(seq=enough_queries(2048), s_kv=3000, heads=heads, groups=2, topk=2048)
    indices, lengths = trimmed(inputs.indices, 3000)
    longest = lengths.amax(2)
    lse = OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, causal=False, topk_length=longest)[1]
    args = (inputs.q, inputs.kv, indices, lse)
    got = OPS.attn_dist(*args, causal=False, **options)
    assert torch.equal(got, OPS.attn_dist(*args, causal=False, topk_length=longest, **options))
    assert (got[..., (indices < 0) | (indices >= 3000)] == 0).all()


@pytest.mark.parametrize("heads", [128, 64, 16])
@pytest.mark.parametrize("hides", ["causal", "positions_per_key", "bounds"])
def test_keys_hidden_by_position(hides: str, heads: int) -> None:
    """The end of a list is also what causal masking or bounds hide: ascending lists, of 512 columns, and a sink."""
    s_kv, topk = 3000, 1024
    seq = enough_queries(topk)
    inputs = make_gpu(seq=seq, s_kv=s_kv, heads=heads, topk=topk, d_qk=512)
    indices = inputs.indices.remainder(s_kv).sort(dim=-1).values.int()
    options: dict[str, Any] = {"causal": hides != "bounds", "q_start": 0, "positions_per_key": 1}
    if hides == "causal":
        options["q_start"] = 1500
    elif hides == "positions_per_key":
        options |= {"q_start": 4900, "positions_per_key": 4}
    else:
        options |= make_bounds(s_kv, 1, seq)
    hidden = {name: options.get(name) for name in ("causal", "q_start", "positions_per_key", "starts", "ends")}
    visible = reference.sparse_mla.visible_slots(indices, s_kv, topk_length=None, **hidden)
    lengths = (visible * torch.arange(1, topk + 1, device=DEVICE)).amax((2, 3)).int()
    assert (lengths < topk).any()
    assert (lengths > 0).any()
    options["sm_scale"] = 0.05
    sink = torch.linspace(-3, 3, heads, device=DEVICE)
    out, lse = OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, **options, topk_length=lengths, attn_sink=sink)
    assert_same(OPS.sparse_mla_fwd(inputs.q, inputs.kv, indices, **options, attn_sink=sink), (out, lse))
    dist = OPS.attn_dist(inputs.q, inputs.kv, indices, lse, **options, topk_length=lengths)
    assert_same((OPS.attn_dist(inputs.q, inputs.kv, indices, lse, **options),), (dist,))
    args = (normal(out), inputs.q, inputs.kv, out, lse, indices)
    assert_same(
        OPS.sparse_mla_bwd(*args, **options, deterministic=True),
        OPS.sparse_mla_bwd(*args, **options, topk_length=lengths, deterministic=True),
    )


@pytest.mark.parametrize("packed", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("heads", [128, 64, 32, 16])
@pytest.mark.parametrize("topk", [100, 1023, 2048])
def test_decode(topk: int, heads: int, packed: bool) -> None:
    tokens = FEWEST_DECODE_SLOTS // topk + 1
    inputs = make_cache(tokens // 2 + 1, 2, 80, 64, heads, topk, packed=packed, device=DEVICE)
    indices, lengths = trimmed(inputs.indices, 80 * 64)
    args = {"q": inputs.q, "kv_cache": inputs.kv_cache, "indices": indices}
    for batch_invariant in (False, True):
        results = DECODE(**args, batch_invariant=batch_invariant)
        assert_same(results, DECODE(**args, topk_length=lengths, batch_invariant=batch_invariant))


@pytest.mark.parametrize("packed", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("heads", [128, 64, 32, 16])
def test_decode_of_few_tokens(heads: int, packed: bool) -> None:
    """Padding in lists whose lengths are not found, split into parts or not; many copies of zeros at a time."""
    for batch in (1, 3, 9, 20, 32):
        inputs = make_cache(batch, 2, 80, 64, heads, 2048, packed=packed, device=DEVICE)
        check(inputs.q, inputs.kv_cache, trimmed(inputs.indices, 80 * 64)[0])


@pytest.mark.parametrize("packed", [True, False], ids=["fp8", "bf16"])
def test_decode_in_parts(packed: bool) -> None:
    """Lists are split up to the lengths that are found, or given."""
    inputs = make_cache(64, 1, 400, 64, 16, 8192, packed=packed, device=DEVICE)
    indices, lengths = trimmed(inputs.indices, 400 * 64)
    whole = DECODE(inputs.q, inputs.kv_cache, indices, batch_invariant=True)
    results = DECODE(inputs.q, inputs.kv_cache, indices)
    assert not torch.equal(results[0], whole[0]), "lists are split"
    assert_same(results, DECODE(inputs.q, inputs.kv_cache, indices, topk_length=lengths))
    check(inputs.q, inputs.kv_cache, indices)


def test_order_of_padding_does_not_change_dq() -> None:
    """Lists that are sorted before their lengths are found, and that the last wave splits."""
    seq, s_kv, topk = 1100, 17000, 2048
    inputs = make_gpu(seq=seq, s_kv=s_kv, heads=64, topk=topk)
    lists = torch.where(torch.arange(topk, device=DEVICE) < 1000, inputs.indices.remainder(s_kv).int(), -1)
    args = forward_and_dout(inputs, lists, torch.full((1, seq), topk, dtype=torch.int32, device=DEVICE))[:-1]
    dq = OPS.sparse_mla_bwd(*args, lists, causal=False)[0]
    order = torch.randperm(topk, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(OPS.sparse_mla_bwd(*args, lists[..., order], causal=False)[0], dq)


def test_small_calls_have_the_same_bits() -> None:
    seq = enough_queries(2048)
    inputs = make_gpu(seq=seq, s_kv=3000, heads=128, topk=2048)
    indices, _ = trimmed(inputs.indices, 3000)
    q, some = inputs.q, slice(50, 150)
    out, lse = OPS.sparse_mla_fwd(q, inputs.kv, indices, causal=False)
    small = OPS.sparse_mla_fwd(q[:, some], inputs.kv, indices[:, some], causal=False)
    assert_same(small, (out[:, some], lse[:, some]))
    dist = OPS.attn_dist(q, inputs.kv, indices, lse, causal=False)
    small_dist = OPS.attn_dist(q[:, some], inputs.kv, indices[:, some], lse[:, some], causal=False)
    assert torch.equal(small_dist, dist[:, some])


def test_any_layout() -> None:
    """Two sequences, lists that are rows of wider ones in another order of dimensions, and lists that are shared."""
    inputs = make_gpu(batch=2, seq=enough_queries(4096), s_kv=3000, heads=64, groups=2, topk=2048)
    indices, _ = trimmed(inputs.indices, 3000)
    wide = torch.full((2, indices.shape[1], 2, 2053), 7, dtype=torch.int32, device=DEVICE).transpose(0, 1).contiguous()
    view = wide.transpose(0, 1)[..., 3:-2]
    view.copy_(indices)
    shared = indices[:, :1].expand(-1, indices.shape[1], -1, -1)
    for lists, same in ((view, indices), (shared, shared.contiguous())):
        args = forward_and_dout(inputs, same, torch.full(same.shape[:2], 2048, dtype=torch.int32, device=DEVICE))[:-1]
        out, lse = args[3:]
        assert_same(OPS.sparse_mla_fwd(inputs.q, inputs.kv, lists, causal=False), (out, lse))
        dist = OPS.attn_dist(inputs.q, inputs.kv, same, lse, causal=False)
        assert torch.equal(OPS.attn_dist(inputs.q, inputs.kv, lists, lse, causal=False), dist)
        assert_same(
            OPS.sparse_mla_bwd(*args, lists, causal=False, deterministic=True),
            OPS.sparse_mla_bwd(*args, same, causal=False, deterministic=True),
        )


def test_lists_that_change() -> None:
    """A graph serves other lists than those of its capture; lists are written late on a side stream."""
    inputs = make_gpu(seq=enough_queries(2048), s_kv=3000, heads=64, topk=2048)
    indices, _ = trimmed(inputs.indices, 3000)
    held = torch.full_like(indices, -1)
    cache = make_cache(128, 1, 80, 64, 64, 2048, device=DEVICE)
    ids, _ = trimmed(cache.indices, 80 * 64)
    held_ids = torch.full_like(ids, -1)

    def run(lists: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        out, lse = OPS.sparse_mla_fwd(inputs.q, inputs.kv, lists, causal=False)
        return (
            out,
            lse,
            OPS.attn_dist(inputs.q, inputs.kv, lists, lse, causal=False),
            *DECODE(cache.q, cache.kv_cache, slots),
        )

    expected = run(indices, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(held, held_ids)
    held.copy_(indices)
    held_ids.copy_(ids)
    graph.replay()
    assert_same(captured, expected)
    assert_same(written_late(indices, lambda late: run(late, ids)), expected)
    assert_same(written_late(ids, lambda late: run(indices, late)), expected)


@pytest.mark.timing
@pytest.mark.parametrize("packed", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("heads", [128, 64, 16])
def test_padding_takes_no_longer_than_keys(heads: int, packed: bool) -> None:
    """In lists whose lengths are not found."""
    inputs = make_cache(8, 1, 400, 64, heads, 2048, packed=packed, device=DEVICE)
    short = torch.where(torch.arange(2048, device=DEVICE) < 128, inputs.indices, -1)
    short_ms = time_ms(lambda: DECODE(inputs.q, inputs.kv_cache, short))
    full_ms = time_ms(lambda: DECODE(inputs.q, inputs.kv_cache, inputs.indices))
    assert short_ms < 1.15 * full_ms, f"{short_ms:.4f} ms, with full lists {full_ms:.4f} ms"


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
    """The same."""
    inputs = make_gpu(seq=1024, s_kv=4096, heads=heads, topk=2048)
    short = torch.where(torch.arange(2048, device=DEVICE) < 128, inputs.indices, -1)
    q, kv = inputs.q, inputs.kv
    out, lse = OPS.sparse_mla_fwd(q, kv, inputs.indices, causal=False)
    assert_half("forward", lambda ids: OPS.sparse_mla_fwd(q, kv, ids, causal=False), short, inputs.indices)
    assert_half("attn_dist", lambda ids: OPS.attn_dist(q, kv, ids, lse, causal=False), short, inputs.indices)
    args = (out, q, kv, out, lse)
    assert_half("backward", lambda ids: OPS.sparse_mla_bwd(*args, ids, causal=False), short, inputs.indices)


def assert_half(name: str, run: Callable[[Tensor], object], short: Tensor, full: Tensor) -> None:
    short_ms, full_ms = time_ms(lambda: run(short)), time_ms(lambda: run(full))
    assert short_ms < full_ms / 2, f"{name}: {short_ms:.3f} ms, with full lists {full_ms:.3f} ms"
