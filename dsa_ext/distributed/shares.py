"""Which rows of a sequence each rank holds."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

Order = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, eq=False)
class Shares:
    """Rows are numbered in the order of the sequence; places in the order of ranks, and of rows within a rank."""

    sizes: tuple[int, ...]  # rows by rank
    firsts: tuple[int, ...]  # how many of them are among the first rows that are divided apart
    row_of_place: Tensor  # [S]
    place_of_row: Tensor  # [S]
    padded_place_of_row: Tensor  # [S], if each rank had as many places as the largest share

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def rows(self, rank: int) -> Tensor:
        """The rows of a rank, ascending."""
        parts: tuple[Tensor, ...] = self.row_of_place.split(self.sizes)
        return parts[rank]


def shares_of(seq: int, ranks: int, order: Order, device: torch.device, first: int = 0) -> Shares:
    """Equal shares, up to one or two rows, of a sequence of `seq` rows; with `first`, up to as many more, since so many
    of the first rows are divided apart from the others.

    With "zigzag", rank r has parts r and 2 ranks - 1 - r of 2 ranks equal parts: where a query reads the keys before
    it, all ranks then have the same work.
    """
    # Fake tensors must not be kept, and FakeTensorMode does not take the real ones that are.
    return (_kept_shares_of if detect_fake_mode() is None else _shares_of)(seq, ranks, order, device, first)


@lru_cache(maxsize=64)
def _kept_shares_of(seq: int, ranks: int, order: Order, device: torch.device, first: int) -> Shares:
    with torch.inference_mode(False), _disable_current_modes():  # whatever the modes of the first call
        return _shares_of(seq, ranks, order, device, first)


def _shares_of(seq: int, ranks: int, order: Order, device: torch.device, first: int) -> Shares:
    row = torch.arange(seq, device="cpu")
    first_rows, others = (_divided(part, ranks, order) for part in (row[:first], row[first:]))
    rows = [torch.cat(pair) for pair in zip(first_rows, others, strict=True)]
    row_of_place = torch.cat(rows)
    place_of_row = torch.empty_like(row_of_place)
    place_of_row[row_of_place] = row
    sizes = tuple(len(part) for part in rows)
    padding = torch.cat([row.new_full((n,), r * max(sizes) - sum(sizes[:r])) for r, n in enumerate(sizes)])  # by place
    padded = place_of_row + padding[place_of_row]
    return Shares(sizes, tuple(map(len, first_rows)), *(t.to(device) for t in (row_of_place, place_of_row, padded)))


def _divided(rows: Tensor, ranks: int, order: Order) -> list[Tensor]:
    if order == "contiguous":
        return list(rows.tensor_split(ranks))
    parts = rows.tensor_split(2 * ranks)
    return [torch.cat([parts[rank], parts[-1 - rank]]) for rank in range(ranks)]
