"""Which pages hold which tokens: the part of PagedKVCache that runs on the host, before any kernel is launched."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from dsa_ext.ops._checks import describe


class CacheFullError(RuntimeError):
    """A PagedKVCache has too few free pages, or holds as many sequences as it can. No sequence was changed: free or
    evict something, then repeat the call."""


def check_ids(name: str, ids: Any, device: torch.device) -> Tensor:
    """`ids`, if they may be cache slots or numbers of keys."""
    if isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64) and ids.device == device:
        return ids
    where = f" on {ids.device}" if isinstance(ids, Tensor) else ""
    raise ValueError(f"PagedKVCache: {name} must be int32 or int64 on {device}, got {describe(ids)}{where}")


class PageTables:
    """Pages of sequences, their lengths, and the list of free pages.

    The number of a sequence is an int that is never given to another. `tables` [max_sequences + 1, pages], int32 on the
    CPU, has the pages of a sequence in the order of its tokens, and -1 where there is none; its last row stays empty.
    """

    def __init__(self, num_blocks: int, max_sequences: int, max_length: int, page_size: int) -> None:
        self.num_blocks, self.page_size, self.max_length = num_blocks, page_size, max_length
        self.tables = torch.full((max_sequences + 1, -(-max_length // page_size)), -1, dtype=torch.int32, device="cpu")
        self.lengths: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._added = 0
        self._free_rows = list(range(max_sequences))[::-1]
        self._free_blocks = list(range(num_blocks))[::-1]

    @property
    def empty_row(self) -> int:
        return len(self.tables) - 1

    @property
    def free_blocks(self) -> int:
        return len(self._free_blocks)

    def row(self, sequence: int) -> int:
        if type(sequence) is not int or sequence not in self._rows:
            _fail(f"there is no sequence {sequence!r}; those in the cache are {sorted(self._rows)}")
        return self._rows[sequence]

    def table(self, sequence: int) -> Tensor:
        """A view of the sequence's pages up to its last token."""
        return self.tables[self.row(sequence), : self._pages(self.lengths[sequence])]

    def add(self) -> int:
        if not self._free_rows:
            raise CacheFullError(f"PagedKVCache: it holds max_sequences={self.empty_row} sequences")
        sequence = self._added
        self._added += 1
        self._rows[sequence], self.lengths[sequence] = self._free_rows.pop(), 0
        return sequence

    def extend(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        """Reserves pages for so many further tokens of each sequence, and adds them to its length."""
        wanted = []
        for sequence, count in zip(sequences, tokens, strict=True):
            row, length = self.row(sequence), self.lengths[sequence]
            if length + count > self.max_length:
                _fail(f"sequence {sequence} has {length} tokens: {count} more exceed max_length={self.max_length}")
            wanted.append((row, range(self._pages(length), self._pages(length + count))))
        if len(set(sequences)) != len(sequences):
            _fail(f"sequences must be distinct, got {list(sequences)}")
        missing = sum(len(pages) for _, pages in wanted)
        if missing > len(self._free_blocks):
            free = f"{len(self._free_blocks)} of {self.num_blocks} are free"
            raise CacheFullError(f"PagedKVCache: {missing} more pages are required, {free}")
        for sequence, count, (row, pages) in zip(sequences, tokens, wanted, strict=True):
            blocks = [self._free_blocks.pop() for _ in pages]
            if blocks:
                self.tables[row, pages.start : pages.stop] = torch.tensor(blocks, dtype=torch.int32, device="cpu")
            self.lengths[sequence] += count

    def truncate(self, sequence: int, length: int) -> None:
        row = self.row(sequence)
        if type(length) is not int:
            _fail(f"length must be an int, got {length!r}")
        if not 0 <= length <= self.lengths[sequence]:
            _fail(f"sequence {sequence} has {self.lengths[sequence]} tokens, and cannot be truncated to {length}")
        if length % self.page_size != 0 and self.tables[row, length // self.page_size] < 0:
            _fail(f"sequence {sequence} cannot be truncated to {length} tokens: the page of the last one was evicted")
        self._release(self.tables[row, self._pages(length) :])
        self.lengths[sequence] = length

    def free(self, sequence: int) -> None:
        self._release(self.tables[self.row(sequence)])
        self._free_rows.append(self._rows.pop(sequence))
        del self.lengths[sequence]

    def evict(self, sequence: int, pages: Iterable[int]) -> None:
        """Frees pages of a sequence: page i holds its tokens from i * page_size on. Pages that were evicted stay so."""
        row, full = self.row(sequence), self.lengths[sequence] // self.page_size
        if not isinstance(pages, Iterable):
            _fail(f"pages must be a list of int, got {pages!r}")
        pages = list(pages)
        if pages and not full:
            _fail(f"sequence {sequence} has no full pages, and only full ones can be evicted, got {pages}")
        if not all(type(page) is int and 0 <= page < full for page in pages):
            _fail(f"pages must be from 0 to {full - 1}, the full pages of sequence {sequence}, got {pages}")
        for page in pages:
            self._release(self.tables[row, page : page + 1])

    def indices(self) -> Tensor:
        """For each page its index in its sequence [num_blocks], int32; -1 for free pages."""
        rows, columns = (self.tables >= 0).nonzero(as_tuple=True)
        index = torch.full((self.num_blocks,), -1, dtype=torch.int32, device="cpu")
        index[self.tables[rows, columns].long()] = columns.int()
        return index

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)

    def _release(self, entries: Tensor) -> None:
        self._free_blocks += entries[entries >= 0].tolist()[::-1]
        entries.fill_(-1)


def _fail(message: str) -> NoReturn:
    raise ValueError(f"PagedKVCache: {message}")
