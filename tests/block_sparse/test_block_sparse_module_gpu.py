"""dsa_ext.nn.BlockSparseAttention on a GPU in bf16, against itself in float64 on the CPU."""

import copy
import math
from typing import Any

import pytest
import torch
from block_sparse_layers import SIZES, gradients, make_input, make_layer
from torch import Tensor

from dsa_ext.nn import BlockKVCache, BlockSizes, BlockSparseAttention
from dsa_ext.nn.block_sparse import BLOCK

pytestmark = pytest.mark.gpu

GPU: dict[str, Any] = {"hidden_size": 256, "heads": 4, "head_dim": 128}


def on_gpu(**changes: Any) -> tuple[BlockSparseAttention, BlockSparseAttention]:
    """A layer in bf16 on the GPU, and its copy in float64 on the CPU, which uses the selection of the first."""
    layer = make_layer(torch.bfloat16, **{**GPU, **changes}).cuda()
    exact = copy.deepcopy(layer).cpu().double()
    lists: list[tuple[Tensor, ...]] = []
    select = layer.select

    def remember(scores: Tensor) -> tuple[Tensor, Tensor]:
        lists.append(select(scores))
        return lists[-1]  # type: ignore[return-value]

    layer.select = remember  # type: ignore[method-assign]
    exact.select = lambda scores: tuple(t.cpu() for t in lists[-1])  # type: ignore[method-assign]
    return layer, exact


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    a, b = (t.detach().double().cpu() for t in (a, b))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("options", [{}, {"head_dim": 64, "mode": "gini_tau", "topk": None}], ids=str)
@pytest.mark.parametrize("sizes", [None, SIZES], ids=str)
@pytest.mark.parametrize("length", [384, 330])
def test_forward_on_a_gpu(length: int, sizes: list[int] | None, options: dict[str, Any]) -> None:
    if sizes is not None and length % BLOCK:
        pytest.skip("sizes are of whole blocks")
    (layer, exact), x = on_gpu(**options), make_input(length, hidden=256).bfloat16().double()
    geometry = (sizes and (BlockSizes(sizes, "cuda"), BlockSizes(sizes))) or (None, None)
    with torch.no_grad():
        out = layer(x.cuda().bfloat16(), geometry[0])
        assert difference(out, exact(x, geometry[1])) <= 0.01
        again = layer(x.cuda().bfloat16(), geometry[0])
    assert torch.equal(out, again)


def test_decode_on_a_gpu() -> None:
    layer, _ = on_gpu()
    x = make_input(6 * BLOCK, hidden=256).bfloat16().cuda()
    with torch.no_grad():
        cache = layer.make_cache(2, 6 * BLOCK)
        layer(x[:, : 5 * BLOCK], cache=cache)
        out = layer(x[:, 5 * BLOCK :], cache=cache)
        assert difference(out, layer(x)[:, 5 * BLOCK :]) <= 0.01


@pytest.mark.parametrize("sizes", [None, SIZES], ids=str)
def test_gradients_on_a_gpu(sizes: list[int] | None) -> None:
    (layer, exact), x = on_gpu(), make_input(384, hidden=256).bfloat16().double()
    geometry = (sizes and (BlockSizes(sizes, "cuda"), BlockSizes(sizes))) or (None, None)
    leaf, exact_leaf = x.cuda().bfloat16().requires_grad_(), x.requires_grad_()
    got = gradients(layer, leaf, layer(leaf, geometry[0]))
    expected = gradients(exact, exact_leaf, exact(exact_leaf, geometry[1]))
    errors = {name: difference(gradient, expected[name]) for name, gradient in got.items()}
    assert not {name: error for name, error in errors.items() if not error <= 0.02}


def test_nothing_waits_for_the_gpu() -> None:
    layer, _ = on_gpu()
    x, geometry = make_input(330, hidden=256).bfloat16().cuda(), BlockSizes([64, 0, 64, 1, 64], "cuda")
    with torch.no_grad():
        cache = layer.make_cache(2, BLOCK)
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(x)
            layer(x[:, : 5 * BLOCK], geometry)
            layer(x[:, :BLOCK], cache=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_decode_in_a_graph() -> None:
    """A captured step, replayed with new inputs at the same place of the cache."""
    layer = make_layer(torch.bfloat16, **GPU).cuda()
    x = make_input(3 * BLOCK, hidden=256).bfloat16().cuda()
    with torch.no_grad():
        cache = layer.make_cache(2, 3 * BLOCK)
        layer(x[:, : 2 * BLOCK], cache=cache)
        new = torch.zeros_like(x[:, :BLOCK])
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = layer(new, cache=cache)
        new.copy_(x[:, 2 * BLOCK :])
        graph.replay()
        assert difference(out, layer(x)[:, 2 * BLOCK :]) <= 0.01
        assert isinstance(cache, BlockKVCache)
        assert math.isfinite(float(cache.tokens()[0].float().sum()))
