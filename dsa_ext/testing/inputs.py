"""Seeded inputs of the operators: ordinary ones, and edge cases that break kernels."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_ext.reference.decode import pack_kv_fp8

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

#: Most random numbers that random_indices ranks at a time.
_ROWS_ELEMENTS = 2**28


@dataclass
class Inputs:
    q: Tensor  # [B, S, H, D]
    kv: Tensor  # [B, S_kv, G, D]
    indices: Tensor  # [B, S, G, K] int32


def make_inputs(
    batch: int = 1,
    seq: int = 8,
    s_kv: int = 64,
    heads: int = 16,
    groups: int = 1,
    topk: int = 32,
    d_qk: int = 576,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Inputs:
    """Normally distributed q and kv, and distinct random ids; rows with fewer keys than slots end in padding."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    return Inputs(
        q=normal(batch, seq, heads, d_qk),
        kv=normal(batch, s_kv, groups, d_qk),
        indices=random_indices((batch, seq, groups, topk), s_kv, generator),
    )


def random_indices(shape: tuple[int, int, int, int], s_kv: int, generator: torch.Generator) -> Tensor:
    """Distinct ids of [0, s_kv) in random order, int32 [B, S, G, K], padded with -1 at the end where K > s_kv."""
    device, topk = generator.device, shape[3]
    indices = torch.full(shape, -1, dtype=torch.int32, device=device)
    if s_kv == 0:
        return indices
    rows = indices.view(-1, topk)
    count = min(topk, s_kv)
    for part in rows.split(max(1, _ROWS_ELEMENTS // s_kv)):
        keys = torch.rand(len(part), s_kv, generator=generator, device=device)
        part[:, :count] = keys.topk(count, dim=1).indices.int()
        if count < topk:
            part[:, :count] = part[:, :count][:, torch.randperm(count, generator=generator, device=device)]
    return indices


#: Of drift_indices: the share of a list that is the most recent keys, the share of the pool that the rest of a list
#: takes, and the queries after which the pool has been drawn again.
_RECENT, _OF_POOL, _POOL_QUERIES = 0.05, 0.41, 15


def drift_indices(
    shape: tuple[int, int, int, int], s_kv: int, generator: torch.Generator, *, causal: bool = False
) -> Tensor:
    """Distinct ascending ids, int32 [B, S, G, K], that recur as in the lists of a trained indexer: each list shares
    40 % with the one before it, four neighbors list 2.2 K distinct keys and eight 2.9 K, where there are many more.

    The queries are the last S of `s_kv` positions; unless `causal`, later keys may be listed too. A list has the most
    recent keys and, at random, a part of a pool whose keys change slowly. Padded with -1 where there are fewer keys.
    """
    batch, seq, groups, topk = shape
    device, count = generator.device, min(topk, s_kv)
    recent = int(_RECENT * count)
    indices = torch.full(shape, -1, dtype=torch.int32, device=device)
    if count == 0:
        return indices
    keys = torch.arange(s_kv, device=device)
    for b, g in itertools.product(range(batch), range(groups)):
        phase = torch.randint(_POOL_QUERIES, (s_kv,), generator=generator, device=device)
        pools = torch.rand(seq // _POOL_QUERIES + 2, s_kv, generator=generator, device=device)
        for queries in torch.arange(seq, device=device).split(max(1, _ROWS_ELEMENTS // 4 // s_kv)):
            age = (s_kv - seq + queries)[:, None] - keys
            scores = torch.rand(len(queries), s_kv, generator=generator, device=device)
            seen = s_kv - seq + queries[:, None] + 1 if causal else s_kv
            pool = pools.gather(0, (queries[:, None] + phase) // _POOL_QUERIES)
            scores += pool * seen < (count - recent) / _OF_POOL
            scores += 2 * ((age >= 0) & (age < recent))
            if causal:
                scores.masked_fill_(age < 0, -1)
            best = scores.topk(count)
            ids = best.indices.masked_fill(best.values < 0, s_kv).sort().values
            indices[b, queries, g, :count] = ids.masked_fill(ids == s_kv, -1).int()
    return indices


@dataclass
class CacheInputs:
    q: Tensor  # [B, N, H, D]
    kv_cache: Tensor  # [blocks, page, 1, D], or packed: uint8 [blocks, page, 1, bytes]
    indices: Tensor  # [B, N, K] int32


def make_cache(
    batch: int = 1,
    tokens: int = 1,
    blocks: int = 8,
    page: int = 64,
    heads: int = 16,
    topk: int = 32,
    d_qk: int = 576,
    *,
    packed: bool = True,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> CacheInputs:
    """A paged cache of normally distributed keys whose magnitudes differ, and queries that list distinct slots."""
    inputs = make_inputs(1, batch * tokens, blocks * page, heads, 1, topk, d_qk, device=device, dtype=dtype, seed=seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    sizes = torch.rand(blocks * page, 1, generator=generator, device=device) + 0.25
    kv = (inputs.kv[0, :, 0] * sizes).to(torch.bfloat16 if packed else dtype)
    cache = pack_kv_fp8(kv) if packed else kv
    return CacheInputs(
        q=inputs.q[0].unflatten(0, (batch, tokens)),
        kv_cache=cache.view(blocks, page, 1, cache.shape[1]),
        indices=inputs.indices[0, :, 0].unflatten(0, (batch, tokens)),
    )


def poison_cache(kv_cache: Tensor, listed: Tensor) -> Tensor:
    """A copy of a cache in which every slot that is not among the valid ids `listed` is NaN: all its bytes are 255."""
    keep = torch.zeros(kv_cache.shape[0] * kv_cache.shape[1], 1, dtype=torch.bool, device=kv_cache.device)
    keep[listed.long()] = True
    rows = kv_cache.flatten(0, 2).view(torch.uint8)
    return torch.where(keep, rows, 255).view(kv_cache.dtype).view(kv_cache.shape)


def strided_cache(kv_cache: Tensor) -> Tensor:
    """The same values as a slice of a buffer with several layers, spare slots in every page and wider rows, all NaN."""
    blocks, page, _, width = kv_cache.shape
    extra = 32 // kv_cache.element_size()
    buffer = torch.full((blocks, 3, page + 1, 1, (width + extra) * kv_cache.element_size()), 255, dtype=torch.uint8)
    view = buffer.to(kv_cache.device).view(kv_cache.dtype)[:, 1, :page, :, extra:]
    return view.copy_(kv_cache)


def spoil_indices(indices: Tensor, s_kv: int, seed: int = 0) -> Tensor:
    """A copy in which a third of the slots are ids that must be skipped, one id per row is listed twice, and the first
    query has only padding."""
    generator = torch.Generator(indices.device).manual_seed(seed)
    bad = torch.tensor([INT32_MIN, -1, s_kv, INT32_MAX], dtype=torch.int32, device=indices.device)
    choice = torch.randint(0, 12, indices.shape, generator=generator, device=indices.device)
    spoiled = torch.where(choice < 4, bad[choice.clamp(max=3)], indices)
    spoiled[..., -1] = spoiled[..., 0]
    spoiled[:, 0] = -1
    return spoiled


def poison_unselected(kv: Tensor, indices: Tensor, visible: Tensor) -> Tensor:
    """A copy of kv in which every row that no query sees is NaN or infinity. `visible` marks the slots that count."""
    batch, s_kv, groups, _ = kv.shape
    selected = torch.zeros(batch, s_kv + 1, groups, dtype=torch.bool, device=kv.device)
    ids = torch.where(visible, indices, s_kv).long()
    b = torch.arange(batch, device=kv.device)[:, None, None, None]
    g = torch.arange(groups, device=kv.device)[:, None]
    selected[b, ids, g] = True
    poison = torch.full_like(kv, torch.nan)
    poison[:, 1::2] = torch.inf
    return torch.where(selected[:, :s_kv, :, None], kv, poison)


def strided_copy(tensor: Tensor, *, swap_leading: bool = False, pad: int = 64) -> Tensor:
    """The same values as a view of a larger buffer with wider rows and spare rows around them; with `swap_leading` the
    two leading dimensions are transposed. Every row still starts 16-byte aligned. The rest of the buffer is NaN."""
    source = tensor.transpose(0, 1) if swap_leading else tensor
    shape = list(source.shape)
    buffer = tensor.new_full([shape[0] + 1, shape[1] + 2, *shape[2:-1], shape[-1] + pad], torch.nan)
    view = buffer[1:, 1:-1, ..., pad // 2 : pad // 2 + shape[-1]]
    view.copy_(source)
    return view.transpose(0, 1) if swap_leading else view


def strided_rows(rows: Tensor, fill: float = torch.nan) -> Tensor:
    """The same rows [R, C] as a view of a larger buffer in which each starts 16-byte aligned. The rest is `fill`."""
    count, columns = rows.shape
    buffer = rows.new_full((count + 1, (columns + 15) // 16 * 16 + 32), fill)
    view = buffer[1:, 16 : 16 + columns]
    view.copy_(rows)
    return view


@dataclass
class IndexerInputs:
    q: Tensor  # [S, Hi, Di]
    k: Tensor  # [S_kv, Di]
    weights: Tensor  # [S, Hi] fp32, or float64 for float64 inputs
    k_scale: Tensor | None  # [S_kv] fp32, only for float8_e4m3fn
    ks: Tensor  # [S] int32
    ke: Tensor  # [S] int32


def make_indexer_inputs(
    seq: int = 8,
    s_kv: int = 64,
    heads: int = 64,
    dim: int = 128,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> IndexerInputs:
    """Normally distributed q, k and weights. The queries are the last `seq` of `s_kv` tokens; each sees the keys up to
    its own."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    q, k, weights = normal(seq, heads, dim), normal(s_kv, dim), normal(seq, heads) * (heads * dim) ** -0.5
    k_scale = None
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        q_scale, k_scale = q.abs().amax(2) / largest, k.abs().amax(1) / largest
        q, k, weights = q / q_scale[..., None], k / k_scale[:, None], weights * q_scale
    return IndexerInputs(
        q=q.to(dtype),
        k=k.to(dtype),
        weights=weights.double() if dtype == torch.float64 else weights,
        k_scale=k_scale,
        ks=torch.zeros(seq, dtype=torch.int32, device=device),
        ke=torch.arange(s_kv - seq + 1, s_kv + 1, dtype=torch.int32, device=device),
    )


def nasty_rows(columns: int, seed: int = 0, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Rows of fp32 logits [columns] by name: edge cases of top-k selection."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(columns, generator=generator, device=device)

    def integers(low: int, high: int) -> Tensor:
        """In [low, high), int32."""
        return torch.randint(low, high, (columns,), generator=generator, device=device, dtype=torch.int32)

    def from_bits(bits: Tensor, sign: Tensor) -> Tensor:
        return bits.view(torch.float32) * sign

    one = torch.ones(columns, device=device)
    sign = 1.0 - 2 * integers(0, 2)
    one_in_16 = integers(0, 16) == 0
    return {
        "normal": normal(),
        "negative": -normal().abs() - 1,
        "all equal": 0.7 * one,
        # fp16 has 10 bits of fraction, fp32 23: these 2^12 values all round to 1.
        "one fp16 bucket": from_bits(one.view(torch.int32) + integers(0, 2**12), one),
        # Wherever the threshold of the selection lies, only the last bit separates selected logits from the others.
        "last bit": from_bits(one.view(torch.int32) + integers(-1, 2), one),
        "last bit, negative": from_bits(one.view(torch.int32) + integers(-1, 2), -one),
        "two clusters": sign * 1e3 + normal() * 1e-3,
        "plateau of zeros": normal().abs().masked_fill(~one_in_16, 0),
        "denormals": from_bits(integers(0, 2**23), sign),
        "zeros of both signs": 0.0 * sign,
        "zeros of both signs and few others": torch.where(one_in_16, normal(), 0.0 * sign),
        "NaN": normal().masked_fill(one_in_16, torch.nan),
        "NaN with the sign bit": normal().masked_fill(one_in_16, torch.nan).copysign(-one),
        "infinities": torch.where(one_in_16, sign * torch.inf, normal()),
        "NaN and infinities": torch.stack([normal(), sign * torch.inf, one * torch.nan])[
            integers(0, 3).long(), torch.arange(columns, device=device)
        ],
        "all +inf": one * torch.inf,
        "all -inf": one * -torch.inf,
        "all NaN": one * torch.nan,
        "ascending": normal().sort().values,
        "descending": normal().sort(descending=True).values,
    }
