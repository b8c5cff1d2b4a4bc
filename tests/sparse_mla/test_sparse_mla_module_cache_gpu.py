"""PagedKVCache on a GPU: SparseMLA with it, compared with the layer on whole sequences; CUDA graphs; no waiting."""

from typing import Any

import pytest
import torch
from cached_layers import Feeder, poisoned
from torch import Tensor

from dsa_ext.nn import PagedKVCache, SparseMLA

pytestmark = pytest.mark.gpu

DEVICE, HIDDEN = "cuda", 256
FP8 = torch.float8_e4m3fn
LENGTHS = (301, 77, 140)


def make_layer(heads: int = 16, index_heads: int = 8, index_dim: int = 64, **options: Any) -> SparseMLA:
    torch.manual_seed(0)
    indexer = {"heads": index_heads, "head_dim": index_dim, **options.pop("indexer", {})}
    sizes: dict[str, Any] = {"q_lora_rank": 192, "topk": 48, **options}
    layer = SparseMLA(HIDDEN, heads, **sizes, indexer=indexer, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():  # both prefer some keys
        layer.q_b_proj.weight *= 4
        layer.indexer.weights_proj.weight *= 4
    return layer


def make_inputs(lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16) for n in lengths]


def make_cache(layer: SparseMLA, layers: int = 1, num_blocks: int = 24, **options: Any) -> PagedKVCache:
    return poisoned(layer.make_cache(layers, num_blocks, 4, 512, **options))


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


@torch.no_grad()
def check_whole(feeder: Feeder, limit: float) -> None:
    """Tokens got what the layer gives whole sequences, in the absorbed form as with a cache, up to the rounding of
    projections of other shapes. Where it changes the selection, at most one key in 50 differs."""
    for i, x in enumerate(feeder.inputs):
        whole = feeder.layer(x[None], cu_seqlens=torch.tensor([0, len(x)], device=DEVICE, dtype=torch.int32))
        out, ids = feeder.out(i), feeder.ids(i)
        assert torch.equal((ids >= 0).sum(-1), (whole.ids[0] >= 0).sum(-1))
        chosen, wanted = (
            torch.zeros(len(x), len(x) + 1, device=DEVICE).scatter(1, t.where(t >= 0, len(x)).long(), 1)[:, :-1]
            for t in (ids, whole.ids[0])
        )
        assert (chosen * wanted).sum() >= 0.98 * wanted.sum()
        same = (chosen == wanted).all(1)
        assert same.float().mean() > 0.5
        assert difference(out[same], whole.out[0][same]) <= limit


