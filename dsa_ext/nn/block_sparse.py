"""Block-sparse attention for video: a coarse branch selects blocks, a fine one attends to them, a gate mixes both."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsa_ext import functional
from dsa_ext.nn.projections import plain_weight
from dsa_ext.ops._checks import check_sizes, dtype_name
from dsa_ext.ops._library import check_input, refuse_cache_in_transforms

BLOCK = 64  # tokens
#: Initial bias of the gate: sigmoid(2) = 0.88, about 7 parts of fine attention to 1 of coarse.
_GATE_BIAS = 2.0


class BlockSizes:
    """Number of valid leading tokens per block: the shape of a clip, created once and shared by all layers.

    The host must know which blocks are empty, because these are left out of coarse attention. So `sizes` are numbers or
    a CPU tensor, and what the kernels need is copied to `device` here, once.

    Args:
        sizes: number of valid tokens per block, integers from 0 to 64.
        device: device of the layers.
    """

    def __init__(self, sizes: Sequence[int] | Tensor, device: torch.device | str | None = None) -> None:
        if isinstance(sizes, Tensor) and sizes.device.type != "cpu":
            raise ValueError(f"BlockSizes: sizes must be known to the host, got a tensor on {sizes.device}")
        error = f"BlockSizes: sizes must be a list or 1-D tensor of integers from 0 to {BLOCK}, not all 0, got"
        try:
            numbers = torch.as_tensor(sizes, device="cpu")
        except (RuntimeError, TypeError, ValueError):
            raise ValueError(f"{error} {sizes!r}") from None
        whole = numbers.long()
        if (
            numbers.is_floating_point()
            or numbers.dtype == torch.bool
            or numbers.dim() != 1
            or not whole.any()
            or bool(((whole < 0) | (whole > BLOCK)).any())
        ):
            raise ValueError(f"{error} {numbers.tolist()}")
        device = torch.get_default_device() if device is None else device
        self.count = len(numbers)
        with torch.inference_mode(False):  # to be used in any mode
            filled = whole.nonzero()[:, 0]
            self.sizes = whole.int().to(device)  # int32 [count]
            #: Ids of the blocks that are not empty, int32; None if no block is empty.
            self.filled = None if len(filled) == self.count else filled.int().to(device)


class BlockKVCache:
    """Keys and values of a sequence that grows by whole blocks, and the pooled key and value of each block.

    All memory is allocated in the constructor, and the kernels get views of it: stored entries are never moved.
    `length` is the number of tokens, the same for the whole batch.

    Args:
        batch, kv_heads, head_dim: sizes of k and v.
        capacity: maximum number of tokens, a multiple of 64.
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
        check_sizes("BlockKVCache", batch=batch, kv_heads=kv_heads, head_dim=head_dim)
        if type(capacity) is not int or capacity < 0 or capacity % BLOCK != 0:
            raise ValueError(f"BlockKVCache: capacity must be an int, a multiple of {BLOCK}, got {capacity!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"BlockKVCache: dtype must be a floating one, got {dtype_name(dtype)}")
        self.capacity, self.length = capacity, 0
        # heads of the keys, then heads of the values; to be used in any mode
        with torch.inference_mode(False):
            self._tokens, self._blocks = (
                torch.empty(batch, length, 2 * kv_heads, head_dim, device=device, dtype=dtype)
                for length in (capacity, capacity // BLOCK)
            )

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, kv_pool: Tensor) -> None:
        """Appends k and v [B, Hkv, 64 * n, D], any strides, and pools their blocks by the weights [2 * Hkv, 64]."""
        begin, end = self.length, self.length + k.shape[2]
        weights = [self._tokens.shape[2], BLOCK]
        if list(kv_pool.shape) != weights:
            raise ValueError(f"BlockKVCache: kv_pool must be {weights}, got {list(kv_pool.shape)}")
        if k.shape[2] % BLOCK != 0:
            raise ValueError(f"BlockKVCache: new tokens must be whole blocks of {BLOCK}, got {k.shape[2]}")
        if end > self.capacity:
            raise ValueError(f"BlockKVCache: {begin} + {k.shape[2]} tokens exceed the capacity, {self.capacity}")
        new = self._tokens[:, begin:end].transpose(1, 2)
        for place, name, x in zip(new.chunk(2, 1), "kv", (k, v), strict=True):
            if x.shape != place.shape:
                raise ValueError(f"BlockKVCache: {name} must be {list(place.shape)}, got {list(x.shape)}")
            if (x.dtype, x.device) != (place.dtype, place.device):
                expected, got = (f"{dtype_name(t.dtype)} on {t.device}" for t in (place, x))
                raise ValueError(f"BlockKVCache: {name} must be {expected}, got {got}")
            place.copy_(x)
        self._blocks[:, begin // BLOCK : end // BLOCK] = pool_blocks(new, kv_pool).transpose(1, 2)
        self.length = end

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, a multiple of 64: before a block runs again, or 0 for a new sequence."""
        if type(length) is not int or not 0 <= length <= self.length or length % BLOCK != 0:
            expected = f"an int, a multiple of {BLOCK} from 0 to {self.length}"
            raise ValueError(f"BlockKVCache: length must be {expected}, got {length!r}")
        self.length = length

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Views of all keys and values [B, Hkv, length, D]."""
        k, v = self._tokens[:, : self.length].transpose(1, 2).chunk(2, 1)
        return k, v

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Views of the pooled keys and values of all blocks [B, Hkv, length / 64, D]."""
        k_pooled, v_pooled = self._blocks[:, : self.length // BLOCK].transpose(1, 2).chunk(2, 1)
        return k_pooled, v_pooled


class _Gate(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, _GATE_BIAS)


class BlockSparseAttention(nn.Module):
    """Bidirectional block-sparse attention for video: blocks of 64 tokens attend to blocks that a coarse pass selects.

    Tokens are ordered so that a block is a small box of space and time. Learned weights per head pool each block to one
    key and one value (as Linformer does, but within a block)::

        k_pooled[j] = sum_t k_pool[t] * k[64 j + t],    v_pooled[j] = sum_t v_pool[t] * v[64 j + t]

    In the coarse branch all queries attend to all pooled keys. Its attention weights, averaged over each block of
    queries, select blocks of keys. In the fine branch the queries attend to the tokens of the selected blocks. A gate
    per head and token, a projection of the input, weights the two::

        out = o_proj(s * fine + (1 - s) * coarse),    s = sigmoid(gate_proj(x))

    The selection is not differentiable; the coarse branch is trained through its part of the output.

    Parameters: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj` [heads, hidden_size] and its bias, and `kv_pool`
    [2 * kv_heads, 64], pooling weights of the key heads and then of the value heads, initialized to the mean. On a GPU
    the module must be in bf16. On the CPU it may also be in fp32 or float64.

    Args:
        hidden_size: columns of the input and of the output.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`; `heads` by default.
        head_dim: columns per head, 64 or 128, whatever hidden_size / heads is.
        mode, topk, tau, min_blocks, min_ratio, max_ratio: how many blocks are selected, see
            :func:`dsa_ext.block_select`.
        bias: whether the projections to and from the heads have a bias.
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
        check_sizes("BlockSparseAttention", hidden_size=hidden_size, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        if head_dim not in (64, 128):
            raise ValueError(f"BlockSparseAttention: head_dim must be 64 or 128, got {head_dim}")
        if heads % kv_heads != 0:
            raise ValueError(f"BlockSparseAttention: heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        self.heads, self.kv_heads, self.head_dim, self.mode = heads, kv_heads, head_dim, mode
        self.limits: dict[str, Any] = {"topk": topk, "tau": tau, "min_blocks": min_blocks}
        self.limits |= {"min_ratio": min_ratio, "max_ratio": max_ratio}
        # Checks mode and limits.
        functional.block_select(torch.empty(0, 0, 0, 1, device="meta", dtype=torch.float32), mode, **self.limits)

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
        """Resets the pooling weights, but not the projections."""
        nn.init.constant_(self.kv_pool, 1 / BLOCK)

    def forward(
        self, x: Tensor, kv_block_size: BlockSizes | None = None, *, cache: BlockKVCache | None = None
    ) -> Tensor:
        """Attention among the tokens of x. With a cache, x is appended to it first and attends to all of its tokens.

        Tokens after the valid ones of their block may hold anything, including NaN. No other token sees them, and their
        own rows of the result are meaningless. But they count, as tokens of zeros, in the mean over queries that
        selects the blocks for their block.

        Args:
            x: [B, N, hidden_size]. N is arbitrary; with `kv_block_size` or a cache, a multiple of 64.
            kv_block_size: number of valid tokens per block; all by default.
            cache: see make_cache. It is not differentiable, so gradients must be disabled.

        Returns:
            [B, N, hidden_size]
        """
        check_input("BlockSparseAttention", x, plain_weight(self.q_proj))
        length = x.shape[1]
        if kv_block_size is not None and not isinstance(kv_block_size, BlockSizes):
            got = type(kv_block_size).__name__
            raise TypeError(f"BlockSparseAttention: kv_block_size must be a BlockSizes, got {got}")
        if kv_block_size is not None and length != kv_block_size.count * BLOCK:
            raise ValueError(
                f"BlockSparseAttention: x must have {kv_block_size.count} blocks of {BLOCK} tokens, got {length} tokens"
            )
        if cache is not None and not isinstance(cache, BlockKVCache):
            raise TypeError(f"BlockSparseAttention: cache must be a BlockKVCache, got {type(cache).__name__}")
        if cache is not None and kv_block_size is not None:
            raise ValueError("BlockSparseAttention: blocks of a cache are full, got kv_block_size")
        if cache is not None and torch.is_grad_enabled():
            raise ValueError("BlockSparseAttention: a cache has no gradients, call under torch.no_grad()")
        if cache is not None and length % BLOCK != 0:
            raise ValueError(f"BlockSparseAttention: new tokens must be whole blocks of {BLOCK}, got {length}")
        if cache is not None:
            refuse_cache_in_transforms("BlockSparseAttention")
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
        """The pooled keys and values for coarse attention [B, Hkv, J, D], one per block.

        Args:
            k, v: [B, Hkv, 64 * J, D]; views of [B, 64 * J, Hkv, D] are not copied.
            sizes: number of valid tokens per block, int32 [J]; their sums are scaled by 64 / size. The other tokens
                must be finite. All are valid by default.
        """
        if k.dim() != 4 or k.shape[2] % BLOCK != 0 or v.shape != k.shape:
            expected = f"pool takes k and v [B, Hkv, {BLOCK} * J, D], whole blocks of {BLOCK} tokens"
            raise ValueError(f"BlockSparseAttention: {expected}, got {list(k.shape)} and {list(v.shape)}")
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
        """Everything between the projections: coarse attention, selection, fine attention and their fusion.

        Args:
            q: [B, H, N, D].
            k, v: [B, Hkv, Nkv, D].
            k_pooled, v_pooled: [B, Hkv, ceil(Nkv / 64), D].
            gate: [B, H, N].
            sizes: number of valid tokens per block of keys, int32; all by default.
            filled: ids of the blocks that are not empty, int32; all by default.

        Returns:
            [B, H, N, D], with the memory layout of q.
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
        """Selects blocks by the coarse weights [B, H, Mq, Mkv]: their ids and number, see block_select."""
        return functional.block_select(scores.float(), self.mode, **self.limits)

    def make_cache(self, batch: int, capacity: int) -> BlockKVCache:
        """An empty cache of at most `capacity` tokens for this layer, in autocast's dtype if autocast is enabled."""
        device, dtype = self.k_proj.weight.device, self.k_proj.weight.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return BlockKVCache(batch, capacity, self.kv_heads, self.head_dim, device=device, dtype=dtype)


def pool_blocks(x: Tensor, pool: Tensor, sizes: Tensor | None = None) -> Tensor:
    """Weighted sums of the tokens of each block.

    One matrix product, over the tokens in their memory layout, applies the weights of every head to every head of x;
    the matching pairs are its diagonal. This takes more arithmetic than needed, but no copy between layouts.

    Args:
        x: [B, H, 64 * J, D], a view of [B, 64 * J, H, D].
        pool: weights [H, 64].
        sizes: number of valid tokens per block, int32 [J]; their sums are scaled by 64 / size. The other tokens must be
            finite.

    Returns:
        [B, H, J, D], not necessarily contiguous.
    """
    rows = x.transpose(1, 2).unflatten(1, (-1, BLOCK))
    weights = pool
    if sizes is not None:
        valid = torch.arange(BLOCK, device=x.device) < sizes[:, None]
        weights = pool * (valid * (BLOCK / sizes.clamp(min=1).to(pool.dtype))[:, None])[:, None]
    products = weights.expand(*rows.shape[:2], *pool.shape) @ rows.flatten(3)
    head_pairs: Tensor = products.unflatten(3, x.shape[1::2])
    return head_pairs.diagonal(dim1=2, dim2=3).permute(0, 3, 1, 2)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    """Views [B, N, H * D] as [B, H, N, D]."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    return heads


def _whole_blocks(x: Tensor, kv_block_size: BlockSizes | None) -> tuple[Tensor, Tensor | None]:
    """x [B, N, C] with zeros after the valid tokens, up to the end of the last block; and the sizes of its blocks, None
    if all are full: then x is unchanged."""
    if kv_block_size is not None:
        valid = torch.arange(BLOCK, device=x.device) < kv_block_size.sizes[:, None]
        return x.masked_fill(~valid.flatten()[:, None], 0), kv_block_size.sizes
    length = x.shape[1]
    if length % BLOCK == 0:
        return x, None
    sizes = torch.arange(length, 0, -BLOCK, dtype=torch.int32, device=x.device).clamp(max=BLOCK)
    return nn.functional.pad(x, (0, 0, 0, -length % BLOCK)), sizes
