"""Sizes that constructors take: positive ints, checked before anything is allocated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dsa_ext import PagedKVCache
from dsa_ext.nn import BlockKVCache, BlockSparseAttention, FP8Linear, HyperConnection, LightningIndexer, SparseMLA

CONSTRUCTORS: list[tuple[Callable[..., Any], dict[str, Any], set[str]]] = [
    (
        SparseMLA,
        {"hidden_size": 64, "heads": 2, "q_lora_rank": 32, "nope_dim": 16, "rope_dim": 64, "v_dim": 16, "topk": 16},
        {"kv_lora_rank"},
    ),
    (LightningIndexer, {"hidden_size": 64, "q_lora_rank": 32, "heads": 8, "head_dim": 64}, {"rope_dim"}),
    (BlockSparseAttention, {"hidden_size": 64, "heads": 2, "kv_heads": 1, "head_dim": 64}, set()),
    (BlockKVCache, {"batch": 1, "capacity": 128, "kv_heads": 1, "head_dim": 64}, set()),
    (HyperConnection, {"layer": nn.Identity(), "hidden_size": 128, "streams": 2, "iterations": 3}, set()),
    (
        PagedKVCache,
        {"layers": 1, "num_blocks": 2, "max_sequences": 1, "max_length": 64, "page_size": 64},
        {"columns", "index_columns"},
    ),
]
CASES = [
    pytest.param(constructor, {**arguments, name: wrong}, name, wrong, id=f"{constructor.__name__}-{name}-{wrong!r}")
    for constructor, arguments, others in CONSTRUCTORS
    for name in sorted(set(arguments) - {"layer"} | others)
    for wrong in (2.0, 64.0, -64, True, "64")
]


@pytest.mark.parametrize(("constructor", "arguments"), [(c, a) for c, a, _ in CONSTRUCTORS], ids=lambda x: str(x)[:30])
def test_legal_sizes(constructor: Callable[..., Any], arguments: dict[str, Any]) -> None:
    constructor(**arguments)


@pytest.mark.parametrize(("constructor", "arguments", "name", "wrong"), CASES)
def test_size_is_no_positive_int(
    constructor: Callable[..., Any], arguments: dict[str, Any], name: str, wrong: Any
) -> None:
    with pytest.raises(ValueError, match=f"{constructor.__name__}: {name} must be .*, got {wrong!r}"):
        constructor(**arguments)


@pytest.mark.parametrize(
    ("linear", "text"),
    [
        (nn.Linear(128, 8, dtype=torch.complex64), "the weight must be floating-point, got complex64 \\[8, 128\\]"),
        (nn.Linear(128, 0), "out_features must be a positive int, got 0"),
        (nn.Linear(0, 8, bias=False), "in_features must be a positive int, got 0"),
    ],
)
def test_linear_of_another_kind(linear: nn.Linear, text: str) -> None:
    with pytest.raises(ValueError, match=f"FP8Linear: {text}"):
        FP8Linear(linear)