@pytest.mark.parametrize("sizes", [(16, 8, 64), (64, 32, 128), (128, 64, 128)], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_steps_give_what_whole_sequences_give(sizes: tuple[int, int, int], precision: str) -> None:
    layer = make_layer(*sizes, indexer={"precision": precision})
    feeder = Feeder(layer, make_inputs(), make_cache(layer))
    feeder.prefill({0: 190, 2: 1})
    feeder.prefill({2: 100, 0: 70, 1: 40})
    feeder.decode([2, 0, 1])
    feeder.decode([1, None, 2], 3)
    feeder.finish(6)
    check_whole(feeder, 0.01)


@pytest.mark.parametrize("heads", [16, 128])
def test_latents_in_fp8(heads: int) -> None:
    layer = make_layer(heads, 64, 128)
    feeder = Feeder(layer, make_inputs(), make_cache(layer, dtype=FP8))
    feeder.prefill({0: 150, 1: 70, 2: 130})
    feeder.finish(2)
    check_whole(feeder, 0.06)


def test_the_selection_is_that_of_training() -> None:
    """Bit for bit: the same queries and keys, in the layer's selection and from the pages."""
    layer = make_layer(16, 64, 128)
    (x,) = make_inputs((301,))
    with torch.no_grad():
        tensors = layer.indexer(x[None], layer.q_a_layernorm(layer.q_a_proj(x[None])))
        expected = layer.indexer.select(tensors, 48)
        cache = make_cache(layer)
        sequence = cache.add()
        cache.prefill([sequence], [290])
        chunk = tensors._replace(**{name: getattr(tensors, name)[:, :290] for name in tensors._fields})
        keys = layer.indexer.select_cached(chunk, cache, 0, 48)
        assert torch.equal(keys, expected[:, :290])
        for begin in range(290, 301, 1):
            cache.decode([sequence])
            step = tensors._replace(**{name: getattr(tensors, name)[:, begin : begin + 1] for name in tensors._fields})
            slots = layer.indexer.select_cached(step, cache, 0, 48)
            assert torch.equal(cache.positions_of(slots), expected[:, begin : begin + 1])


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_one_graph_for_all_steps(tokens: int, dtype: torch.dtype) -> None:
    """A graph of a step of two layers, captured once, is replayed with other sequences, lengths, tables and rows
    without a sequence. It gives the bits of calls of the layers on a second cache."""
    layers = [make_layer(), make_layer(64, 32, 128)]
    layers[1].indexer = layers[0].indexer
    graphed, eager = (make_cache(layers[0], 2, dtype=dtype) for _ in range(2))
    inputs = make_inputs((200, 70, 3, 130))
    names = [[cache.add() for _ in inputs] for cache in (graphed, eager)]
    x = torch.zeros(3, tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)

    def step(cache: PagedKVCache, x: Tensor) -> Tensor:
        for i, layer in enumerate(layers):
            x = x + layer(x, cache=cache, layer=i).out
        return x

    with torch.no_grad():
        for cache, sequences in zip((graphed, eager), names, strict=True):
            cache.prefill(sequences, [len(row) for row in inputs])
            step(cache, torch.cat(inputs)[None])
            cache.decode([None] * 3, tokens)
            step(cache, x)  # allocates what is allocated once
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = step(graphed, x)
        generator = torch.Generator().manual_seed(3)
        orders: list[list[int | None]] = [[0, 1, 2], [3, None, 0], [None, None, None], [2, 3, 1], [1, 0, 3]]
        for turn, order in enumerate([*orders, *orders, *orders]):
            new = torch.randn(x.shape, generator=generator).to(x)
            if turn == 6:
                for cache, sequences in zip((graphed, eager), names, strict=True):
                    cache.evict(sequences[0], [1])
                    cache.truncate(sequences[3], 100)
                    cache.free(sequences[2])
                    sequences[2] = cache.add()
            for cache, sequences in zip((graphed, eager), names, strict=True):
                cache.decode([None if i is None else sequences[i] for i in order], tokens)
            x.copy_(new)
            result.fill_(torch.nan)
            graph.replay()
            expected = step(eager, new)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    for layer in range(2):
        used = [block for name in eager.sequences for block in eager.blocks(name) if block >= 0]
        assert torch.equal(graphed.kv(layer)[used].view(torch.uint8), eager.kv(layer)[used].view(torch.uint8))


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
def test_nan_reaches_results(precision: str, dtype: torch.dtype) -> None:
    """All scores of a token of NaN are NaN, and it selects its own key: in prefill, and in a graph of decoding. Other
    tokens do not see it, and rows without a sequence select nothing."""
    layer, inputs = make_layer(indexer={"precision": precision}), make_inputs()
    cache = make_cache(layer, dtype=dtype)
    a, b = cache.add(), cache.add()
    prompts = torch.cat([inputs[0][:40], inputs[1][:30]])[None]
    prompts[0, 50] = torch.nan
    x = torch.zeros(3, 2, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        cache.prefill([a, b], [40, 30])
        out = layer(prompts, cache=cache).out
        assert torch.equal(out.isnan(), prompts.isnan())
        cache.decode([None] * 3, 2)
        layer(x, cache=cache)  # allocates what is allocated once
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = layer(x, cache=cache)
        cache.decode([a, None, b], 2)
        x[:] = inputs[2][:6].view(x.shape)
        x[0, 1], x[1] = torch.nan, torch.nan
        graph.replay()
    assert result.out[0, 1].isnan().all()
    assert result.out[[0, 2, 2], [0, 0, 1]].isfinite().all()
    assert (result.ids[1] == -1).all()
    assert cache.positions_of(result.ids)[0, 1].tolist() == [41] + [-1] * 47


def test_nothing_waits_for_the_gpu() -> None:
    layer, (x, *_) = make_layer(), make_inputs()
    cache = make_cache(layer)
    sequence = cache.add()

    def steps(begin: int) -> None:
        cache.prefill([sequence], [40])
        layer(x[None, begin : begin + 40], cache=cache)
        cache.decode([sequence, None], 2)
        layer(x[begin + 40 : begin + 42].expand(2, -1, -1), cache=cache)

    with torch.no_grad():
        steps(0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps(42)
            cache.truncate(sequence, 80)
            cache.evict(sequence, [0])
            steps(84)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_steps_that_are_begun_before_the_last_has_run() -> None:
    """The host runs ahead: what it uploads for later steps does not reach those that wait on the GPU."""
    layer, (x, *_) = make_layer(), make_inputs()
    results = []
    for delayed in (False, True):
        feeder = Feeder(layer, [x], make_cache(layer))
        feeder.prefill({0: 100})
        torch.cuda.synchronize()
        if delayed:
            torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            outs = []
            for begin in range(100, 160):
                feeder.cache.decode(feeder.sequences)
                outs.append(layer(x[None, begin : begin + 1], cache=feeder.cache).out)
        results.append(torch.cat(outs))
    assert torch.equal(*results)


def test_a_step_cannot_begin_in_a_graph() -> None:
    cache = make_cache(make_layer())
    sequence = cache.add()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (lambda: cache.decode([sequence]), lambda: cache.prefill([sequence], [1])):
            with pytest.raises(RuntimeError, match="prefill and decode run on the host: call decode before"):
                call()
        torch.zeros(1, device=DEVICE)
    assert cache.length(sequence) == 0


def test_a_row_does_not_depend_on_the_others() -> None:
    """The keys that a sequence selects, with other neighbors and in another row. Queries and keys are given, since a
    matrix product may depend on the number of its rows."""
    layer, inputs = make_layer(16, 64, 128), make_inputs()
    feeder = Feeder(layer, inputs, make_cache(layer))
    feeder.prefill({0: 290, 1: 70, 2: 133})
    cache, selected = feeder.cache, []
    x, q_latent = (torch.ones(4, 1, columns, device=DEVICE, dtype=torch.bfloat16) for columns in (HIDDEN, 192))
    tensors = layer.indexer(x, q_latent)
    orders: list[list[int | None]] = [[0], [0, 1, 2], [2, 0, 1], [None, 1, 2, 0]]
    for order in orders:
        cache.decode([None if i is None else feeder.sequences[i] for i in order])
        one = tensors._replace(**{name: getattr(tensors, name)[: len(order)] for name in tensors._fields})
        slots = layer.indexer.select_cached(one, cache, 0, 48)
        selected.append(slots[order.index(0)])
        for i in order:
            if i is not None:
                cache.truncate(feeder.sequences[i], cache.length(feeder.sequences[i]) - 1)
    for slots in selected[1:]:
        assert torch.equal(slots, selected[0])
