"""A paged cache of latent keys and of the indexer's keys, for decoding."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from dsa_ext import functional
from dsa_ext.nn.page_tables import PageTables, check_ids
from dsa_ext.nn.rotary import CachedRows
from dsa_ext.nn.tuples import DecodeStep as DecodeStep
from dsa_ext.nn.tuples import PrefillStep as PrefillStep
from dsa_ext.ops._checks import check_sizes, describe, dtype_name
from dsa_ext.ops.indexer import DIMS
from dsa_ext.ops.sparse_mla import WIDTHS
from dsa_ext.reference.decode import packed_bytes, unpack_kv_fp8

FP8 = torch.float8_e4m3fn
#: Most tokens of each sequence in one step of decoding.
MAX_TOKENS = 6
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_OTHER_DTYPE = " (autocast changes the dtype of keys: make_cache and the layer must be called under the same autocast)"


class PagedKVCache:
    """Latent keys and keys of the indexer of several layers and sequences, in pages.

    All memory is allocated in the constructor. Sequences have any lengths; pages are reserved as they grow. Each step
    begins with :meth:`prefill` or :meth:`decode`, which reserve room for the next tokens of some sequences. Then every
    layer is called with these tokens, writes its keys and attends to all that its sequences have::

        cache = PagedKVCache(layers=2, num_blocks=1024, max_sequences=8, max_length=32768)
        sequence = cache.add()
        cache.prefill([sequence], [len(prompt)])
        for i, layer in enumerate(layers):
            x = x + layer(x, cache=cache, layer=i).out  # x [1, len(prompt), hidden_size]
        cache.decode([sequence])
        ...  # the same with x [1, 1, hidden_size]

    `prefill` and `decode` run on the host, and upload what changes without waiting for the GPU. What layers do in a
    step of decoding reads device tensors alone, at the same addresses in every step: a CUDA graph of it, captured after
    `decode` with B sequences and N tokens, serves any sequences, lengths and pages that a later `decode` with B and N
    names.

    Args:
        layers: number of layers.
        num_blocks: number of pages (blocks); the pages of a sequence are the same ones in all layers. One more is
            allocated, to which rows without a sequence are written.
        max_sequences: how many sequences are held at once, and most rows of a step of decoding, those of None included.
        max_length: most tokens of a sequence.
        page_size: tokens of a page, a multiple of 4 if the indexer's keys are in fp8.
        columns: of a latent key, 576 or 512: those with RoPE are the last 64 of 576.
        index_columns: of a key of the indexer, 64 or 128.
        dtype: of latent keys: bf16, on the CPU also fp32 and float64, which is then the dtype of the layers; or
            float8_e4m3fn, the layout of :func:`dsa_ext.pack_kv_fp8` with 656 or 528 bytes per token, for layers in
            bf16.
        index_dtype: of the indexer's keys: float8_e4m3fn with one scale per key, or that of the layers.
        batch_invariant: layers pass it to :func:`dsa_ext.sparse_mla_decode`: on a GPU a token's attention then has
            bits that do not depend on the other sequences of the step. Small batches take longer.
        device: where the pages are, that of the layers; PyTorch's default device if None.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        max_sequences: int,
        max_length: int,
        *,
        page_size: int = 64,
        columns: int = WIDTHS[0],
        index_columns: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        index_dtype: torch.dtype = FP8,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        check_sizes("PagedKVCache", layers=layers, num_blocks=num_blocks, max_sequences=max_sequences)
        check_sizes("PagedKVCache", max_length=max_length, page_size=page_size)
        check_sizes("PagedKVCache", columns=columns, index_columns=index_columns)
        if (num_blocks + 1) * page_size >= 2**31:
            _fail(f"num_blocks and page_size must have a product below 2^31, got {num_blocks} and {page_size}")
        for name, number, legal in (("columns", columns, WIDTHS), ("index_columns", index_columns, DIMS)):
            if number not in legal:
                _fail(f"{name} must be one of {legal}, got {number!r}")
        if dtype not in (*_DTYPES, FP8):
            _fail(f"dtype must be bfloat16, float32, float64 or float8_e4m3fn, got {dtype!r}")
        of_layers = torch.bfloat16 if dtype == FP8 else dtype
        if index_dtype not in (of_layers, FP8):
            _fail(f"index_dtype must be float8_e4m3fn or {dtype_name(of_layers)} like the layers, got {index_dtype!r}")
        if index_dtype == FP8 and page_size % 4 != 0:
            _fail(f"page_size must be a multiple of 4 with keys of the indexer in float8_e4m3fn, got {page_size}")
        self.layers, self.num_blocks, self.page_size, self.max_length = layers, num_blocks, page_size, max_length
        self.columns, self.index_columns, self.dtype, self.index_dtype = columns, index_columns, dtype, index_dtype
        self.max_sequences, self.batch_invariant = max_sequences, batch_invariant
        with torch.inference_mode(False):  # memory that may also be written outside of inference mode
            self._allocate(device)
        self._step: DecodeStep | PrefillStep | None = None
        self._rope_tables: dict[Any, tuple[Tensor, Tensor]] = {}

    def _allocate(self, device: torch.device | str | None) -> None:
        columns, page_size = self.columns, self.page_size
        self._tables = PageTables(self.num_blocks, self.max_sequences, self.max_length, page_size)
        pages = self.num_blocks + 1  # the last takes what rows without a sequence write

        def memory(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
            return [torch.empty(pages, *shape, device=device, dtype=dtype) for _ in range(self.layers)]

        self._kv = (
            memory((page_size, 1, packed_bytes(columns)), torch.uint8)
            if self.dtype == FP8
            else memory((page_size, 1, columns), self.dtype)
        )
        self._index = (
            memory((page_size, self.index_columns + 4), torch.uint8)
            if self.index_dtype == FP8
            else memory((page_size, self.index_columns), self.index_dtype)
        )
        self.device = self._kv[0].device
        # What a step of decoding reads: three int64 per token, and an int32 per sequence and per token. They share no
        # memory, since torch.save refuses views of the same memory in two dtypes.
        self._words = torch.zeros(3 * MAX_TOKENS * self.max_sequences, device=self.device, dtype=torch.int64)
        self._numbers = torch.zeros((1 + MAX_TOKENS) * self.max_sequences, device=self.device, dtype=torch.int32)
        self._block_table = self._tables.tables[:-1].to(self.device, copy=True)
        self._uploaded = self._tables.tables[:-1].clone()  # what _block_table has

    @property
    def step(self) -> DecodeStep | PrefillStep:
        """Where the tokens of the current step stand: those of the last call of `prefill` or `decode`."""
        if self._step is None:
            _fail("no step was begun: call prefill or decode, and again after sequences were changed or a call failed")
        return self._step

    @property
    def free_blocks(self) -> int:
        """Number of pages that no sequence has."""
        return self._tables.free_blocks

    @property
    def sequences(self) -> list[int]:
        """The numbers of the sequences, in the order in which they were added."""
        return list(self._tables.lengths)

    def length(self, sequence: int) -> int:
        """Number of tokens, with those of the current step, and with those that were evicted."""
        self._tables.row(sequence)
        return self._tables.lengths[sequence]

    def blocks(self, sequence: int) -> list[int]:
        """The pages of a sequence, -1 where one was evicted."""
        pages: list[int] = self._tables.table(sequence).tolist()
        return pages

    def add(self) -> int:
        """Adds a sequence without tokens, and returns its number.

        Raises:
            CacheFullError: the cache holds max_sequences already.
        """
        return self._tables.add()

    def free(self, sequence: int) -> None:
        """Removes a sequence."""
        self._tables.free(sequence)
        self._step = None

    def truncate(self, sequence: int, length: int) -> None:
        """Keeps the first `length` tokens: the others were rejected, for example by speculative decoding.

        Args:
            sequence: number of the sequence.
            length: number of tokens to keep. They must not end inside a page that was evicted.
        """
        self._tables.truncate(sequence, length)
        self._step = None

    def evict(self, sequence: int, pages: Iterable[int]) -> None:
        """Frees some pages of a sequence. Their tokens are not attended to any more; the positions of all other tokens
        remain.

        Args:
            sequence: number of the sequence.
            pages: indices into :meth:`blocks`. Page i holds the tokens from i * page_size on; only full ones.
        """
        self._tables.evict(sequence, pages)
        self._step = None

    def prefill(self, sequences: Sequence[int], tokens: Sequence[int]) -> None:
        """Begins a step with the next `tokens[i]` tokens of `sequences[i]`, packed: layers take x [1, T, hidden_size].

        A long prompt may come in several chunks, a step for each.

        Raises:
            CacheFullError: there are too few free pages. No sequence was changed, and no step was begun.
            ValueError: an argument is wrong. No sequence was changed, and no step was begun.
        """
        self._step = None
        sequences, tokens = _as_list("sequences", sequences), _as_list("tokens", tokens)
        if not sequences or len(tokens) != len(sequences) or not all(type(n) is int and n > 0 for n in tokens):
            _fail(f"tokens must be one positive int for each sequence, got {tokens} for {sequences}")
        self._check_not_captured()
        self._tables.extend(sequences, tokens)
        page = self.page_size
        first_keys, filled = of_pages = torch.zeros(2, self.num_blocks + 1, dtype=torch.int32, device="cpu")
        places: list[tuple[Tensor, ...]] = []
        first = 0  # key of the sequence
        for sequence, count in zip(sequences, tokens, strict=True):
            table, length = self._tables.table(sequence).long(), self._tables.lengths[sequence]
            positions = torch.arange(length - count, length, device="cpu")
            kept = table[table >= 0]
            keys = len(kept) * page - -length % page  # only the last page may be partly filled
            first_keys[kept] = torch.arange(first, first + len(kept) * page, page, dtype=torch.int32, device="cpu")
            filled[kept] = page
            filled[kept[-1]] -= -length % page
            rows = torch.arange(keys, device="cpu")
            ends = torch.arange(first + keys - count + 1, first + keys + 1, dtype=torch.int32, device="cpu")
            of_keys = kept[rows // page], rows % page
            places.append((positions, table[positions // page], *of_keys, ends.new_full((count,), first), ends))
            first += keys
        positions, blocks, key_blocks, key_offsets, starts, ends = (
            self._uploaded_copy(torch.cat(parts)) for parts in zip(*places, strict=True)
        )
        first_keys, filled = self._uploaded_copy(of_pages)
        self._step = PrefillStep(
            positions[None], blocks, positions % page, key_blocks, key_offsets,
            first_keys, filled, starts[None], ends[None],
        )  # fmt: skip

    def decode(self, sequences: Sequence[int | None], tokens: int = 1) -> None:
        """Begins a step with the next `tokens` tokens of each sequence, at most 6: layers take x [B, N, hidden_size].

        None stands for a row without a sequence, for example to fill the batch of a CUDA graph: what x has there is
        ignored.

        Raises:
            CacheFullError: there are too few free pages. No sequence was changed, and no step was begun.
            ValueError: an argument is wrong. No sequence was changed, and no step was begun.
        """
        self._step = None
        sequences = _as_list("sequences", sequences)
        if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS:
            _fail(f"decode takes 1 to {MAX_TOKENS} tokens of each sequence, got {tokens!r}; prefill takes more")
        if not 1 <= len(sequences) <= self.max_sequences:
            _fail(f"decode takes 1 to max_sequences={self.max_sequences} sequences, got {len(sequences)}")
        self._check_not_captured()
        named = [sequence for sequence in sequences if sequence is not None]
        self._tables.extend(named, [tokens] * len(named))
        batch, page = len(sequences), self.page_size
        tables = self._tables
        rows = [tables.empty_row if s is None else tables.row(s) for s in sequences]
        lengths = torch.tensor([0 if s is None else tables.lengths[s] for s in sequences], device="cpu")
        table = tables.tables[torch.tensor(rows, device="cpu")]
        positions = (lengths[:, None] + torch.arange(-tokens, 0, device="cpu")).clamp(min=0)
        blocks = table.gather(1, positions // page).long()
        slots = torch.where(blocks < 0, -1, blocks * page + positions % page)
        blocks = torch.where(blocks < 0, self.num_blocks, blocks)
        self._upload(self._words, torch.stack([positions, blocks, positions % page]).flatten())
        self._upload(self._numbers, torch.cat([lengths, slots.flatten()]).int())
        if not torch.equal(table, self._uploaded[:batch]):
            self._uploaded[:batch] = table
            self._upload(self._block_table, table)
        positions, blocks, offsets = self._words[: 3 * batch * tokens].view(3, -1)
        context_lens, slots = self._numbers[: batch * (1 + tokens)].tensor_split([batch])
        self._step = DecodeStep(
            positions.view(batch, tokens), blocks, offsets, slots.view(batch, tokens),
            context_lens, self._block_table[:batch],
        )  # fmt: skip

    def rows(self) -> CachedRows:
        """The positions of the step's tokens, for apply_rope."""
        return CachedRows(self.step.positions, self.max_length, self._rope_tables)

    def kv(self, layer: int) -> Tensor:
        """Pages of latent keys, as sparse_mla_decode takes them: [pages, page_size, 1, columns or bytes]."""
        return self._kv[self._layer(layer)][:-1]

    def index_keys(self, layer: int) -> Tensor:
        """Pages of the indexer's keys, as indexer_topk_paged takes them: [pages, page_size, index_columns], or uint8
        [pages, page_size, index_columns + 4] if they are in fp8."""
        return self._index[self._layer(layer)][:-1]

    def write(self, layer: int, kv: Tensor) -> None:
        """Writes the latent keys of the step's tokens, [..., columns] in their order, in the dtype of the cache; bf16
        for one in fp8, which packs them."""
        rows = self._rows("kv", kv, self.columns, torch.bfloat16 if self.dtype == FP8 else self.dtype)
        if self.dtype == FP8:
            rows = functional.pack_kv_fp8(rows)
        _write(self._kv[self._layer(layer)][:, :, 0], self.step, rows)

    def write_index(self, layer: int, k: Tensor, k_scale: Tensor | None = None) -> None:
        """Writes the indexer's keys of the step's tokens, [..., index_columns] in their order; in fp8 with the scale
        of each [...], fp32."""
        rows = self._rows("k", k, self.index_columns, self.index_dtype)
        if (k_scale is None) == (self.index_dtype == FP8):
            if k_scale is not None:
                _fail(f"k_scale must be None: only keys in fp8 have scales, got {describe(k_scale)}")
            _fail("k_scale must be a Tensor: keys in float8_e4m3fn have scales, got None")
        factors = None if k_scale is None else self._rows("k_scale", k_scale, None, torch.float32)
        keys, scales = self._index_views(layer)
        _write(keys, self.step, rows)
        if factors is not None:
            assert scales is not None
            _write(scales, self.step, factors)

    def gather(self, layer: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The latent keys of a step of prefill [T_kv, columns]: those of its sequences, one sequence after the other,
        each in the order of its tokens and without evicted ones. Those of a cache in fp8 are unpacked to `dtype` (bf16,
        fp32 or float64), all others are returned as they are."""
        if dtype not in _DTYPES:
            _fail(f"dtype must be bfloat16, float32 or float64, got {dtype_name(dtype)}")
        rows = _gather(self._kv[self._layer(layer)][:, :, 0], self._prefill_step())
        if self.dtype != FP8:
            return rows
        return unpack_kv_fp8(rows).to(dtype)

    def gather_index(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """The indexer's keys of a step of prefill [T_kv, index_columns], in the order of :meth:`gather`, and the scales
        of keys in fp8, fp32 [T_kv], or None."""
        keys, scales = self._index_views(layer)
        rows = _gather(keys, self._prefill_step()).view(self.index_dtype)
        return rows, None if scales is None else _gather(scales, self._prefill_step())[:, 0]

    def ids_of_keys(self, keys: Tensor) -> Tensor:
        """Cache slots, page * page_size + row, of keys that are numbered as in :meth:`gather`; -1 stays -1. int32."""
        step, keys = self._prefill_step(), check_ids("keys", keys, self.device)
        valid = (keys >= 0) & (keys < step.key_blocks.shape[0])
        key = torch.where(valid, keys, 0)
        return torch.where(valid, (step.key_blocks[key] * self.page_size + step.key_offsets[key]), -1).int()

    def keys_of_ids(self, ids: Tensor) -> Tensor:
        """The inverse of :meth:`ids_of_keys`; negative for other slots. int32."""
        block = check_ids("ids", ids, self.device) // self.page_size
        page = torch.where((ids >= 0) & (block < self.num_blocks), block, self.num_blocks)
        step, row = self._prefill_step(), ids % self.page_size
        return torch.where(row < step.filled[page], step.first_keys[page] + row, -1).int()

    def positions_of(self, ids: Tensor) -> Tensor:
        """Positions, in their own sequences, of the tokens in these cache slots, such as the ids that a layer selected:
        int32, -1 for slots of pages that no sequence has. What a sequence's last page has beyond its tokens counts as
        the positions that come next."""
        block = check_ids("ids", ids, self.device) // self.page_size
        index = self._uploaded_copy(self._tables.indices())
        valid = (ids >= 0) & (block < self.num_blocks)
        page = torch.where(valid, index[torch.where(valid, block, 0)], -1)
        return torch.where(page >= 0, page * self.page_size + ids % self.page_size, -1).int()

    def _prefill_step(self) -> PrefillStep:
        if not isinstance(self.step, PrefillStep):
            names = "gather, gather_index, ids_of_keys and keys_of_ids"
            _fail(f"{names} need a step of prefill; the current one is of decoding, which reads keys from their pages")
        return self.step

    def _layer(self, layer: int) -> int:
        if type(layer) is not int or layer not in range(self.layers):
            _fail(f"layer must be from 0 to {self.layers - 1}, got {layer!r}")
        return layer

    def _rows(self, name: str, rows: Tensor, columns: int | None, dtype: torch.dtype) -> Tensor:
        """A row of `columns` for each token of the step; without `columns` a number."""
        tokens, width = len(self.step.blocks), 1 if columns is None else columns
        is_rows = isinstance(rows, Tensor) and rows.numel() == tokens * width
        is_rows = is_rows and (columns is None or rows.shape[-1:] == (columns,))
        if not is_rows or rows.dtype != dtype:
            got = describe(rows)
            hint = _OTHER_DTYPE if is_rows and {rows.dtype, dtype} <= {*_DTYPES} else ""
            shape = f"[..], {tokens} numbers" if columns is None else f"[.., {columns}], {tokens} rows"
            _fail(f"{name} must be {dtype_name(dtype)} {shape}, one for each token of the step, got {got}{hint}")
        if rows.device != self.step.blocks.device:
            _fail(f"{name} must be on {self.step.blocks.device} like the cache, got {rows.device}")
        return rows.reshape(tokens, width).contiguous()

    def _index_views(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """The indexer's keys [pages, page_size, index_columns] and their scales [pages, page_size, 1]."""
        pages = self._index[self._layer(layer)]
        if self.index_dtype != FP8:
            return pages, None
        keys, scales = pages.flatten(1).split([self.page_size * self.index_columns, self.page_size * 4], dim=1)
        return keys.unflatten(1, (self.page_size, -1)), scales.view(torch.float32)[..., None]

    def _check_not_captured(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("PagedKVCache: prefill and decode run on the host: call decode before a graph's capture")

    def _uploaded_copy(self, tensor: Tensor) -> Tensor:
        return (tensor.pin_memory() if self.device.type == "cuda" else tensor).to(self.device, non_blocking=True)

    def _upload(self, memory: Tensor, tensor: Tensor) -> None:
        """Writes a tensor of the host to the begin of `memory`."""
        source = tensor.pin_memory() if self.device.type == "cuda" else tensor
        memory[: len(tensor)].copy_(source, non_blocking=True)


def _words(tensor: Tensor) -> Tensor:
    """A view in words of 4 bytes: rows are copied in these."""
    return tensor.view(torch.int32)


def _write(pages: Tensor, step: DecodeStep | PrefillStep, rows: Tensor) -> None:
    _words(pages)[step.blocks, step.offsets] = _words(rows)


def _gather(pages: Tensor, step: PrefillStep) -> Tensor:
    return _words(pages)[step.key_blocks, step.key_offsets].view(pages.dtype)


def _as_list(name: str, values: Any) -> list[Any]:
    if not isinstance(values, Iterable):
        _fail(f"{name} must be a list, got {values!r}")
    return list(values)


def _fail(message: str) -> NoReturn:
    raise ValueError(f"PagedKVCache: {message}")
