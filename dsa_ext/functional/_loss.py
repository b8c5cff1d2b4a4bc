"""Rows of the indexer's loss, and their sum or mean."""

from typing import Literal

import torch
from torch import Tensor

from dsa_ext.ops._checks import describe, fail


def loss_rows(
    scores: Tensor, p: Tensor, valid: Tensor | None, row_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The arguments with flattened rows. The operator could not detect a mismatch of their leading dimensions."""
    if scores.dim() == 0:
        fail("indexer_loss", f"scores must be [.., K], got {describe(scores)}")
    shape = scores.shape
    for name, tensor, expected in (("p", p, shape), ("valid", valid, shape), ("row_weights", row_weights, shape[:-1])):
        if tensor is not None and tensor.shape != expected:
            fail("indexer_loss", f"{name} must have the shape {list(expected)}, of scores, got {list(tensor.shape)}")
    return (
        _rows(scores),
        _rows(p),
        None if valid is None else _rows(valid),
        None if row_weights is None else row_weights.reshape(-1),
    )


def reduced_loss(losses: Tensor, row_weights: Tensor | None, reduction: Literal["mean", "sum"]) -> Tensor:
    """The sum of the rows' losses, or their mean."""
    return losses.sum() if reduction == "sum" else mean_of_rows(losses.sum(), losses.shape[0], row_weights)


def mean_of_rows(total: Tensor, rows: int, row_weights: Tensor | None) -> Tensor:
    """The mean of losses that have this sum."""
    if row_weights is None:
        return total / max(1, rows)
    weight = row_weights.sum()
    return total / torch.where(weight == 0, 1, weight)


def _rows(x: Tensor) -> Tensor:
    """Flattens [..., K] to [R, K]."""
    return x[None] if x.dim() == 1 else x.flatten(0, -2)
