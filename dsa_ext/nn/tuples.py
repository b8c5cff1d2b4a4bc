"""Named tuples of the modules: what SparseMLA returns, and where the tokens of a step of PagedKVCache stand."""

from typing import NamedTuple

from torch import Tensor


class SparseMLAOutput(NamedTuple):
    """What `SparseMLA` returns.

    Attributes:
        out: [B, S, hidden_size].
        indexer_loss: the mean over queries, a scalar; None in the dense phase, with `ids` or a cache, and when
            gradients are disabled. With indexer_loss="deferred" it is 0 until the backward has run.
        ids: of the selected keys, int32 [B, S, topk]; None unless the phase is "sparse".
    """

    out: Tensor
    indexer_loss: Tensor | None
    ids: Tensor | None


class DecodeStep(NamedTuple):
    """Where the tokens of B sequences stand, N of each: views of memory that the cache keeps, the same at every step of
    equal B and N.

    Attributes:
        positions: of the tokens in their sequences, int64 [B, N].
        blocks: pages of the tokens, int64 [B * N].
        offsets: rows of the tokens in these pages, int64 [B * N].
        slots: of the tokens in the cache, page * page_size + row, -1 in a row without a sequence: int32 [B, N].
        context_lens: number of tokens of each sequence, these included, int32 [B].
        block_table: pages of each sequence, -1 where there is none, int32 [B, pages].
    """

    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    slots: Tensor
    context_lens: Tensor
    block_table: Tensor


class PrefillStep(NamedTuple):
    """Where T tokens of packed sequences stand, and the T_kv keys of these sequences, one sequence after the other.

    Attributes:
        positions: of the tokens in their sequences, int64 [1, T].
        blocks: pages of the tokens, int64 [T].
        offsets: rows of the tokens in these pages, int64 [T].
        key_blocks: pages of the keys, which include those of the tokens, int64 [T_kv].
        key_offsets: rows of the keys in these pages, int64 [T_kv].
        first_keys: number of the key in the first row of each page, int32 [pages].
        filled: number of rows of each page that hold keys, the first ones; 0 for pages of others: int32 [pages].
        starts: the first key that a token sees, int32 [1, T].
        ends: one past the last key that a token sees, int32 [1, T].
    """

    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    key_blocks: Tensor
    key_offsets: Tensor
    first_keys: Tensor
    filled: Tensor
    starts: Tensor
    ends: Tensor
