"""The bounds that layers of transformers get instead of a mask, against the masks of transformers."""

from typing import Any

import pytest
import torch
from transformers_models import integration, transformers

from dsa_ext import reference

masking, masks = transformers.masking_utils, integration.masks


def in_blocks_of(size: int) -> Any:
    return lambda batch, head, query, key: query // size == key // size


def position_masks() -> dict[str, Any]:
    """Functions of positions that show each query one interval of 9 keys."""
    packed = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
    sequence = (packed == 0).cumsum(1)
    images = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1], [2, 2, -1, -1, -1, -1, -1, 3, 3]])
    causal = masking.causal_mask_function
    return {
        "causal": causal,
        "bidirectional": masking.bidirectional_mask_function,
        "blocks": masking.and_masks(causal, in_blocks_of(6)),
        "blocks, bidirectional": in_blocks_of(4),
        "window": masking.sliding_window_causal_mask_function(3),
        "window, bidirectional": masking.sliding_window_bidirectional_mask_function(2),
        "window, causal on one side": lambda batch, head, query, key: key > query - 3,
        "chunks": masking.chunked_causal_mask_function(4, torch.tensor([0, 3])),
        "prefix": masking.or_masks(causal, lambda batch, head, query, key: key < 5),
        "images": masking.or_masks(causal, masking.blockwise_overlay(images)),
        "packed": masking.packed_sequence_compatibility_function(causal, packed, sequence),
    }


@pytest.mark.parametrize("name", position_masks())
@pytest.mark.parametrize("queries", [9, 2, 1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_bounds_are_those_of_the_mask(name: str, queries: int, padded: bool, compiled: bool) -> None:
    """Whatever function of positions transformers defines a mask by."""
    torch._dynamo.reset()
    function = position_masks()[name]
    is_token = torch.ones(2, 9, dtype=torch.bool)
    is_token[0, :2] = is_token[1, 7:] = not padded
    arguments: Any = {"batch_size": 2, "q_length": queries, "kv_length": 9, "q_offset": 9 - queries}
    arguments |= {"mask_function": function, "attention_mask": is_token if padded else None, "device": "cpu"}
    call = torch.compile(masks.row_bounds, backend="eager", fullgraph=True) if compiled else masks.row_bounds
    bounds = call(**arguments)
    if name == "causal" and queries == 9 and not padded and not compiled:
        assert bounds is None
        starts, ends, _, is_causal, longest = masks.bounds_of(None, torch.empty(2, 9, 0))
    else:
        assert (bounds.dtype, bounds.shape[:3]) == (torch.int32, (2, 1, queries))
        starts, ends, _, is_causal, longest = masks.bounds_of(bounds, torch.empty(2, queries, 0))
    key = torch.arange(9)
    shown = (key >= starts[..., None]) & (key < ends[..., None])
    expected = masking.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]
    assert torch.equal(shown, expected)
    # In a compiled graph it is known of one function only.
    position = torch.arange(9 - queries, 9)[:, None]
    sees_later = position_masks()[name](torch.arange(2)[:, None, None], 0, position, key) & (key > position)
    assert is_causal == (name == "causal" if compiled else not sees_later.any())
    if queries == 9 and not compiled and bounds is not None:
        far = torch.where(expected, position - key + 1, 0).max()
        assert longest == far
    else:
        assert longest is None


@pytest.mark.parametrize("compiled", [False, True])
def test_a_mask_shorter_than_the_keys(compiled: bool) -> None:
    """The tokens after it are hidden, and are padding."""
    torch._dynamo.reset()
    arguments: Any = {"batch_size": 2, "q_length": 9, "kv_length": 9, "attention_mask": torch.ones(2, 7).bool()}
    call = torch.compile(masks.row_bounds, backend="eager", fullgraph=True) if compiled else masks.row_bounds
    starts, ends, counts, *_ = masks.bounds_of(call(**arguments, device="cpu"), torch.empty(2, 9, 0))
    key = torch.arange(9)
    shown = (key >= starts[..., None]) & (key < ends[..., None])
    assert torch.equal(shown, masking.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0])
    assert torch.equal(counts, (key < 7).int().expand(2, 9))


def test_bounds_of_long_masks_are_checked_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: Any = {"batch_size": 2, "q_length": 9, "kv_length": 9}
    for name, function in position_masks().items():
        expected = masks.row_bounds(**arguments, mask_function=function)
        with monkeypatch.context() as patch:
            patch.setattr(reference.indexer, "_CHUNK_ELEMENTS", 40)
            bounds = masks.row_bounds(**arguments, mask_function=function)
            assert bounds is expected is None if name == "causal" else torch.equal(bounds, expected), name


@pytest.mark.parametrize(
    ("change", "is_plain"),
    [
        ({}, True),
        ({"attention_mask": torch.ones(2, 9, dtype=torch.bool)}, True),
        ({"attention_mask": torch.ones(2, 9, dtype=torch.bool).tril(7)}, False),  # the first sequence is padded
        ({"attention_mask": torch.ones(2, 8, dtype=torch.bool)}, False),  # transformers hides the last token
        ({"q_length": 4, "q_offset": 5}, False),  # after a cache of 5 tokens
        ({"q_length": 4, "q_offset": torch.tensor(0)}, False),  # into a static cache
        ({"q_offset": torch.tensor(0)}, False),
        ({"use_vmap": True}, False),
    ],
    ids=str,
)
def test_plain_causal_masks_are_none(change: dict[str, Any], is_plain: bool) -> None:
    arguments: Any = {"batch_size": 2, "q_length": 9, "kv_length": 9, "device": "cpu"}
    assert (masks.row_bounds(**arguments | change) is None) == is_plain


def test_masks_that_are_no_intervals_stay_masks() -> None:
    """Those with holes, those that hide a query's own key, and functions that are not of positions alone."""
    causal = masking.causal_mask_function
    arguments: Any = {"batch_size": 1, "q_length": 9, "kv_length": 9, "device": "cpu"}
    for change in (
        {"mask_function": masking.and_masks(causal, lambda batch, head, query, key: key % 3 != 1)},
        {"mask_function": lambda batch, head, query, key: key < query},
        {"mask_function": masking.and_masks(causal, in_blocks_of(6)), "use_vmap": True},
    ):
        mask = masks.row_bounds(**arguments | change)
        assert torch.equal(mask, masking.sdpa_mask(**arguments | change, allow_is_causal_skip=False))
    bounds = masks.bounds_of(mask, torch.empty(1, 9, 0))  # layers take those of the last
    assert bounds is not None
    assert bounds.starts.tolist() == [[0] * 6 + [6] * 3]
    compiled = torch.compile(masks.row_bounds, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="must be one interval"):
        compiled(**arguments, mask_function=lambda batch, head, query, key: key < query)
