"""Random calls of the indexer's operators on paged caches."""

import torch
from torch import Tensor

from dsa_ext.reference import query_lengths
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN
from dsa_ext.testing.paged_inputs import PagedInputs, packed_pages, seen_keys
from dsa_ext.testing.random_calls.call import Args, Call, Results, run_operator
from dsa_ext.testing.random_calls.draw import Draw
from dsa_ext.testing.tolerances import check

_PAGES = (64, 64, 64, 4, 16, 32, 48, 60, 68, 128, 576)


def _paged(draw: Draw) -> Args:
    """q, k_cache, weights, context_lens and block_table."""
    heads, dim, queries = draw.choice((8, 16, 32, 64)), draw.choice((64, 128)), draw.choice((1, 1, 2, 3, 4, 5, 6))
    fp8, page = draw.chance(0.6), draw.choice(_PAGES)
    if not fp8 and draw.chance(0.3):
        page = draw.choice((1, 3, 53, 61, 69))
    batch, keys = draw.within(heads * queries, draw.length(321), draw.length(2**16))
    pages, blocks = -(-keys // page), max(1, batch * -(-keys // page) + draw.choice((0, 2)))
    q = draw.floats(batch * queries, heads, dim, dtype=torch.float32, name="q")
    k = draw.floats(blocks * page, dim, dtype=torch.float32, name="k")
    weights = draw.floats(batch * queries, heads, dtype=torch.float32, name="weights") * (heads * dim) ** -0.5
    scales = None
    if fp8:
        largest = torch.finfo(torch.float8_e4m3fn).max
        q_scale, scales = (x.abs().amax(-1).clamp(min=1e-30) / largest for x in (q, k))
        q, k = (q / q_scale[..., None]).clamp(-largest, largest), (k / scales[:, None]).clamp(-largest, largest)
        weights = weights * q_scale
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    table, lengths = _table(draw, batch, pages, blocks), _lengths(draw, batch, queries, keys)
    q, cache = q.to(dtype).view(batch, queries, heads, dim), k.to(dtype).view(blocks, page, dim)
    unseen = ~seen_keys(PagedInputs(q, cache, weights, lengths, table))
    return {
        "q": draw.view(q),
        "k_cache": draw.keys(cache, unseen) if scales is None else _packed(draw, cache, scales, unseen),
        "weights": draw.view(weights),
        "context_lens": draw.view(lengths, "free"),
        "block_table": draw.view(table, "free"),
    }


def _packed(draw: Draw, keys: Tensor, scales: Tensor, unseen: Tensor) -> Tensor:
    """The cache as bytes, maybe with NaN where nothing is read, and with gaps between its blocks."""
    scales = scales.view(unseen.shape)
    if draw.chance(0.5):
        draw.notes.append("NaN where unused")
        keys = keys.float().masked_fill(unseen[..., None], torch.nan).to(keys.dtype)
        scales = scales.masked_fill(unseen, torch.nan)
    cache = packed_pages(keys, scales)
    if draw.chance(0.3):
        cache = torch.cat([cache, torch.full_like(cache, 0xFF)], 1)[:, : cache.shape[1]]
    return cache


def _table(draw: Draw, batch: int, pages: int, blocks: int) -> Tensor:
    order = torch.randperm(blocks, generator=draw.generator, device=draw.device)
    table = order[: batch * pages].view(batch, pages).int()
    if draw.chance(0.15):  # several sequences share blocks
        table = draw.integers(0, blocks, batch, pages)
    if draw.chance(0.25):
        draw.notes.append("blocks that do not exist")
        bad = torch.tensor([-1, INT32_MIN, blocks, INT32_MAX], dtype=torch.int32, device=draw.device)
        bad = bad[draw.integers(0, 4, batch, pages).long()]
        table = torch.where(draw.uniform(batch, pages) < draw.choice((0.1, 0.9)), bad, table)
    return table


def _lengths(draw: Draw, batch: int, queries: int, keys: int) -> Tensor:
    shape = (batch, queries) if draw.chance(0.4) else (batch,)
    kind = draw.choice(("all", "random", "random", "short", "noise", "none"))
    draw.notes.append(f"lengths {kind}")
    low, high = {
        "all": (keys, keys + 1),
        "random": (-2, keys + 8),
        "short": (0, 9),
        "noise": (INT32_MIN, INT32_MAX),
        "none": (-3, 1),
    }[kind]
    return draw.integers(low, high, *shape)


def indexer_logits_paged_call(draw: Draw) -> Call:
    """With clean=False the logits from a query's length on are not specified: they are replaced by -inf."""
    args = _paged(draw)
    held = args["block_table"].shape[1] * args["k_cache"].shape[1]
    most = draw.choice((None, held, held // 2, held + 77, 0))
    args |= {"max_len": most, "clean": draw.chance(0.7)}

    def run(a: Args) -> Results:
        (logits,) = run_operator("indexer_logits_paged", a)
        lengths = query_lengths(a["context_lens"], a["q"].shape[1], min(held, logits.shape[1])).flatten()
        outside = torch.arange(logits.shape[1], device=logits.device) >= lengths[:, None]
        return (logits if a["clean"] else logits.masked_fill(outside, -torch.inf),)

    def judge(results: Results, a: Args) -> None:
        check("indexer_logits_paged", results, a)

    return Call("indexer_logits_paged", args, run, judge, (), draw.notes)


def indexer_topk_paged(draw: Draw) -> Args:
    return {**_paged(draw), "topk": draw.size(4096), "return_slots": draw.chance(0.5)}


#: Calls that replace the plain call of an operator.
CALLS = {"indexer_logits_paged": indexer_logits_paged_call}
