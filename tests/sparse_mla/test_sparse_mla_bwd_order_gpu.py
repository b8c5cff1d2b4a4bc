"""sparse_mla_bwd where the sums of dkv do not fit in L2: lists in any order, which are sorted first."""

from typing import Any

import pytest
import torch
from bwd_gpu import DEVICE, FWD, OP, check, normal
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import Inputs, drift_indices, make_inputs, poison_unselected, spoil_indices
from dsa_ext.testing.memory import workspace_bytes
from dsa_ext.testing.tolerances import similarity_error

pytestmark = pytest.mark.gpu

#: More than 32 MB of sums, with 512 columns too.
KEYS = 17_000
LONGEST = 8192  # of the lists that are sorted
#: Heads, groups and columns.
SHAPES = [(64, 1, 576), (128, 1, 512), (16, 1, 576), (130, 2, 576), (33, 1, 512)]


def ascending(indices: Tensor) -> Tensor:
    """Keys in ascending order, then ids that are too large, then negative ones."""
    return indices.gather(-1, (indices.long() % 2**32).argsort(-1))


def shuffled(indices: Tensor, lengths: Tensor | None = None) -> Tensor:
    """In random order; `lengths` [B, S] leading slots stay the leading ones."""
    order = torch.rand(indices.shape, generator=torch.Generator(DEVICE).manual_seed(7), device=DEVICE)
    if lengths is not None:
        order += torch.arange(indices.shape[-1], device=DEVICE) >= lengths[..., None, None]
    return indices.gather(-1, order.argsort(-1))


def poisoned(inputs: Inputs, indices: Tensor, options: dict[str, Any]) -> Tensor:
    """kv in which every key that no query sees is NaN or infinite."""
    defaults = {"causal": True, "q_start": 0, "positions_per_key": 1, "topk_length": None}
    names = [*defaults, "starts", "ends"]
    given = {name: value for name, value in options.items() if name in names}
    visible = reference.sparse_mla.visible_slots(indices, KEYS, **(defaults | given))
    return poison_unselected(inputs.kv, indices, visible)


def assert_same(inputs: Inputs, kv: Tensor, lists: tuple[Tensor, Tensor], **options: Any) -> None:
    """The gradients of both lists: dq bitwise, dkv but for the order of its additions."""
    out, lse = FWD(inputs.q, kv, lists[0], **options)
    first, second = (OP(normal(out), inputs.q, kv, out, lse, indices, **options) for indices in lists)
    assert torch.equal(first[0], second[0])
    assert similarity_error(first[1], second[1]) <= 7e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("topk", [1, 100, 512, 513, 1024, 2047, 2048, 4097, LONGEST, LONGEST + 1])
def test_lists_of_every_length(topk: int, shape: tuple[int, int, int]) -> None:
    """A third of the slots are no keys, and a key is listed twice."""
    heads, groups, d_qk = shape
    inputs = make_inputs(1, 7, KEYS, heads, groups, topk, d_qk, device=DEVICE)
    indices = spoil_indices(inputs.indices, KEYS)
    kv = poisoned(inputs, indices, {"causal": False})
    given = indices.clone()
    check(inputs.q, kv, indices, causal=False)
    assert torch.equal(indices, given)
    if topk <= LONGEST:
        assert_same(inputs, kv, (indices, ascending(indices)), causal=False)


