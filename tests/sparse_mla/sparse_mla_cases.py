"""Small inputs of sparse MLA, and its forward as loops in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_inputs, spoil_indices

# The reference takes any width; small ones keep the loops fast.
D_QK, D_V = 12, 8


def make_small(**sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    inputs = make_inputs(d_qk=D_QK, dtype=torch.float64, **{"heads": 4, "s_kv": 16, "topk": 8, **sizes})
    return inputs.q, inputs.kv, spoil_indices(inputs.indices, inputs.kv.shape[1])


def visible_ids(
    indices: Tensor,
    s_kv: int,
    b: int,
    s: int,
    g: int,
    causal: bool,
    q_start: int,
    positions_per_key: int,
    length: Any,
    starts: Any,
    ends: Any,
) -> list[int]:
    """The visible ids of one row."""
    start, end = 0, (q_start + s + 1) // positions_per_key if causal else s_kv
    if starts is not None:
        start, end = int(starts[b, s]), int(ends[b, s])
    row = indices[b, s, g].tolist()
    slots = row if length is None else row[: max(int(length[b, s]), 0)]
    return [i for i in slots if max(0, start) <= i < min(s_kv, end)]


def brute_force(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    d_v: int = D_V,
    causal: bool = True,
    q_start: int = 0,
    positions_per_key: int = 1,
    topk_length: Tensor | None = None,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One row and one head at a time, with Python's floats."""
    batch, seq, heads, d_qk = q.shape
    groups = kv.shape[2]
    scale = 1 / math.sqrt(d_qk) if sm_scale is None else sm_scale
    out = torch.zeros(batch, seq, heads, d_v, dtype=torch.float64)
    lse = torch.full((batch, seq, heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for s in range(seq):
            for h in range(heads):
                g = h // (heads // groups)
                options = (causal, q_start, positions_per_key, topk_length, starts, ends)
                ids = visible_ids(indices, kv.shape[1], b, s, g, *options)
                if not ids:
                    continue
                keys = [kv[b, i, g] for i in ids]
                scores = [scale * float(q[b, s, h] @ key) for key in keys]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                lse[b, s, h] = top + math.log(sum(weights))
                sink = -math.inf if attn_sink is None else float(attn_sink[h])
                if sink == math.inf:
                    continue
                total = sum(weights) + math.exp(sink - top)
                for weight, key in zip(weights, keys, strict=True):
                    out[b, s, h] += weight / total * key[:d_v]
    return out, lse


def lengths(batch: int, seq: int) -> Tensor:
    """Lengths from -2 up, transposed in memory."""
    return (torch.arange(batch * seq, dtype=torch.int32) - 2).view(seq, batch).T


def bounds(batch: int, seq: int) -> dict[str, Tensor]:
    """starts and ends: negative, beyond all keys, empty, at the edges of int32, and ordinary; transposed in memory."""
    starts = torch.tensor([-5, 3, 9, INT32_MIN, INT32_MAX, 0, 2, 15], dtype=torch.int32)
    ends = torch.tensor([4, 99, 9, INT32_MAX, INT32_MIN, 16, 12, 16], dtype=torch.int32)
    count = batch * seq // 8 + 1
    return {name: t.repeat(count)[: batch * seq].view(seq, batch).T for name, t in (("starts", starts), ("ends", ends))}


SINK = torch.tensor([-math.inf, -1.0, 2.0, math.inf], dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all keys": {"causal": False},
    "chunk of a longer sequence": {"q_start": 9},
    "compressed keys": {"q_start": 20, "positions_per_key": 4},
    "lengths": {"topk_length": lengths(2, 6), "causal": False},
    "bounds": bounds(2, 6),
    "bounds and lengths": {**bounds(2, 6), "topk_length": lengths(2, 6), "attn_sink": SINK},
    "sink": {"attn_sink": SINK},
    "negative scale": {"sm_scale": -0.7},
    "zero scale": {"sm_scale": 0.0},
    "everything": {
        "sm_scale": 0.3,
        "q_start": 30,
        "positions_per_key": 3,
        "topk_length": lengths(2, 6),
        "attn_sink": SINK,
    },
}
