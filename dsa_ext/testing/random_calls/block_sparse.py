"""Random calls of the block-sparse operators."""

import torch
from torch import Tensor

from dsa_ext import functional
from dsa_ext.reference.block_sparse import BLOCK, blocks, listed_blocks, valid_keys
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN
from dsa_ext.testing.random_calls.call import Args, Call, Results, gradients, leaf, run_operator, select
from dsa_ext.testing.random_calls.draw import Draw
from dsa_ext.testing.tolerances import check

_FORWARD = ("q", "k", "v", "q2k_index", "q2k_num", "kv_block_size", "sm_scale")
_MAX_BLOCKS = 16384


def _heads(draw: Draw) -> tuple[int, int, int, int]:
    """Batch, heads of queries and of keys, columns."""
    kv_heads = draw.choice((1, 1, 2, 3, 8))
    return draw.choice((1, 1, 1, 2, 3)), kv_heads * draw.choice((1, 1, 2, 4, 5)), kv_heads, draw.choice((64, 128))


def _tokens(draw: Draw, count: int) -> int:
    """A random number of tokens in `count` blocks, the last of which may be partial."""
    return count * BLOCK - (draw.random.randrange(BLOCK) if draw.chance(0.5) and count else 0)


def _attention(draw: Draw) -> Args:
    """Arguments of block_sparse_attn_fwd."""
    batch, heads, kv_heads, dim = _heads(draw)
    q_blocks, slots = draw.within(BLOCK * BLOCK * batch * heads, draw.length(64), draw.size(64))
    (kv_blocks,) = draw.within(BLOCK * 64 * batch * kv_heads, draw.length(512))
    n_q, n_kv = _tokens(draw, q_blocks), _tokens(draw, kv_blocks)
    index = draw.view(draw.ids(batch, heads, q_blocks, slots, keys=kv_blocks), "dense")
    number = draw.integers(-1, slots + 2, batch, heads, q_blocks)
    if draw.chance(0.4):
        number.fill_(draw.choice((slots, INT32_MAX, 0, INT32_MIN)))
    number = draw.view(number, "free")
    sizes = draw.view(draw.integers(-9, BLOCK + 10, kv_blocks), "free") if draw.chance(0.5) else None
    q, k, v = (
        draw.floats(batch, *shape, dim, name=n)
        for n, shape in zip("qkv", ((heads, n_q), *((kv_heads, n_kv),) * 2), strict=True)
    )
    scale = draw.scale()
    q = draw.to_edge(q, k, dim**-0.5 if scale is None else scale)
    unread = ~_read(k, index, number, sizes)
    return {
        "q": draw.view(q),
        "k": draw.keys(k, unread),
        "v": draw.keys(v, unread),
        "q2k_index": index,
        "q2k_num": number,
        "kv_block_size": sizes,
        "sm_scale": scale,
    }


def _read(k: Tensor, index: Tensor, number: Tensor, sizes: Tensor | None) -> Tensor:
    """Mask [B, Hkv, Nkv] of the keys that some query sees."""
    batch, kv_heads, length, _ = k.shape
    count = blocks(length)
    rows = torch.where(listed_blocks(index, number, count), index, count).long().flatten(2)
    listed = torch.zeros(batch, index.shape[1], count + 1, dtype=torch.bool, device=k.device).scatter_(2, rows, True)
    seen: Tensor = listed.unflatten(1, (kv_heads, -1)).any(2)[..., :count, None] & valid_keys(k, sizes)
    return seen.flatten(2)[..., :length]


def block_sparse_attn_fwd(draw: Draw) -> Args:
    return _attention(draw)


def block_sparse_attn_bwd(draw: Draw) -> Args:
    args = _attention(draw)
    out, lse = run_operator("block_sparse_attn_fwd", args)
    dout, dlse = _upstream(draw, out, lse)
    out, lse = (draw.view(t, "free", repeat=False) for t in (out, lse))
    return {**args, "dout": dout, "out": out, "lse": lse, "dlse": dlse}


def _upstream(draw: Draw, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    dlse = draw.view(draw.gradient(*lse.shape, dtype=torch.float32), "free") if draw.chance(0.4) else None
    return draw.view(draw.gradient(*out.shape), "free"), dlse


def functional_block_sparse_attn(draw: Draw) -> Call:
    args = _attention(draw)
    args["dout"], args["dlse"] = _upstream(draw, args["q"], args["q"][..., 0])

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in "qkv"]
        lists = (a["q2k_index"], a["q2k_num"], a["kv_block_size"])
        q, k, v = leaves
        out, lse = functional.block_sparse_attn(q, k, v, *lists, sm_scale=a["sm_scale"], return_lse=True)
        return out.detach(), lse.detach(), *gradients([out, lse], [a["dout"], a["dlse"]], leaves)

    def judge(results: Results, a: Args) -> None:
        out, lse, *grads = results
        check("block_sparse_attn_fwd", (out, lse), select(a, *_FORWARD))
        check("block_sparse_attn_bwd", tuple(grads), {**a, "out": out, "lse": lse})

    return Call("functional.block_sparse_attn", args, run, judge, (), draw.notes)


