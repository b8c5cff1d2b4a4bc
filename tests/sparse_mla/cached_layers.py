"""SparseMLA with a PagedKVCache: sequences that are fed to a layer in steps, and what their tokens get."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext.nn import PagedKVCache, SparseMLA, SparseMLAOutput

#: Every byte of a page, so that numbers in it are NaN and ids invalid.
POISON = 0xFF


def poisoned(cache: PagedKVCache) -> PagedKVCache:
    """The cache, with NaN in all its pages."""
    for layer in range(cache.layers):
        for pages in (cache.kv(layer), cache.index_keys(layer)):
            pages.view(torch.uint8).fill_(POISON)
    return cache


class Feeder:
    """Feeds sequences [S_i, hidden_size] to a layer. `out` and `ids` have, for each sequence, the results of its tokens
    and the positions of the keys that they selected."""

    def __init__(self, layer: SparseMLA, inputs: list[Tensor], cache: PagedKVCache) -> None:
        self.layer, self.inputs, self.cache = layer, inputs, cache
        self.sequences = [cache.add() for _ in inputs]
        self.fed = [0] * len(inputs)
        self._outs: list[list[Tensor]] = [[] for _ in inputs]
        self._ids: list[list[Tensor]] = [[] for _ in inputs]

    def prefill(self, counts: dict[int, int]) -> SparseMLAOutput:
        """The next tokens of some sequences, by their index."""
        self.cache.prefill([self.sequences[i] for i in counts], list(counts.values()))
        parts = [self._next(i, count) for i, count in counts.items()]
        result = self._call(torch.cat(parts)[None])
        positions = self.cache.positions_of(result.ids)
        for i, out, ids in zip(
            counts, result.out[0].split(list(counts.values())), positions[0].split(list(counts.values())), strict=True
        ):
            self._keep(i, out, ids)
        return result

    def decode(self, order: list[int | None], tokens: int = 1) -> SparseMLAOutput:
        """The next tokens of each sequence; NaN in a row without one."""
        self.cache.decode([None if i is None else self.sequences[i] for i in order], tokens)
        nothing = torch.full_like(self.inputs[0][:1], torch.nan).expand(tokens, -1)
        x = torch.stack([nothing if i is None else self._next(i, tokens) for i in order])
        result = self._call(x)
        positions = self.cache.positions_of(result.ids)
        for row, i in enumerate(order):
            if i is None:
                assert (result.ids[row] == -1).all()
            else:
                self._keep(i, result.out[row], positions[row])
        return result

    def truncate(self, i: int, length: int) -> None:
        self.cache.truncate(self.sequences[i], length)
        self.fed[i] = length
        self._outs[i], self._ids[i] = [self.out(i)[:length]], [self.ids(i)[:length]]

    def out(self, i: int) -> Tensor:
        return torch.cat(self._outs[i])

    def ids(self, i: int) -> Tensor:
        return torch.cat(self._ids[i])

    def finish(self, tokens: int = 1) -> None:
        """Decodes all sequences to their ends, those that have come there as rows without a sequence."""
        while any(fed < len(x) for fed, x in zip(self.fed, self.inputs, strict=True)):
            left = [len(x) - fed for fed, x in zip(self.fed, self.inputs, strict=True)]
            self.decode([i if n else None for i, n in enumerate(left)], min(tokens, *(n for n in left if n)))

    def _next(self, i: int, count: int) -> Tensor:
        self.fed[i] += count
        assert self.fed[i] <= len(self.inputs[i])
        return self.inputs[i][self.fed[i] - count : self.fed[i]]

    def _call(self, x: Tensor) -> SparseMLAOutput:
        with torch.no_grad():
            result: Any = self.layer(x, cache=self.cache)
        return result

    def _keep(self, i: int, out: Tensor, ids: Tensor) -> None:
        self._outs[i].append(out)
        self._ids[i].append(ids)
