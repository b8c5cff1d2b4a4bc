"""Block-sparse attention, the selection of blocks, and gated fusion."""

import itertools
import math

import torch

from dsa_ext.testing.block_inputs import make_block_inputs, make_heads
from dsa_ext.testing.calls import with_forward
from dsa_ext.testing.inputs import strided_copy, strided_rows
from sanitized.calls import BF16, Args, checked, random, swapped

# (queries, keys, slots): one slot, several blocks of queries, many slots.
BLOCK_SPARSE = ((1, 1, 1), (200, 500, 5), (64, 4000, 63))
COARSE = ((1, 1), (300, 150), (3000, 100))  # queries, keys
# (B, H, query blocks, key blocks): no block, rows of one warp, of two, of many.
BLOCK_SELECT = ((1, 1, 2, 0), (1, 2, 3, 364), (2, 1, 2, 700), (1, 1, 2, 16384))
# (H, N): one row, a part of a CTA's rows, several CTAs.
GATED_FUSION = ((1, 1), (3, 7), (3, 50))


def block_select() -> None:
    for batch, heads, q_blocks, blocks in BLOCK_SELECT:
        weights = random(batch * heads * q_blocks, blocks).sigmoid() ** 8
        kinds = ({}, {"min_ratio": 1.0, "max_ratio": 1.0, "tau": 1.0}, {"topk": 9})
        for dtype, options in itertools.product((torch.float32, BF16), kinds):
            scores = strided_rows(weights.to(dtype), math.inf).view(batch, heads, q_blocks, blocks)
            checked("block_select", scores=scores, **options)


def block_sparse_args(n_q: int, n_kv: int, slots: int, dim: int, batch: int = 1) -> Args:
    x = vars(make_block_inputs(batch=batch, n_q=n_q, n_kv=n_kv, slots=slots, dim=dim, dtype=BF16))
    return {n: strided_copy(t.transpose(1, 2)).transpose(1, 2) if n in "qkv" else t for n, t in x.items()}


def block_sparse_attn_fwd() -> None:
    for dim, shape in itertools.product((64, 128), BLOCK_SPARSE):
        checked("block_sparse_attn_fwd", **block_sparse_args(*shape, dim))
        args = block_sparse_args(130, 200, 3, dim, batch=2)
        checked("block_sparse_attn_fwd", **{n: swapped(t) if n in "qkv" else t for n, t in args.items()})
    args["q"], args["k"] = 2e4 * args["q"], 2e4 * args["k"]
    checked("block_sparse_attn_fwd", **args)


def block_sparse_attn_bwd() -> None:
    def backward(args: Args) -> None:
        shape = args["q"].shape
        args = {**args, "dout": swapped(random(*shape).to(BF16)), "dlse": random(*shape[:3], seed=4)}
        checked("block_sparse_attn_bwd", **with_forward("block_sparse_attn_bwd", args))

    for dim, shape in itertools.product((64, 128), BLOCK_SPARSE):
        backward(block_sparse_args(*shape, dim))
    args = block_sparse_args(130, 200, 3, 64, batch=2)
    backward({name: swapped(t) if name in "qkv" else t for name, t in args.items()})


def coarse_attn() -> None:
    for dim, (n_q, n_kv) in itertools.product((64, 128), COARSE):
        q, k, v = (swapped(t) for t in make_heads(n_q=n_q, n_kv=n_kv, dim=dim, dtype=BF16))
        checked("coarse_attn_fwd", q=q, k=k, v=v)


def gated_fusion() -> None:
    for (heads, length), dim, gate_dtype in itertools.product(GATED_FUSION, (64, 128), (BF16, torch.float32)):
        rows = random(3, 2, heads, length, dim).to(BF16)
        args = {"fine": strided_copy(rows[0]), "coarse": swapped(rows[1])}
        args["gate"] = random(2, length, heads).to(gate_dtype).mT
        checked("gated_fusion_fwd", **args)
        checked("gated_fusion_bwd", dout=rows[2], **args)