def coarse_attn_fwd(draw: Draw) -> Args:
    batch, heads, kv_heads, dim = _heads(draw)
    n_q, n_kv = draw.within(64 * batch * heads, draw.length(4096), draw.length(2048))
    q, k = draw.floats(batch, heads, n_q, dim, name="q"), draw.floats(batch, kv_heads, n_kv, dim, name="k")
    scale = draw.scale()
    q = draw.to_edge(q, k, dim**-0.5 if scale is None else scale)
    v = draw.view(draw.floats(batch, kv_heads, n_kv, dim, name="v"))
    return {"q": draw.view(q), "k": draw.view(k), "v": v, "sm_scale": scale}


def functional_coarse_attn(draw: Draw) -> Call:
    """Its gradients are those of block_sparse_attn with lists of all blocks."""
    args = coarse_attn_fwd(draw)
    args["dout"] = draw.view(draw.gradient(*args["q"].shape), "free")

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in "qkv"]
        out, lse, scores = torch.ops.dsa.coarse_attn_fwd(*leaves, a["sm_scale"])
        return out.detach(), lse.detach(), scores, *gradients([out], [a["dout"]], leaves)

    def judge(results: Results, a: Args) -> None:
        out, lse, scores, *grads = results
        check("coarse_attn_fwd", (out, lse, scores), select(a, "q", "k", "v", "sm_scale"))
        count = blocks(a["k"].shape[2])
        rows = (*out.shape[:2], blocks(out.shape[2]))
        index = torch.arange(max(1, count), device=out.device).int().expand(*rows, -1)
        number = torch.full(rows, count, device=out.device, dtype=torch.int32)
        lists = {"q2k_index": index, "q2k_num": number, "kv_block_size": None, "dlse": None}
        check("block_sparse_attn_bwd", tuple(grads), {**a, **lists, "out": out, "lse": lse})

    return Call("functional.coarse_attn", args, run, judge, (), draw.notes)


def block_select(draw: Draw) -> Args:
    batch, heads = draw.size(3), draw.size(8)
    q_blocks, kv_blocks = draw.within(64 * batch * heads, draw.length(256), draw.length(_MAX_BLOCKS))
    kind = draw.choice(("softmax", "softmax", "uniform", "peaked", "floats", "specials"))
    shape = (batch, heads, q_blocks, kv_blocks)
    if kind == "softmax":
        scores = (draw.normal(*shape) * draw.choice((0.1, 1.0, 10.0))).softmax(-1)
    elif kind in ("uniform", "peaked"):
        scores = draw.uniform(*shape) ** (1 if kind == "uniform" else 40)
    else:
        scores = draw.floats(*shape, dtype=torch.float32, name="scores")
    if kind == "specials":
        for special in (torch.nan, torch.inf, -torch.inf, 0.0):
            scores = scores.masked_fill(draw.uniform(*shape) < 0.05, special)
    scores = scores.to(draw.choice((torch.float32, torch.bfloat16)))
    low, high = sorted(draw.choice((0.0, 0.05, 0.5, 1.0, draw.random.random())) for _ in range(2))
    return {
        "scores": draw.view(scores, "dense"),
        "topk": draw.size(2 * kv_blocks + 1) if draw.chance(0.4) else None,
        "tau": draw.choice((0.9, 0.5, 1.0, 1e-9, 1 - draw.random.random())),
        "min_blocks": draw.choice((0, 1, 1, 4, kv_blocks, 2 * kv_blocks + 1)),
        "min_ratio": low,
        "max_ratio": high,
    }


def _fusion(draw: Draw) -> Args:
    batch, heads, dim = draw.choice((1, 1, 2, 3)), draw.size(16), draw.choice((64, 128))
    (length,) = draw.within(64 * batch * heads, draw.length(2**16))
    gate = draw.floats(batch, heads, length, dtype=draw.choice((torch.float32, torch.bfloat16)), name="gate")
    if draw.chance(0.2):
        gate = gate * 100
    fine, coarse = (draw.view(draw.floats(batch, heads, length, dim, name=name)) for name in ("fine", "coarse"))
    return {"fine": fine, "coarse": coarse, "gate": draw.view(gate, "free")}


def gated_fusion_fwd(draw: Draw) -> Args:
    return _fusion(draw)


def gated_fusion_bwd(draw: Draw) -> Args:
    args = _fusion(draw)
    return {**args, "dout": draw.view(draw.gradient(*args["fine"].shape), "free")}


def functional_gated_fusion(draw: Draw) -> Call:
    args = gated_fusion_bwd(draw)

    def run(a: Args) -> Results:
        leaves = [leaf(a[name]) for name in ("fine", "coarse", "gate")]
        out = functional.gated_fusion(*leaves)
        return out.detach(), *gradients([out], [a["dout"]], leaves)

    def judge(results: Results, a: Args) -> None:
        check("gated_fusion_fwd", results[:1], select(a, "fine", "coarse", "gate"))
        check("gated_fusion_bwd", results[1:], a)

    return Call("functional.gated_fusion", args, run, judge, (), draw.notes)