def reordered(kind: str, indices: Tensor) -> Tensor:
    """Of ascending lists."""
    seq, topk = indices.shape[1], indices.shape[3]
    match kind:
        case "random":
            return shuffled(indices)
        case "descending":
            return indices.flip(-1)
        case "rotated":
            return indices.roll(topk // 2, -1)
    # Two neighboring slots change places, other ones in each list: also those of two warps, and of two threads.
    others = indices.clone()
    for query in range(seq):
        slot = query * 31 % (topk - 100)  # among the keys
        others[:, query, :, [slot, slot + 1]] = indices[:, query, :, [slot + 1, slot]]
    return others


@pytest.mark.parametrize("kind", ["random", "descending", "rotated", "two change places"])
def test_order_does_not_change_dq(kind: str) -> None:
    inputs = make_inputs(2, 140, KEYS, 64, 1, 700, device=DEVICE)
    indices = ascending(inputs.indices.where(inputs.indices % 16 != 0, -1))
    others = reordered(kind, indices)
    assert (others != indices).any(-1).all()
    assert torch.equal(ascending(others), indices)
    assert_same(inputs, inputs.kv, (others, indices), causal=False)
    check(inputs.q, inputs.kv, others, causal=False)


def options_of(name: str, seq: int, topk: int) -> dict[str, Any]:
    generator = torch.Generator(DEVICE).manual_seed(5)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (2, seq), generator=generator, device=DEVICE, dtype=torch.int32)

    return {
        "causal": {"causal": True, "q_start": 6000},
        "keys of several positions": {"causal": True, "q_start": 30_000, "positions_per_key": 4},
        "lengths": {"causal": False, "topk_length": integers(-1, topk + 3)},
        "lengths and causal": {"causal": True, "q_start": 9000, "topk_length": integers(0, topk)},
        "bounds": {"causal": False, "starts": integers(-5, KEYS), "ends": integers(0, KEYS + 5)},
        "a sink": {"causal": False, "attn_sink": torch.linspace(-3, 3, 64, device=DEVICE)},
    }[name]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "name", ["causal", "keys of several positions", "lengths", "lengths and causal", "bounds", "a sink"]
)
def test_options(name: str, groups: int) -> None:
    seq, topk = 21, 900
    inputs = make_inputs(2, seq, KEYS, 64, groups, topk, device=DEVICE)
    options = options_of(name, seq, topk)
    indices = spoil_indices(inputs.indices, KEYS)
    kv = poisoned(inputs, indices, options)
    check(inputs.q, kv, indices, with_dlse=True, **options)
    assert_same(inputs, kv, (indices, shuffled(indices, options.get("topk_length"))), **options)


@pytest.mark.parametrize("ids", [[7], [7, KEYS - 1], [-1], [KEYS]], ids=str)
def test_few_different_ids(ids: list[int]) -> None:
    """Lists that repeat one key or two in all slots, and lists without a key."""
    inputs = make_inputs(1, 5, KEYS, 64, 1, 2048, device=DEVICE)
    inputs.indices[:] = torch.tensor(ids, device=DEVICE).repeat(2048 // len(ids))
    check(inputs.q, inputs.kv, inputs.indices, causal=False)


@pytest.mark.parametrize("heads", [5, 16, 32])
def test_merged_lists(heads: int) -> None:
    """Lists of neighboring queries overlap; every other 16 queries repeat a key and are not merged."""
    seq, topk = 300, 1024
    inputs = make_inputs(1, seq, KEYS, heads, 1, 1, device=DEVICE)
    indices = drift_indices((1, seq, 1, topk), KEYS, torch.Generator(DEVICE).manual_seed(3))
    repeating = torch.arange(seq, device=DEVICE) // 16 % 2 == 1
    indices[:, repeating, :, 1] = indices[:, repeating, :, 0]
    others = shuffled(indices)
    check(inputs.q, inputs.kv, others, causal=False)
    assert_same(inputs, inputs.kv, (others, indices), causal=False)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_dist_has_the_order_of_the_given_lists(heads: int, with_sink: bool) -> None:
    """From the main kernel, or from that of attn_dist."""
    inputs = make_inputs(1, 300, KEYS, heads, 1, 1024, device=DEVICE)
    indices = spoil_indices(inputs.indices, KEYS)
    options = {"attn_sink": torch.linspace(-3, 3, heads, device=DEVICE)} if with_sink else {}
    check(inputs.q, inputs.kv, indices, causal=False, return_dist=True, **options)


def test_views() -> None:
    """Rows of lists that start anywhere, in any order of dimensions, and one list for all queries."""
    inputs = make_inputs(2, 6, KEYS, 70, 2, 333, device=DEVICE)
    indices = spoil_indices(inputs.indices, KEYS)
    wide = torch.cat([indices.flip(-1), indices, indices], -1).transpose(0, 2).contiguous().transpose(0, 2)
    view = wide[..., 333:666]
    assert torch.equal(view, indices)
    assert_same(inputs, inputs.kv, (view, indices), causal=False)
    check(inputs.q, inputs.kv, view, causal=False)
    check(inputs.q, inputs.kv, indices[:1, 1:2].expand(indices.shape), causal=False)


def test_memory_of_the_sorted_lists() -> None:
    inputs = make_inputs(1, 2000, KEYS, 64, 1, 1, device=DEVICE)
    indices = torch.arange(2048, dtype=torch.int32, device=DEVICE).flip(0).repeat(1, 2000, 1, 1)
    out, lse = FWD(inputs.q, inputs.kv, indices, causal=False)
    extra = workspace_bytes(lambda: OP(out, inputs.q, inputs.kv, out, lse, indices, causal=False))
    assert extra <= KEYS * 576 * 4 + indices.nbytes + 20 * 2**20
