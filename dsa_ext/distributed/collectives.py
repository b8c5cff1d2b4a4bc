"""Collectives that autograd differentiates. Tensors have the batch first and the rows of a sequence second.

A group may be None, which means one rank: then nothing is communicated.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsa_ext.distributed.shares import Shares

# PyTorch 2.13 renamed them.
_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Group = Any  # a ProcessGroup, or None for one rank


def size_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, in the dtype of x, from which all of them compute the same: its gradient is that of each."""
    return x if group is None else _Sum.apply(x, group)  # type: ignore[no-untyped-call]


def shared(x: Tensor, group: Group) -> Tensor:
    """A tensor that is equal on all ranks, from which each computes something else: its gradient is the sum, in fp32 at
    least, of theirs."""
    return x if group is None else _Share.apply(x, group)  # type: ignore[no-untyped-call]


def all_rows(x: Tensor, shares: Shares, group: Group) -> Tensor:
    """The rows of all ranks [B, S, ...] in the order of the sequence, from those of this rank."""
    return x if group is None else _AllRows.apply(x, shares, group)  # type: ignore[no-untyped-call]


def rows_for_heads(x: Tensor, shares: Shares, group: Group) -> Tensor:
    """A share of rows with all heads [B, S_r, H, D], from all rows with a share of heads [B, S, H / ranks, D]."""
    return x if group is None else _Exchange.apply(x, shares, group, True)  # type: ignore[no-untyped-call]


def heads_for_rows(x: Tensor, shares: Shares, group: Group) -> Tensor:
    """All rows with a share of heads [B, S, H / ranks, D], from a share of rows with all heads [B, S_r, H, D]."""
    return x if group is None else _Exchange.apply(x, shares, group, False)  # type: ignore[no-untyped-call]


def all_heads(weight: Tensor, group: Group) -> Tensor:
    """The rows of a weight of all ranks, in the order of ranks; each rank has as many."""
    return weight if group is None else _AllHeads.apply(weight, group)  # type: ignore[no-untyped-call]


def _reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, in fp32 at least."""
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """This rank's part of dimension 0 of the sum over ranks, in fp32 at least."""
    total = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    part = total.new_empty(total.shape[0] // size_of(group), *total.shape[1:])
    _scatter_single(part, total, group=group)
    return part.to(x.dtype)


def _all_gather(x: Tensor, group: Group) -> Tensor:
    """The tensors of all ranks along dimension 0."""
    out = x.new_empty(x.shape[0] * size_of(group), *x.shape[1:])
    _gather_single(out, x.contiguous(), group=group)
    return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _reduce(dout, ctx.group), None


class _AllHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_gather(weight, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(dout, ctx.group), None


class _AllRows(torch.autograd.Function):
    """Shares are padded to the largest for the collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares, group: Group) -> Tensor:
        ctx.shares, ctx.group = shares, group
        rows = x.new_zeros(shares.largest, *x.shape[:1], *x.shape[2:])
        rows[: x.shape[1]] = x.transpose(0, 1)
        return _all_gather(rows, group).index_select(0, shares.padded_place_of_row).transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        shares, ranks = ctx.shares, size_of(ctx.group)
        rows = dout.new_zeros(shares.largest * ranks, *dout.shape[:1], *dout.shape[2:])
        rows.index_copy_(0, shares.padded_place_of_row, dout.transpose(0, 1))
        own = _reduce_scatter(rows, ctx.group)[: shares.sizes[rank_in(ctx.group)]]
        return own.transpose(0, 1), None, None


class _Exchange(torch.autograd.Function):
    """Its gradient is the exchange in the other direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares, group: Group, to_rows: bool) -> Tensor:
        ctx.arguments = shares, group, not to_rows
        return _exchange(x, shares, group, to_rows)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(dout, *ctx.arguments), None, None, None


def _exchange(x: Tensor, shares: Shares, group: Group, to_rows: bool) -> Tensor:
    ranks, own = size_of(group), shares.sizes[rank_in(group)]
    received: Tensor
    if to_rows:
        sent = x.transpose(0, 1).index_select(0, shares.row_of_place)  # [S, B, H / ranks, D], by rank
        received = sent.new_empty(ranks * own, *sent.shape[1:])
        dist.all_to_all_single(received, sent, [own] * ranks, list(shares.sizes), group=group)
        by_rank: Tensor = received.unflatten(0, (ranks, own))  # [ranks, S_r, B, H / ranks, D]
        return by_rank.permute(2, 1, 0, 3, 4).flatten(2, 3)
    heads: Tensor = x.unflatten(2, (ranks, -1))  # [B, S_r, ranks, H / ranks, D]
    sent = heads.permute(2, 1, 0, 3, 4).flatten(0, 1).contiguous()
    received = sent.new_empty(sum(shares.sizes), *sent.shape[1:])
    dist.all_to_all_single(received, sent, list(shares.sizes), [own] * ranks, group=group)
    return received.index_select(0, shares.place_of_row).transpose(0, 1)
