"""The indexer: logits, selection, scores of listed keys, losses."""

import itertools

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.calls import ORDINARY
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN, make_indexer_inputs, nasty_rows, strided_copy, strided_rows
from dsa_ext.testing.paged_inputs import make_paged_inputs
from dsa_ext.testing.tolerances import check_selected
from sanitized.calls import BF16, FP8, Args, call, checked, random

# (R, C, K), in fp32 and bf16 in turn: one column, all selected, rows that one, three, two and one CTAs hold, a row that
# eight filter.
TOPK_SELECT = (
    (3, 1, 5),
    (3, 300, 4096),
    (2, 13001, 2048),
    (2, 17004, 100),
    (2, 20001, 2048),
    (2, 5000, 100),
    (1, 70001, 2048),
)
# Each in fp32 and bf16: rows that one CTA filters, with room for few and for many candidates; a row that eight filter;
# more rows than SMs, held.
TOPK_SELECT_MANY = ((140, 8209, 100), (140, 8209, 4096), (1, 70001, 2048), (140, 5000, 100))
# (S, S_kv, K): one of each, all selected, several blocks of queries, many keys. Every kernel variant runs one of them.
INDEXER = ((1, 1, 1), (5, 200, 300), (130, 300, 64), (3, 9000, 500))
# (N, keys, page): one key, several pages, pages of several tiles. Every kernel variant runs one of them.
INDEXER_PAGED = ((1, 1, 64), (2, 700, 64), (6, 300, 4), (3, 1000, 192))
# (S, S_kv, K): one slot, several tiles, several queries per CTA. Every kernel variant runs one of them.
INDEXER_TRAINING = ((1, 1, 1), (5, 200, 300), (150, 300, 129))


def topk_select() -> None:
    for i, (rows, columns, topk) in enumerate(TOPK_SELECT):
        nasty = nasty_rows(columns)
        starts = torch.tensor([3, 0, INT32_MIN], dtype=torch.int32)[:rows]
        ends = torch.tensor([columns, columns - 5, INT32_MAX], dtype=torch.int32)[:rows]
        for names in (("normal", "plateau of zeros", "NaN"), ("ascending", "one fp16 bucket", "infinities")):
            logits = torch.stack([nasty[name] for name in names[:rows]]).to((torch.float32, BF16)[i % 2])
            for layout in (strided_rows, unaligned_rows):
                checked("topk_select", logits=layout(logits), starts=starts, ends=ends, topk=topk)
    for dtype in (torch.float32, BF16):
        ends = torch.full((9,), 5, dtype=torch.int32)
        checked("topk_select", logits=random(9, 5).to(dtype), starts=torch.zeros_like(ends), ends=ends, topk=3)
        for rows, columns, topk in TOPK_SELECT_MANY:
            ends = torch.full((rows,), columns, dtype=torch.int32)
            logits = unaligned_rows(random(rows, columns).to(dtype))
            checked("topk_select", logits=logits, starts=ends % 7, ends=ends, topk=topk)


def unaligned_rows(rows: Tensor) -> Tensor:
    """The same rows as a view of wider rows that starts at column 1."""
    return torch.cat([rows[:, :1], rows], 1)[:, 1:]


def indexer_args(shape: tuple[int, int, int], heads: int, dim: int, dtype: torch.dtype) -> Args:
    inputs = make_indexer_inputs(*shape[:2], heads, dim, dtype=dtype)
    inputs.ks[-1] = 5
    args = {"q": strided_copy(inputs.q), "k": strided_rows(inputs.k), "weights": strided_rows(inputs.weights)}
    args |= {"starts": inputs.ks, "ends": inputs.ke}
    return args if inputs.k_scale is None else {**args, "k_scale": inputs.k_scale}


def indexer() -> None:
    for i, (dtype, heads, dim) in enumerate(itertools.product((FP8, BF16), (8, 16, 32, 64), (64, 128))):
        shape = INDEXER[(i + i // 4) % len(INDEXER)]
        args = indexer_args(shape, heads, dim, dtype)
        (logits,) = checked("indexer_logits", **args)
        call("indexer_logits", {**args, "clean": False})
        bounds = (args["starts"], args["ends"])
        check_selected(
            call("indexer_topk", {**args, "topk": shape[2]}), reference.topk_select(logits, *bounds, shape[2])
        )


def indexer_paged() -> None:
    for i, (dtype, heads, dim) in enumerate(itertools.product((FP8, BF16), (8, 16, 32, 64), (64, 128))):
        queries, keys, page = INDEXER_PAGED[(i + i // 4) % len(INDEXER_PAGED)]
        inputs = make_paged_inputs(3, queries, keys, heads, dim, page, dtype=dtype, spare=0)
        inputs.context_lens[1:] = torch.tensor([keys // 2, 0])
        inputs.block_table[0, -1] = INT32_MAX
        checked("indexer_logits_paged", **vars(inputs), max_len=keys + 3)
        call("indexer_logits_paged", {**vars(inputs), "clean": False})
        checked("indexer_topk_paged", **vars(inputs), topk=70, return_slots=bool(i % 2))


def indexer_training() -> None:
    for i, (heads, dim) in enumerate(itertools.product((8, 16, 32, 64), (64, 128))):
        shape = seq, s_kv, topk = INDEXER_TRAINING[i % len(INDEXER_TRAINING)]
        args = indexer_args(shape, heads, dim, BF16)
        row_args = {name: args[name] for name in ("q", "k", "weights")}
        indices = torch.arange(seq * topk, dtype=torch.int32).view(seq, topk) * 7 % (s_kv + 1) - 1
        listed = {**row_args, "indices": strided_rows(indices, -1)}
        checked("indexer_scores", **listed)
        dscores = random(seq, topk).masked_fill(indices < 0, torch.nan)
        for deterministic in (False, True):
            checked("indexer_scores_bwd", dscores=dscores, **listed, deterministic=deterministic)
            checked("indexer_logits_bwd", dlogits=random(seq, s_kv), **args, deterministic=deterministic)


def indexer_packed() -> None:
    """Two sequences with a gap between their keys that no query sees."""
    args = ORDINARY["indexer_logits_bwd"](seq=40, s_kv=300)
    second = torch.arange(40) >= 20
    args["k"][100:200] = torch.nan
    args["starts"] = torch.where(second, 200, 0).int()
    args["ends"] = torch.where(second, 300, 100).int()
    for deterministic in (False, True):
        checked("indexer_logits_bwd", **args, deterministic=deterministic)
    del args["dlogits"]
    checked("indexer_logits", **args)


def indexer_loss() -> None:
    for slots in (1, 50, 3000):
        args = ORDINARY["indexer_loss"](slots=slots)
        checked("indexer_loss", **args)
        checked("indexer_loss", **args, valid=random(*args["p"].shape) > 0)
    checked("indexer_dense_loss", **ORDINARY["indexer_dense_loss"]())
