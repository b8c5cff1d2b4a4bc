"""Block-sparse attention for video: a coarse branch selects blocks, a fine one reads them, a gate joins both."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsa_ext import functional

BLOCK = 64  # tokens
#: The gate at first: 7 parts of fine attention and 1 of coarse.
_GATE_BIAS = 2.0


class BlockSizes:
    """How many leading tokens of each block are valid: the shape of a clip, made once and shared by all layers.

    Which blocks are empty must be known to the host, since these are left out of coarse attention. So sizes are numbers
    or a tensor on the CPU, and what the kernels need of them is brought to `device` here, once.

    Args:
        sizes: of each block, 0 to 64.
        device: the layers'.
    """

    def __init__(self, sizes: Sequence[int] | Tensor, device: torch.device | str | None = None) -> None:
        if isinstance(sizes, Tensor) and sizes.device.type != "cpu":
            raise ValueError(f"BlockSizes: sizes must be known to the host, got a tensor on {sizes.device}")
        numbers = torch.as_tensor(sizes, dtype=torch.int32)
        if numbers.dim() != 1 or bool((numbers < 0).any()) or bool((numbers > BLOCK).any()) or not numbers.any():
            raise ValueError(f"BlockSizes: sizes must be numbers from 0 to {BLOCK}, not all 0, got {numbers.tolist()}")
        filled = numbers.nonzero()[:, 0]
        self.count = len(numbers)
        self.sizes = numbers.to(device)  # int32 [count]
        #: Ids of the blocks that are not empty, int32; None if none is.
        self.filled = None if len(filled) == self.count else filled.int().to(device)


class BlockKVCache:
    """Keys and values of a sequence that grows by whole blocks, and what stands for each block in coarse attention.

    All memory is there from the beginning, and views of it go to the kernels: nothing is ever moved.

    Args:
        batch, kv_heads, head_dim: of k and v.
        capacity: most tokens, a multiple of 64.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if capacity % BLOCK != 0:
            raise ValueError(f"BlockKVCache: capacity must be a multiple of {BLOCK}, got {capacity}")
        self.capacity, self.length = capacity, 0
        # heads of keys, then those of values
        self._tokens, self._blocks = (
            torch.empty(batch, length, 2 * kv_heads, head_dim, device=device, dtype=dtype)
            for length in (capacity, capacity // BLOCK)
        )

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, kv_pool: Tensor) -> None:
        """k and v [B, Hkv, 64 * n, D] in any strides, whose blocks are pooled by the weights [2 * Hkv, 64]."""
        begin, end = self.length, self.length + k.shape[2]
        if k.shape[2] % BLOCK != 0:
            raise ValueError(f"BlockKVCache: new tokens must be whole blocks of {BLOCK}, got {k.shape[2]}")
        if end > self.capacity:
            raise ValueError(f"BlockKVCache: {begin} + {k.shape[2]} tokens exceed the capacity, {self.capacity}")
        new = self._tokens[:, begin:end].transpose(1, 2)
        for place, name, x in zip(new.chunk(2, 1), "kv", (k, v), strict=True):
            if x.shape != place.shape:
                raise ValueError(f"BlockKVCache: {name} must be {list(place.shape)}, got {list(x.shape)}")
            place.copy_(x)
        self._blocks[:, begin // BLOCK : end // BLOCK] = pool_blocks(new, kv_pool).transpose(1, 2)
        self.length = end

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Views of all keys and values [B, Hkv, length, D]."""
        k, v = self._tokens[:, : self.length].transpose(1, 2).chunk(2, 1)
        return k, v

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Views of what stands for their blocks [B, Hkv, length / 64, D]."""
        k_pooled, v_pooled = self._blocks[:, : self.length // BLOCK].transpose(1, 2).chunk(2, 1)
        return k_pooled, v_pooled


class _Gate(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, _GATE_BIAS)


class BlockSparseAttention(nn.Module):
    """Attention of blocks of 64 tokens to the blocks that a coarse pass selects, for video: both ways, not causal.

    Tokens are ordered so that a block is a small box of space and time. Learned weights per head pool the keys and the
    values of each block to one of each (as Linformer does within a block)::

        k_pooled[j] = sum_t k_pool[t] * k[64 j + t],    v_pooled[j] = sum_t v_pool[t] * v[64 j + t]

    All queries attend to all of these: the coarse branch. What it gives to a block, mean of the queries of a block,
    selects the blocks whose tokens these queries attend to: the fine branch. A gate per head and token, a projection of
    the input, weighs the two::

        out = o_proj(s * fine + (1 - s) * coarse),    s = sigmoid(gate_proj(x))

    The selection has no gradient; the coarse branch learns through its part of the output.

    Parameters: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj` [heads, hidden_size] and its bias, and `kv_pool`
    [2 * kv_heads, 64], weights of the keys' heads and then of the values', the mean at first. On a GPU the module must
    be in bf16. On the CPU fp32 and float64 will do as well.

    Args:
        hidden_size: columns of the input and of the output.
        heads: of queries.
        kv_heads: heads of keys and values, which divide `heads`; as many by default.
        head_dim: columns of a head, 64 or 128.
        mode, topk, tau, min_blocks, min_ratio, max_ratio: how many blocks are selected, see
            :func:`dsa_ext.block_select`.
        bias: of the projections to and from heads.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int = 128,
        mode: Literal["gini_tau", "top_tau", "topk"] = "gini_tau",
        topk: int | None = None,
        tau: float = 0.9,
        min_blocks: int = 1,
        min_ratio: float = 0.05,
        max_ratio: float = 0.5,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if kv_heads < 1 or heads % kv_heads != 0:
            raise ValueError(f"BlockSparseAttention: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        self.heads, self.kv_heads, self.head_dim, self.mode = heads, kv_heads, head_dim, mode
        self.limits: dict[str, Any] = {"topk": topk, "tau": tau, "min_blocks": min_blocks}
        self.limits |= {"min_ratio": min_ratio, "max_ratio": max_ratio}

        def linear(columns: int, rows: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(hidden_size, heads * head_dim)
        self.k_proj = linear(hidden_size, self.kv_heads * head_dim)
        self.v_proj = linear(hidden_size, self.kv_heads * head_dim)
        self.o_proj = linear(heads * head_dim, hidden_size)
        self.gate_proj = _Gate(hidden_size, heads, device=device, dtype=dtype)
        self.kv_pool = nn.Parameter(torch.empty(2 * kv_heads, BLOCK, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Of the pool, not of the projections."""
        nn.init.constant_(self.kv_pool, 1 / BLOCK)

    def forward(
        self, x: Tensor, kv_block_size: BlockSizes | None = None, *, cache: BlockKVCache | None = None
    ) -> Tensor:
        """Attention among the tokens of x, or, with a cache, of them to all in it, to which they are added first.

        Tokens after the valid ones of their block may hold anything, NaN too. No other token sees them, and their own
        rows of the result mean nothing, but they count as queries of zeros in the mean that selects for their block.

        Args:
            x: [B, N, hidden_size]. N is any number; with `kv_block_size` or a cache, whole blocks of 64.
            kv_block_size: how many tokens of each block are valid; all by default.
            cache: see make_cache. It has no gradients, so they must be off.

        Returns:
            [B, N, hidden_size]
        """
        length = x.shape[1]
        if kv_block_size is not None and length != kv_block_size.count * BLOCK:
            raise ValueError(
                f"BlockSparseAttention: x must have {kv_block_size.count} blocks of {BLOCK} tokens, got {length} tokens"
            )
        if cache is not None and kv_block_size is not None:
            raise ValueError("BlockSparseAttention: blocks of a cache are full, got kv_block_size")
        if cache is not None and torch.is_grad_enabled():
            raise ValueError("BlockSparseAttention: a cache has no gradients, call under torch.no_grad()")
        if cache is not None and length % BLOCK != 0:
            raise ValueError(f"BlockSparseAttention: new tokens must be whole blocks of {BLOCK}, got {length}")
        x, sizes = _whole_blocks(x, kv_block_size)
        q, k, v = (_heads(proj(x), self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        gate = self.gate_proj(x).mT
        if cache is None:
            pooled = self.pool(k, v, sizes)
        else:
            cache.append(k, v, self.kv_pool)
            (k, v), pooled = cache.tokens(), cache.blocks()
        filled = None if kv_block_size is None else kv_block_size.filled
        out = self.attend(q[:, :, :length], k, v, *pooled, gate[..., :length], sizes, filled)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result

    def pool(self, k: Tensor, v: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What stands for each block in coarse attention [B, Hkv, J, D], of k and v: see pool_blocks."""
        k_pool, v_pool = self.kv_pool.chunk(2)
        return pool_blocks(k, k_pool, sizes), pool_blocks(v, v_pool, sizes)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pooled: Tensor,
        v_pooled: Tensor,
        gate: Tensor,
        sizes: Tensor | None = None,
        filled: Tensor | None = None,
    ) -> Tensor:
        """What is between the projections: coarse attention, selection, fine attention and their fusion.

        Args:
            q: [B, H, N, D].
            k, v: [B, Hkv, Nkv, D].
            k_pooled, v_pooled: [B, Hkv, ceil(Nkv / 64), D].
            gate: [B, H, N].
            sizes: valid tokens of each block of keys, int32; all by default.
            filled: ids of the blocks that take part, int32; all by default.

        Returns:
            [B, H, N, D], in the layout of q.
        """
        if filled is not None:
            k_pooled, v_pooled = k_pooled[:, :, filled], v_pooled[:, :, filled]
        coarse, scores = functional.coarse_attn(q, k_pooled, v_pooled)
        index, number = self.select(scores)
        if filled is not None:
            index = filled[index.clamp(min=0)]  # the slots after the first `number` are not read
        fine = functional.block_sparse_attn(q, k, v, index, number, sizes)
        return functional.gated_fusion(fine, coarse, gate)

    def select(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Lists of blocks, from coarse weights [B, H, Mq, Mkv]."""
        return functional.block_select(scores.float(), self.mode, **self.limits)

    def make_cache(self, batch: int, capacity: int) -> BlockKVCache:
        """An empty cache for this layer, of at most `capacity` tokens. Where autocast is on, it is in its dtype."""
        device, dtype = self.k_proj.weight.device, self.k_proj.weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return BlockKVCache(batch, capacity, self.kv_heads, self.head_dim, device=device, dtype=dtype)


def pool_blocks(x: Tensor, pool: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Weighted sums of the tokens of each block.

    All weights are multiplied with all heads, in one product over the tokens as they lie in memory, and the pairs that
    belong together are its diagonal. That is more arithmetic than asked for, and no copy between layouts.

    Args:
        x: [B, H, 64 * J, D], a view of [B, 64 * J, H, D].
        pool: weights [H, 64].
        sizes: how many tokens of each block count, int32 [J]; their sums are scaled by 64 / size. The others must be
            finite.

    Returns:
        [B, H, J, D], in strides of its own.
    """
    rows = x.transpose(1, 2).unflatten(1, (-1, BLOCK))
    weights = pool
    if sizes is not None:
        valid = torch.arange(BLOCK, device=x.device) < sizes[:, None]
        weights = pool * (valid * (BLOCK / sizes.clamp(min=1))[:, None]).to(pool.dtype)[:, None]
    products = weights.expand(*rows.shape[:2], *pool.shape) @ rows.flatten(3)
    of_pairs: Tensor = products.unflatten(3, x.shape[1::2])
    return of_pairs.diagonal(dim1=2, dim2=3).permute(0, 3, 1, 2)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, N, H * D] as [B, H, N, D]."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    return heads


def _whole_blocks(x: Tensor, kv_block_size: BlockSizes | None) -> tuple[Tensor, Tensor | None]:
    """x [B, N, C] with zeros after the valid tokens, up to the end of the last block; and the sizes of its blocks,
    None where all are full: then x is as it was."""
    if kv_block_size is not None:
        valid = torch.arange(BLOCK, device=x.device) < kv_block_size.sizes[:, None]
        return x.masked_fill(~valid.flatten()[:, None], 0), kv_block_size.sizes
    length = x.shape[1]
    if length % BLOCK == 0:
        return x, None
    sizes = torch.arange(length, 0, -BLOCK, dtype=torch.int32, device=x.device).clamp(max=BLOCK)
    return nn.functional.pad(x, (0, 0, 0, -length % BLOCK)), sizes
