"""Calls of sparse_mla_decode on a GPU, and their check against the reference in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from sparse_mla_gpu_inputs import DEVICE
from torch import Tensor

from dsa_ext.testing.inputs import CacheInputs, make_cache
from dsa_ext.testing.tolerances import errors

OP = torch.ops.dsa.sparse_mla_decode.default


def make_gpu(*sizes: int, **options: Any) -> CacheInputs:
    return make_cache(*sizes, device=DEVICE, **options)


def check(q: Tensor, kv_cache: Tensor, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = OP(q, kv_cache, indices, **options)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    args = {"q": q, "kv_cache": kv_cache, "indices": indices, **options}
    errors("sparse_mla_decode", (out, lse), args).check()
    return out, lse


def same_bits(results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def check_one_graph(inputs: Sequence[CacheInputs], lengths: Sequence[Tensor], batch_invariant: bool) -> None:
    """A graph captured once serves other queries, keys, lists and lengths [B, N] of the same shapes."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in vars(inputs[0]).items()}
    options = {"topk_length": torch.zeros_like(lengths[0]), "batch_invariant": batch_invariant}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = OP(**tensors, **options)
    for contents, length in zip(inputs, lengths, strict=True):
        for name, tensor in vars(contents).items():
            tensors[name].copy_(tensor)
        options["topk_length"].copy_(length)
        graph.replay()
        assert same_bits(results, OP(**vars(contents), topk_length=length, batch_invariant=batch_invariant))


def with_scales(cache: Tensor, scales: Tensor) -> Tensor:
    """The packed cache with other scales, [slots, 4]."""
    cache = cache.clone()
    cache.view(-1, cache.shape[-1])[:, 512:528] = scales.contiguous().view(torch.uint8).view(-1, 16)
    return cache


def scales_of_any_size(spread: Tensor) -> dict[str, Tensor]:
    """Scales by kind, from random numbers in [0, 1): no powers of two, negative, tiny, huge, zero, denormal."""
    return {
        "ordinary": spread / 100,
        "wide": torch.exp2(spread * 24 - 20),
        "negative": (spread - 0.5) / 50,
        "zero": torch.where(spread < 0.4, 0.0, spread / 100),
        "tiny": spread * 1e-30,
        "denormal": torch.where(spread < 0.5, spread * 1e-39, spread / 100),
        "one huge": torch.where(spread == spread.amax(), 1e20, spread / 100),
    }
