"""Small inputs for the references of the indexer."""

import torch
from torch import Tensor

from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, IndexerInputs, make_indexer_inputs

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]
# The reference takes any number of heads and columns; small ones keep the loops fast.
SEQ, KEYS, HEADS, DIM = 7, 12, 3, 8
# The first key of each query, and the one after its last: all, some, one, none, inverted, beyond the keys.
BOUNDS = [(0, KEYS), (0, 5), (3, 9), (4, 5), (4, 4), (9, 3), (INT32_MIN, INT32_MAX)]
MORE_BOUNDS = [
    (-5, 2),
    (8, KEYS + 1),
    (INT32_MAX, INT32_MIN),
    (KEYS, KEYS + 5),
    (-9, -3),
    (-1, 0),
    (KEYS - 1, INT32_MAX),
]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def make_small(dtype: torch.dtype, bounds: list[tuple[int, int]] | None = None) -> IndexerInputs:
    """Small inputs; with `bounds`, these instead of causal ones."""
    inputs = make_indexer_inputs(SEQ, KEYS, HEADS, DIM, dtype=dtype)
    if bounds is not None:
        inputs.ks, inputs.ke = (int32(*ends) for ends in zip(*bounds, strict=True))
    return inputs


def tensors(inputs: IndexerInputs) -> tuple[Tensor, ...]:
    return inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke


def inside(ks: Tensor, ke: Tensor, s_kv: int) -> Tensor:
    """The rule of the bounds, with Python's integers."""
    rows = [[start <= t < end for t in range(s_kv)] for start, end in zip(ks.tolist(), ke.tolist(), strict=True)]
    return torch.tensor(rows).view(len(rows), s_kv)
