"""dsa_ext.nn.BlockSparseAttention on the CPU, against its formulas as dense attention."""

import re
from typing import Any

import pytest
import torch
from block_sparse_layers import DIM, HEADS, HIDDEN, KV_HEADS, SIZES, gradients, make_input, make_layer
from torch import Tensor

from dsa_ext.nn import BlockKVCache, BlockSizes, BlockSparseAttention
from dsa_ext.nn.block_sparse import BLOCK, pool_blocks


def plain(layer: BlockSparseAttention, x: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Both branches as dense attention with masks; padding tokens are zeros, and their rows are meaningless."""
    batch, length, _ = x.shape
    if sizes is None:
        sizes = [min(BLOCK, length - begin) for begin in range(0, length, BLOCK)]
    block = torch.arange(length) // BLOCK
    valid = torch.arange(length) % BLOCK < torch.tensor(sizes)[block]
    x = torch.where(valid[:, None], x, 0)

    def heads(projection: Any) -> Tensor:
        rows: Tensor = projection(x).view(batch, length, -1, layer.head_dim).transpose(1, 2)
        return rows.repeat_interleave(layer.heads // rows.shape[1], 1)

    q, k, v = heads(layer.q_proj), heads(layer.k_proj), heads(layer.v_proj)
    filled = [j for j, size in enumerate(sizes) if size > 0]

    def pooled(rows: Tensor, pool: Tensor) -> Tensor:
        weights = pool.repeat_interleave(layer.heads // pool.shape[0], 0)[..., None]
        sums = []
        for j in filled:
            tokens = slice(j * BLOCK, j * BLOCK + sizes[j])
            sums.append((rows[:, :, tokens] * weights[:, : sizes[j]]).sum(2) * BLOCK / sizes[j])
        return torch.stack(sums, 2)

    scale = layer.head_dim**-0.5
    k_pool, v_pool = layer.kv_pool.chunk(2)
    probs = (q @ pooled(k, k_pool).mT * scale).softmax(-1)
    coarse = probs @ pooled(v, v_pool)
    weights = torch.stack([rows.mean(2) for rows in probs.split(BLOCK, 2)], 2)
    index, number = layer.select(weights)
    seen = torch.zeros(*weights.shape[:3], len(sizes), dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, weights.shape[:3])):
        row = tuple(place.tolist())
        seen[row][[filled[j] for j in index[row][: number[row]]]] = True
    mask = seen[:, :, block][..., block] & valid
    fine = (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    share = layer.gate_proj(x).mT.sigmoid()[..., None]
    out: Tensor = layer.o_proj((share * fine + (1 - share) * coarse).transpose(1, 2).flatten(2))
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "gini_tau", "topk": None, "tau": 0.6},
        {"mode": "top_tau", "topk": None, "tau": 0.5, "kv_heads": 1},
        {"kv_heads": None, "head_dim": 128, "bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [256, 3, 200])
def test_values_and_gradients(length: int, options: dict[str, Any]) -> None:
    layer, x = make_layer(**options), make_input(length).requires_grad_()
    out, expected = layer(x), plain(layer, x)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(layer, x, out), gradients(layer, x, expected))


def test_blocks_that_are_not_full() -> None:
    """Padding tokens are NaN; blocks of only padding get no weight. Rows of out for padding have no gradient."""
    layer, x = make_layer(bias=True), make_input(len(SIZES) * BLOCK)
    valid = (torch.arange(BLOCK) < torch.tensor(SIZES)[:, None]).flatten()
    x = torch.where(valid[:, None], x, torch.nan).requires_grad_()
    out, expected = layer(x, BlockSizes(SIZES)), plain(layer, x, SIZES)
    assert out.isfinite().all()
    torch.testing.assert_close(out[:, valid], expected[:, valid])
    got, wanted = (gradients(layer, x, t.where(valid[:, None], 0)) for t in (out, expected))
    torch.testing.assert_close(got, wanted)
    assert (got["x"][:, ~valid] == 0).all()


def test_empty_blocks_change_nothing() -> None:
    layer, x = make_layer(), make_input(4 * BLOCK)
    kept = [0, 2, 3]
    dense = x.unflatten(1, (4, BLOCK))[:, kept].flatten(1, 2)
    out = layer(x, BlockSizes([64, 0, 64, 64])).unflatten(1, (4, BLOCK))[:, kept].flatten(1, 2)
    torch.testing.assert_close(out, layer(dense))
    torch.testing.assert_close(layer(x, BlockSizes(torch.full((4,), 64))), layer(x))


def test_pooling_is_the_mean_at_first() -> None:
    layer = BlockSparseAttention(HIDDEN, HEADS, head_dim=DIM, dtype=torch.float64)
    x = torch.randn(2, 3 * BLOCK, HEADS, DIM, dtype=torch.float64).transpose(1, 2)
    blocks = x.unflatten(2, (3, BLOCK))
    torch.testing.assert_close(pool_blocks(x, layer.kv_pool[:HEADS]), blocks.mean(3))
    sizes = torch.tensor([64, 5, 1], dtype=torch.int32)
    means = torch.stack([blocks[:, :, j, :size].mean(2) for j, size in enumerate(sizes.tolist())], 2)
    torch.testing.assert_close(pool_blocks(x, layer.kv_pool[HEADS:], sizes), means)
    share = layer.gate_proj.bias.sigmoid()
    assert ((share > 0.5) & (share < 1)).all()


def test_nothing_is_copied_between_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators get q, k and v as views of the projections' results, or of the cache."""
    from dsa_ext import functional

    seen: list[Tensor] = []

    def look(*args: Any) -> Any:
        seen.extend(args[:3])
        return attend(*args)

    attend = functional.block_sparse_attn
    monkeypatch.setattr(functional, "block_sparse_attn", look)
    layer, x = make_layer(), make_input(2 * BLOCK)
    with torch.no_grad():
        layer(x)
        assert all(t.transpose(1, 2).is_contiguous() and t._base is not None for t in seen)
        cache = layer.make_cache(2, 4 * BLOCK)
        seen.clear()
        layer(x, cache=cache)
    memory = [t.untyped_storage().data_ptr() for t in (*cache.tokens(), *cache.blocks())]
    assert [t.untyped_storage().data_ptr() for t in seen[1:]] == memory[:2]
    assert memory[0] == memory[1]


@pytest.mark.parametrize("step", [1, 2])
def test_decode(step: int) -> None:
    """Each block sees itself and the blocks before it: its results are the last rows of one call with all of them."""
    layer, x = make_layer(), make_input(6 * BLOCK)
    with torch.no_grad():
        cache = layer.make_cache(2, 6 * BLOCK)
        for begin in range(0, 6 * BLOCK, step * BLOCK):
            end = begin + step * BLOCK
            out = layer(x[:, begin:end], cache=cache)
            assert cache.length == end
            torch.testing.assert_close(out, layer(x[:, :end])[:, begin:])


def test_a_block_that_runs_again() -> None:
    """As each denoising step does: what it appended before is gone."""
    layer, x = make_layer(), make_input(4 * BLOCK)
    with torch.no_grad():
        cache = layer.make_cache(2, 4 * BLOCK)
        layer(x[:, : 2 * BLOCK], cache=cache)
        for factor in (3.0, -2.0, 1.0):
            cache.truncate(2 * BLOCK)
            out = layer(factor * x[:, 2 * BLOCK :], cache=cache)
        torch.testing.assert_close(out, layer(x)[:, 2 * BLOCK :])
        cache.truncate(0)
        torch.testing.assert_close(layer(x, cache=cache), layer(x))
    for length in (5 * BLOCK, -BLOCK, 100, 64.0):
        with pytest.raises(ValueError, match=f"an int, a multiple of 64 from 0 to 256, got {length}"):
            cache.truncate(length)


def test_what_is_made_in_inference_mode_is_used_in_others() -> None:
    layer, x = make_layer(), make_input(2 * BLOCK)
    with torch.inference_mode():
        cache, sizes = layer.make_cache(2, 2 * BLOCK), BlockSizes(torch.tensor([BLOCK, 10], dtype=torch.int32))
        expected = layer(x, sizes)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, cache=cache), layer(x))
    out = layer(x, sizes)
    torch.testing.assert_close(out, expected)
    out.sum().backward()


