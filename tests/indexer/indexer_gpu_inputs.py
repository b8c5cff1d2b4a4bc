"""Inputs of the indexer on a GPU, and calls of its operators."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from indexer_cases import arguments
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, IndexerInputs, make_indexer_inputs
from dsa_ext.testing.tolerances import bits

LOGITS = torch.ops.dsa.indexer_logits.default
SELECT = torch.ops.dsa.topk_select.default
TOPK = torch.ops.dsa.indexer_topk.default
DEVICE = "cuda"
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
both_dtypes = pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
every_kernel = pytest.mark.parametrize(
    ("dtype", "heads", "dim"), list(itertools.product([FP8, BF16], [8, 16, 32, 64], [64, 128])), ids=str
)


def make_gpu(seq: int, s_kv: int, heads: int = 64, dim: int = 128, dtype: torch.dtype = FP8) -> IndexerInputs:
    return make_indexer_inputs(seq, s_kv, heads, dim, dtype=dtype, device=DEVICE)


def tensors(inputs: IndexerInputs) -> tuple[Tensor, ...]:
    return inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke


def logits_of(inputs: IndexerInputs, clean: bool = True) -> Tensor:
    result: Tensor = LOGITS(*tensors(inputs), inputs.k_scale, clean)
    return result


def selected(inputs: IndexerInputs, topk: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = TOPK(*tensors(inputs), topk, inputs.k_scale)
    return result


def composed(inputs: IndexerInputs, topk: int) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = SELECT(logits_of(inputs), inputs.ks, inputs.ke, topk)
    return result


def visible_keys(inputs: IndexerInputs) -> Tensor:
    return reference.indexer.inside(inputs.ks, inputs.ke, len(inputs.k))


def changed(inputs: IndexerInputs, change: Callable[[Tensor], Tensor], *names: str) -> IndexerInputs:
    """The inputs with `change` applied to the named tensors, except those that are None."""
    named = {name: getattr(inputs, name) for name in names}
    return replace(inputs, **{name: change(tensor) for name, tensor in named.items() if tensor is not None})


def queries(inputs: IndexerInputs, run: slice) -> IndexerInputs:
    return changed(inputs, lambda tensor: tensor[run], "q", "weights", "ks", "ke")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


BOUNDS = ("causal", "whole", "random", "packed", "few", "edges")


def with_bounds(inputs: IndexerInputs, kind: str) -> IndexerInputs:
    seq, s_kv = len(inputs.q), len(inputs.k)
    generator = torch.Generator(DEVICE).manual_seed(seq)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (seq,), generator=generator, dtype=torch.int32, device=DEVICE)

    position = torch.arange(seq, dtype=torch.int32, device=DEVICE) * s_kv // seq
    first = integers(0, s_kv)
    edges = (INT32_MIN, INT32_MIN + 1, -1, 0, 1, 63, 65, s_kv - 1, s_kv, s_kv + 1, INT32_MAX)
    pairs = list(itertools.islice(itertools.cycle(itertools.product(edges, edges)), seq))
    ks, ke = {
        "causal": (inputs.ks, inputs.ke),
        "whole": (torch.zeros_like(first), torch.full_like(first, s_kv)),
        "random": (integers(-3, s_kv + 4), integers(-3, s_kv + 4)),  # half of them inverted
        "packed": (position // 100 * 100, position + 1),
        "few": (first, first + integers(0, 4)),
        "edges": torch.tensor(pairs, dtype=torch.int32, device=DEVICE).unbind(1),
    }[kind]
    return replace(inputs, ks=ks, ke=ke)


def poisoned(inputs: IndexerInputs) -> IndexerInputs:
    """NaN in keys that no query sees, and in queries that see none."""
    visible = visible_keys(inputs)

    def spoil(where: Tensor, tensor: Tensor) -> Tensor:
        mask = where.view(-1, *(1,) * (tensor.dim() - 1))
        return tensor.float().masked_fill(mask, math.nan).to(tensor.dtype)

    inputs = changed(inputs, partial(spoil, ~visible.any(1)), "q", "weights")
    return changed(inputs, partial(spoil, ~visible.any(0)), "k", "k_scale")


def listed_keys(ids: Tensor, s_kv: int) -> Tensor:
    """The keys that some query lists, bool [S_kv]."""
    listed = torch.zeros(s_kv + 1, dtype=torch.bool, device=DEVICE)
    listed[torch.where((ids >= 0) & (ids < s_kv), ids, s_kv).long().flatten()] = True
    return listed[:-1]


def strided_weights(weights: Tensor) -> Tensor:
    """The same values with no dimension of stride 1."""
    return torch.stack([weights, weights], -1).permute(1, 0, 2).contiguous().permute(1, 0, 2)[..., 0]


def on_device(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in args.items()}


def message(op: str, args: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.dsa, op)(**args)
    return str(caught.value).splitlines()[0]


def check_a_mix_of_devices(op: str) -> None:
    args = on_device(arguments(op))
    first, *others = (name for name, value in args.items() if isinstance(value, Tensor))
    for name in others:
        text = message(op, {**args, name: args[name].cpu()})
        assert text == f"dsa::{op}: {name} must be on the device of {first}, cuda:0, got cpu"


def misplaced(tensor: Tensor) -> Iterator[tuple[Tensor, str]]:
    """Views with the same shape that no kernel takes, and the error of each."""
    *leading, rows, columns = tensor.shape
    size = tensor.element_size()
    yield tensor.new_empty(*leading, columns, rows).mT, f"must have stride 1 in its last dimension, got stride {rows}"
    wide = tensor.new_empty(*leading, rows, columns + 1)[..., :columns]
    multiples = f"must have rows that start 16-byte aligned: strides in multiples of {16 // size} elements"
    yield wide, f"{multiples}, got stride {wide.stride(0)} in dimension 0"
    late = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    yield late, f"must start 16-byte aligned, got an address that is {size} bytes past a multiple of 16"


def check_rows_that_no_kernel_takes(op: str, *names: str, views: int = 3) -> None:
    """The first `views` of the misplaced ones are errors."""
    args = on_device(arguments(op))
    for name in names:
        for view, text in itertools.islice(misplaced(args[name]), views):
            assert message(op, {**args, name: view}) == f"dsa::{op}: {name} {text}"
