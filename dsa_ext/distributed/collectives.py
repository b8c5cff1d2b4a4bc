"""Collectives that autograd differentiates. Tensors have the batch first and the rows of a sequence second.
There are no second derivatives: autograd raises an error where one would pass through a collective.

Gradients that are summed over ranks are exchanged in their own dtype and added up in fp32 at least: a reduce-scatter in
bf16 would round after each addition, one in fp32 would send twice the bytes. `summed` adds up in the dtype of x.

A group may be None, which means one rank: then nothing is communicated.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from dsa_ext.distributed.shares import Shares

# PyTorch 2.13 renamed it.
_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

Group = Any  # a ProcessGroup, or None for one rank


def size_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, in the dtype of x, from which all of them compute the same: its gradient is that of each."""
    return x if group is None else _Sum.apply(x, group)  # type: ignore[no-untyped-call]


def shared(tensors: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """Tensors that are equal on all ranks, from which each computes something else: their gradients are the sums of
    those of all ranks, exchanged together when the last one is there."""
    return tuple(tensors) if group is None else _Share.apply(group, *tensors)  # type: ignore[no-untyped-call]


def all_rows(x: Tensor, shares: Shares, group: Group) -> "Pending":
    """Starts to gather the rows of all ranks [B, S, ...], in the order of the sequence, from those of this rank."""
    pending = Pending(x, None if group is None else _Gather(shares, group))
    pending.start()
    return pending


def own_rows(x: Tensor, shares: Shares, group: Group) -> Tensor:
    """This rank's rows [B, S_r, ...] of a tensor that is equal on all ranks. Its gradient has the rows of all of
    them."""
    return x if group is None else _Rows.apply(x, shares, group, False)  # type: ignore[no-untyped-call]


def rows_of_all(x: Tensor, shares: Shares, group: Group) -> Tensor:
    """The rows of all ranks [B, S, ...], from which all of them compute the same: its gradient is that of each."""
    return x if group is None else _Rows.apply(x, shares, group, True)  # type: ignore[no-untyped-call]


def whole_weight(part: Tensor, dim: int, group: Group) -> "Pending":
    """A weight, gathered from its parts along a dimension, one of each rank, all of the same size. To be started."""
    return Pending(part, None if group is None else _GatherWeight(dim, group))


def _reduce(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks. Each rank adds up a part."""
    padded = pad(x.flatten(), (0, -x.numel() % size_of(group)))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded, group=group)
    return _all_gather(_total(parts, group), group)[: x.numel()].view(x.shape)


def _total(parts: Tensor, group: Group) -> Tensor:
    """The sum of the parts that each rank has sent, one after the other along dimension 0."""
    ranks, wide = size_of(group), torch.promote_types(parts.dtype, torch.float32)
    return parts.view(ranks, len(parts) // ranks, *parts.shape[1:]).sum(0, dtype=wide).to(parts.dtype)


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
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        totals = list(gradients)
        present = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        for dtype in dict.fromkeys(gradient.dtype for gradient in present.values()):  # in the same order on all ranks
            some = {i: gradient for i, gradient in present.items() if gradient.dtype == dtype}
            total = _reduce(torch.cat([gradient.flatten() for gradient in some.values()]), ctx.group)
            parts = total.split([gradient.numel() for gradient in some.values()])
            for (i, gradient), part in zip(some.items(), parts, strict=True):
                totals[i] = part.view(gradient.shape)
        return None, *totals


class _Rows(torch.autograd.Function):
    """This rank's rows of all, or the rows of all from those of each rank; in the backward pass the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Shares, group: Group, to_all: bool) -> Tensor:
        ctx.shares, ctx.group, ctx.to_all = shares, group, to_all
        return (_gathered if to_all else _own)(x, shares, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return (_own if ctx.to_all else _gathered)(dout, ctx.shares, ctx.group), None, None, None


def _own(x: Tensor, shares: Shares, group: Group) -> Tensor:
    return x.index_select(1, shares.rows(rank_in(group)))


def _gathered(x: Tensor, shares: Shares, group: Group) -> Tensor:
    gather = _Gather(shares, group)
    gather.start(x)
    return gather.finish()


class _Transfer:
    """A collective that runs beside other work between `start` and `finish`."""

    _sent: Tensor  # kept until the collective is complete
    _received: Tensor
    _work: Any
    gradient: "_Transfer"  # that of the backward pass

    def start(self, x: Tensor) -> None:
        raise NotImplementedError

    def finish(self) -> Tensor:
        """The result. Waits for it; on a GPU, the current stream does."""
        self._work.wait()
        received = self._received
        del self._sent, self._received, self._work
        return self._unpack(received)

    def _unpack(self, received: Tensor) -> Tensor:
        raise NotImplementedError

    def transposed(self) -> "_Transfer":
        """The one that takes the gradient of the result to that of the input."""
        raise NotImplementedError


class _Gather(_Transfer):
    """The rows of all ranks from those of each. Shares are padded to the largest for the collective."""

    def __init__(self, shares: Shares, group: Group) -> None:
        self._shares, self._group = shares, group

    def start(self, x: Tensor) -> None:
        self._sent = x.new_zeros(self._shares.largest, *x.shape[:1], *x.shape[2:])
        self._sent[: x.shape[1]] = x.transpose(0, 1)
        self._received = x.new_empty(self._shares.largest * size_of(self._group), *self._sent.shape[1:])
        self._work = _gather_single(self._received, self._sent, group=self._group, async_op=True)

    def _unpack(self, received: Tensor) -> Tensor:
        out = received.new_empty(received.shape[1], len(self._shares.row_of_place), *received.shape[2:])
        torch.index_select(received, 0, self._shares.padded_place_of_row, out=out.transpose(0, 1))
        return out

    def transposed(self) -> "_Transfer":
        return _ReduceScatter(self._shares, self._group)


class _ReduceScatter(_Transfer):
    """The sum over ranks of this rank's rows, from all rows of each rank."""

    def __init__(self, shares: Shares, group: Group) -> None:
        self._shares, self._group = shares, group

    def start(self, x: Tensor) -> None:
        self._sent = x.new_zeros(self._shares.largest * size_of(self._group), *x.shape[:1], *x.shape[2:])
        self._sent.index_copy_(0, self._shares.padded_place_of_row, x.transpose(0, 1))
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=self._group, async_op=True)

    def _unpack(self, received: Tensor) -> Tensor:
        return _total(received, self._group)[: self._shares.sizes[rank_in(self._group)]].transpose(0, 1)


class _GatherWeight(_Transfer):
    def __init__(self, dim: int, group: Group) -> None:
        self._dim, self._group = dim, group

    def start(self, x: Tensor) -> None:
        self._sent = x.movedim(self._dim, 0).contiguous()
        self._received = x.new_empty(len(self._sent) * size_of(self._group), *self._sent.shape[1:])
        self._work = _gather_single(self._received, self._sent, group=self._group, async_op=True)

    def _unpack(self, received: Tensor) -> Tensor:
        return received.movedim(0, self._dim)

    def transposed(self) -> "_Transfer":
        return _ScatterWeight(self._dim, self._group)


class _ScatterWeight(_Transfer):
    """This rank's part of the sum over ranks."""

    def __init__(self, dim: int, group: Group) -> None:
        self._dim, self._group = dim, group

    def start(self, x: Tensor) -> None:
        self._sent = x.movedim(self._dim, 0).contiguous()
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=self._group, async_op=True)

    def _unpack(self, received: Tensor) -> Tensor:
        return _total(received, self._group).movedim(0, self._dim)


class Pending:
    """The result of a collective. What does not need it belongs between its start and `result`."""

    def __init__(self, value: Tensor, transfer: _Transfer | None) -> None:
        self._value, self._transfer = value, transfer
        self._token = value if transfer is None else _Start.apply(value, transfer)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Starts it. To be called once."""
        if self._transfer is not None:
            self._transfer.start(self._value.detach())

    def result(self) -> Tensor:
        """Waits for it; on a GPU, the current stream does. To be called once."""
        if self._transfer is None:
            return self._value
        result: Tensor = _Finish.apply(self._token, self._transfer)  # type: ignore[no-untyped-call]
        return result


class _Start(torch.autograd.Function):
    """Stands for the start of a transfer. The result is an empty tensor that stands for what is under way: in the
    backward pass, too, autograd must not touch what has not arrived. There the transfer of the gradient is waited for,
    so what is created earlier is computed later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.gradient.finish(), None


class _Finish(torch.autograd.Function):
    """Finishes it. In the backward pass it starts the transfer of the gradient: what autograd computes between needs no
    result of it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.gradient = ctx.transfer.transposed()
        ctx.transfer.gradient.start(dout)
        return dout.new_empty(0), None