def test_memory_of_a_cache_stays_where_it_is() -> None:
    layer, x = make_layer(), make_input(2 * BLOCK)
    with torch.no_grad():
        cache = layer.make_cache(2, 3 * BLOCK)
        layer(x, cache=cache)
        before = [t.clone() for t in (*cache.tokens(), *cache.blocks())]
        places = [t.data_ptr() for t in (*cache.tokens(), *cache.blocks())]
        layer(x[:, :BLOCK], cache=cache)
    after = (*cache.tokens(), *cache.blocks())
    assert [t.data_ptr() for t in after] == places
    assert [t.shape[2] for t in after] == [3 * BLOCK, 3 * BLOCK, 3, 3]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new[:, :, : old.shape[2]])


def test_names_of_parameters() -> None:
    layer = make_layer(bias=False)
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "q_proj.weight": (HEADS * DIM, HIDDEN),
        "k_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "v_proj.weight": (KV_HEADS * DIM, HIDDEN),
        "o_proj.weight": (HIDDEN, HEADS * DIM),
        "gate_proj.weight": (HEADS, HIDDEN),
        "gate_proj.bias": (HEADS,),
        "kv_pool": (2 * KV_HEADS, BLOCK),
    }


def test_errors() -> None:
    layer, x = make_layer(), make_input(2 * BLOCK)
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads, got 4 and 3"):
        BlockSparseAttention(HIDDEN, 4, kv_heads=3)
    with pytest.raises(ValueError, match="head_dim must be 64 or 128, got 72"):
        BlockSparseAttention(HIDDEN, 4, head_dim=72)
    with pytest.raises(ValueError, match="whole blocks of 64 tokens, got \\[1, 2, 200, 64\\]"):
        layer.pool(*torch.zeros(2, 1, KV_HEADS, 200, DIM))
    with pytest.raises(ValueError, match="x must have 3 blocks of 64 tokens, got 128 tokens"):
        layer(x, BlockSizes([64, 64, 3]))
    with pytest.raises(ValueError, match="not all 0, got \\[0, 0\\]"):
        BlockSizes([0, 0])
    for options in ({"mode": "zzz"}, {"tau": 7.0}, {"min_blocks": -1}, {"max_ratio": 2.0}):
        with pytest.raises(RuntimeError, match=f"dsa::block_select: .*{next(iter(options))}.* must be"):
            BlockSparseAttention(HIDDEN, HEADS, **options)
    for sizes in ([64, 3], torch.tensor([64, 3])):
        got = type(sizes).__name__
        with pytest.raises(TypeError, match=f"kv_block_size must be a BlockSizes, got {got}"):
            layer(x, sizes)
    with pytest.raises(ValueError, match="sizes must be known to the host, got a tensor on meta"):
        BlockSizes(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="capacity must be an int, a multiple of 64, got 100"):
        layer.make_cache(1, 100)
    with pytest.raises(ValueError, match="capacity must be an int, a multiple of 64, got '64'"):
        layer.make_cache(1, "64")
    with pytest.raises(ValueError, match="dtype must be a floating one, got int32"):
        BlockKVCache(1, 64, 1, 64, dtype=torch.int32)
    cache = layer.make_cache(2, 3 * BLOCK)
    with pytest.raises(ValueError, match=r"a cache has no gradients, call under torch.no_grad\(\)"):
        layer(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(TypeError, match="cache must be a BlockKVCache, got int"):
            layer(x, cache=3)
        own = {"device": "cpu", "dtype": x.dtype}
        for other in ({"dtype": torch.bfloat16}, {"device": "meta"}):
            wrong = BlockKVCache(2, 2 * BLOCK, KV_HEADS, DIM, **own | other)
            with pytest.raises(ValueError, match=r"k must be (bfloat16 on cpu|\w+ on meta), got \w+ on cpu"):
                layer(x, cache=wrong)
            assert wrong.length == 0
        with pytest.raises(ValueError, match="new tokens must be whole blocks of 64, got 65"):
            layer(x[:, :65], cache=cache)
        with pytest.raises(ValueError, match="blocks of a cache are full, got kv_block_size"):
            layer(x, BlockSizes([64, 3]), cache=cache)
        layer(x, cache=cache)
        for pool in (layer.kv_pool[:1], layer.kv_pool[:, :1]):
            shape = re.escape(str(list(pool.shape)))
            with pytest.raises(ValueError, match=rf"kv_pool must be \[4, 64\], got {shape}"):
                cache.append(*(torch.zeros(2, KV_HEADS, BLOCK, DIM) for _ in "kv"), pool)
        with pytest.raises(ValueError, match=r"128 \+ 128 tokens exceed the capacity, 192"):
            layer(x, cache=cache)
        k = torch.zeros(2, KV_HEADS, 65, DIM, dtype=x.dtype)
        with pytest.raises(ValueError, match="new tokens must be whole blocks of 64, got 65"):
            cache.append(k, k, layer.kv_pool)
        with pytest.raises(ValueError, match=r"k must be \[2, 2, 64, 64\], got \[1, 2, 64, 64\]"):
            layer(x[:1, :BLOCK], cache=cache)
        with pytest.raises(ValueError, match=r"v must be \[2, 2, 64, 64\], got \[2, 1, 64, 64\]"):
            cache.append(k[:, :, :64], k[:, :1, :64], layer.kv_pool)
    assert cache.length == 2 * BLOCK


@pytest.mark.parametrize(
    ("sizes", "got"),
    [
        ([65], "[65]"),
        ([64, -1], "[64, -1]"),
        (torch.tensor([2**32 + 5, 64]), "[4294967301, 64]"),
        (torch.tensor([2**64 - 1, 64], dtype=torch.uint64), "[18446744073709551615, 64]"),
        ([2**70], "[1180591620717411303424]"),
        ([64.0, 1.5], "[64.0, 1.5]"),
        (torch.tensor([torch.nan, 64]), "[nan, 64.0]"),
        ([True, False], "[True, False]"),
        ([[1, 2]], "[[1, 2]]"),
        ([], "[]"),
        (5, "5"),
        (None, "None"),
    ],
    ids=str,
)
def test_errors_of_sizes(sizes: Any, got: str) -> None:
    expected = f"BlockSizes: sizes must be a list or 1-D tensor of integers from 0 to 64, not all 0, got {got}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        BlockSizes(sizes)


def test_sizes_under_a_default_dtype() -> None:
    x, pool = torch.randn(1, 2, 64, 8, dtype=torch.float64), torch.randn(2, 64, dtype=torch.float64)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = pool_blocks(x, pool, torch.tensor([3]))
    finally:
        torch.set_default_dtype(torch.float32)
    expected = (pool[:, :3, None] * x[0, :, :3]).sum(1) * 64 / 3
    torch.testing.assert_close(got, expected.view_as(got))


def test_sizes_under_a_default_device() -> None:
    with torch.device("meta"):
        assert BlockSizes([64, 3], "cpu").sizes.tolist() == [64, 3]
        assert BlockSizes(torch.tensor([64, 3], device="cpu")).sizes.device.type == "meta"


@pytest.mark.parametrize("sizes", [None, SIZES], ids=str)
def test_compile(sizes: list[int] | None) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(torch.float32), make_input(len(SIZES) * BLOCK, dtype=torch.float32).requires_grad_()
    geometry = None if sizes is None else BlockSizes(sizes)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = layer(x, geometry)
    got = compiled(x, geometry)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradients(layer, x, got), gradients(layer, x, expected), rtol=1e-4, atol=1e-4)


def test_it_learns_what_the_coarse_branch_is_for() -> None:
    """Tokens of one marked block must be found: with topk=1, queries and pooled keys learn to select that block."""
    layer = make_layer(torch.float32, topk=1, heads=2, kv_heads=2)
    head = torch.nn.Linear(HIDDEN, HIDDEN)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(60):
        x = torch.randn(4, 4 * BLOCK, HIDDEN, generator=generator) * 0.1
        marked = torch.randint(4, (4,), generator=generator)
        target = torch.randn(4, HIDDEN, generator=generator)
        rows = torch.arange(4)
        x.unflatten(1, (4, BLOCK))[rows, marked] += torch.cat([torch.full((4, 1), 3.0), target[:, 1:]], -1)[:, None]
        loss = (head(layer(x)).mean(1)[:, 1:] - target[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
