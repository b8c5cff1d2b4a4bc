"""Inputs of the operators of hyper-connections on a GPU."""

from typing import Any

import torch
from torch import Tensor

SHAPES = [
    ((1, 1), 4, 128),
    ((2, 33), 4, 256),
    ((1, 100), 2, 128),
    ((3, 50), 4, 640),
    ((1, 70), 2, 1280),
    ((1, 300), 4, 1280),
    ((1, 200), 4, 2560),
    ((2, 130), 4, 7168),
    ((1, 65), 2, 7168),
    ((2, 17), 4, 896),
    ((1, 40), 4, 1408),
    ((1, 20), 2, 1664),
    ((1, 33), 4, 8192),
    ((1, 33), 2, 8192),
    ((1, 3000), 4, 1280),
    ((1, 5000), 4, 128),
]


def make_pre(tokens: tuple[int, int], streams: int, columns: int, gamma: bool = True, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda")

    mixed, flat = streams * streams + 2 * streams, streams * columns
    scale = torch.arange(1, streams + 1, device="cuda")[:, None]
    return {
        "x": (random(*tokens, streams, columns) * scale).bfloat16(),
        "phi": random(mixed, flat) / flat**0.5,
        "alpha": torch.tensor([1.5, -0.7, 2.0], device="cuda"),
        "bias": random(mixed),
        "gamma": 1 + random(flat) / 4 if gamma else None,
    }


def make_post(tokens: tuple[int, int], streams: int, columns: int) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*tokens, *sizes, generator=generator, device="cuda")

    return {
        "x": random(streams, columns).bfloat16(),
        "y": random(columns).bfloat16(),
        "h_post": 2 * random(streams).sigmoid(),
        "h_res": 2 * random(streams, streams),
    }
