"""Calls with NaN and Inf in elements that are not read."""

import math
from collections.abc import Callable, Iterator

import torch
from magnitudes_case import POISONS, Case, filled
from torch import Tensor

from dsa_ext.testing.calls import FP8, Args
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN
from dsa_ext.testing.paged_inputs import PagedInputs, poisoned


def spoiled_rows(x: Tensor, rows: Tensor | slice, value: float, dim: int = 0) -> Tensor:
    return filled(x, (*(slice(None),) * dim, rows), value)


def hidden_sparse_mla(args: Args) -> Iterator[Case]:
    kv, indices = args["kv"], args["indices"]
    s_kv, topk = kv.shape[1], indices.shape[3]
    upper = s_kv // 2
    low = indices % upper  # no query lists the upper half
    mixed = low.clone()
    mixed[..., ::3] = torch.tensor([-1, s_kv, INT32_MIN, INT32_MAX], dtype=torch.int32).repeat(topk)[
        : len(range(0, topk, 3))
    ]
    lengths = torch.full(indices.shape[:2], topk // 2, dtype=torch.int32)
    after = low.clone()
    after[..., topk // 2 :] = upper + low[..., topk // 2 :]
    later = torch.arange(topk, dtype=torch.int32).expand_as(indices) % s_kv
    position = upper - indices.shape[1]
    kinds = {
        "a key that no query lists": {"indices": low},
        "a key that no query lists, with padding": {"indices": mixed},
        "a key after topk_length": {"indices": after, "topk_length": lengths},
    }
    if position >= 0:
        kinds["a key after the last query"] = {"indices": later, "causal": True, "q_start": position}
    for value in POISONS:
        for kind, options in kinds.items():
            clean = {**args, **options}
            yield Case(f"{value} in {kind}", clean, {**clean, "kv": spoiled_rows(kv, slice(upper, None), value, 1)})
    seen = {**args, "indices": low, "kv": spoiled_rows(kv, int(low[0, 0, 0, 0]), math.nan, 1)}
    yield Case("NaN in a key that is listed", seen, spreads=True)


def hidden_block_sparse(args: Args) -> Iterator[Case]:
    q, k, index, number, size = (args[name] for name in ("q", "k", "q2k_index", "q2k_num", "kv_block_size"))
    blocks = len(size)
    size = size.clamp(3, 50)  # every block has valid keys and padding
    number, listed = number.clone(), index.where(index < blocks - 1, -1)
    number[:, :, 0] = 0  # queries without a visible key
    clean = {**args, "q2k_index": listed, "q2k_num": number, "kv_block_size": size}
    valid = (torch.arange(64) < size[:, None]).flatten()[: k.shape[2]]
    valid[64 * (blocks - 1) :] = False  # a block that no query lists
    for value in POISONS:
        for names in (("k",), ("v",), ("k", "v")):
            spoiled = {name: spoiled_rows(args[name], ~valid, value, 2) for name in names}
            yield Case(
                f"{value} in {' and '.join(names)} that are not valid or not listed", clean, {**clean, **spoiled}
            )
        if "dout" in args:
            rows = slice(0, min(64, q.shape[2]))
            for name in ("q", "dout", "dlse"):
                spoiled = {name: spoiled_rows(args[name], rows, value, 2)}
                yield Case(f"{value} in {name} of queries that see nothing", clean, {**clean, **spoiled})
    index = torch.zeros_like(index)
    seen = {**clean, "q2k_index": index, "q2k_num": torch.ones_like(number), "k": spoiled_rows(k, 0, math.nan, 2)}
    yield Case("NaN in a key that is listed", seen, spreads=True)


def packed(args: Args) -> tuple[Args, Tensor, Tensor]:
    """Bounds of two packed sequences with unused keys between them, and of rows without a key; the visible keys."""
    seq, s_kv = len(args["q"]), len(args["k"])
    third = s_kv // 3
    row = torch.arange(seq)
    # Adjacent queries, which a kernel may process together, see the first sequence, the second one, or nothing.
    first, nothing = row // 3 % 2 == 0, row % 4 == 1
    starts = torch.where(first, 0, 2 * third).masked_fill(nothing, third).int()
    ends = torch.where(first, third, s_kv).masked_fill(nothing, third).int()
    keys = torch.arange(s_kv)
    return {**args, "starts": starts, "ends": ends}, (keys < third) | (keys >= 2 * third), ~nothing


def hidden_indexer(args: Args) -> Iterator[Case]:
    clean, seen_keys, seen_queries = packed(args)
    t = torch.arange(len(seen_keys))
    inside = (t >= clean["starts"][:, None]) & (t < clean["ends"][:, None])
    for value in POISONS:
        for name, unseen in (
            ("k", ~seen_keys),
            ("k_scale", ~seen_keys),
            ("q", ~seen_queries),
            ("weights", ~seen_queries),
        ):
            if name in args and (args[name].dtype != FP8 or math.isnan(value)):
                spoiled = {name: spoiled_rows(args[name], unseen, value)}
                yield Case(f"{value} in {name} outside of all bounds", clean, {**clean, **spoiled})
        if "dlogits" in args:
            spoiled = {"dlogits": args["dlogits"].masked_fill(~inside, value)}
            yield Case(f"{value} in dlogits outside of the bounds", clean, {**clean, **spoiled})
    if "topk" not in args:
        yield Case("NaN in a key that is seen", {**clean, "k": spoiled_rows(clean["k"], 1, math.nan)}, spreads=True)


def hidden_paged(args: Args) -> Iterator[Case]:
    names = ("q", "k_cache", "weights", "context_lens", "block_table")
    inputs = PagedInputs(**{name: args[name] for name in names})
    yield Case("NaN in keys that no query sees", args, {**args, "k_cache": poisoned(inputs).k_cache})
    if "topk" not in args and inputs.k_cache.is_floating_point():
        seen = spoiled_rows(inputs.k_cache, int(inputs.block_table[0, 0]), math.nan)
        yield Case("NaN in a block that is seen", {**args, "k_cache": seen}, spreads=True)


def hidden_lists(args: Args) -> Iterator[Case]:
    k, indices = args["k"], args["indices"].clone()
    half = len(k) // 2
    indices = torch.where(indices >= 0, indices % half, indices)
    indices[::4] = -1
    clean = {**args, "indices": indices}
    for value in POISONS:
        kinds = {"k": slice(half, None), "q": slice(0, None, 4), "weights": slice(0, None, 4)}
        for name, rows in kinds.items():
            spoiled = {name: spoiled_rows(args[name], rows, value)}
            yield Case(f"{value} in {name} that is in no list", clean, {**clean, **spoiled})
        if "dscores" in args:
            spoiled = {"dscores": args["dscores"].masked_fill(indices < 0, value)}
            yield Case(f"{value} in dscores of no key", clean, {**clean, **spoiled})
    seen = int(indices.max())
    yield Case("NaN in a key that is listed", {**clean, "k": spoiled_rows(k, seen, math.nan)}, spreads=True)


def hidden_loss(args: Args) -> Iterator[Case]:
    valid = torch.arange(args["scores"].shape[1]) % 3 != 1
    clean = {**args, "valid": valid.expand_as(args["scores"]).contiguous()}
    for value in POISONS:
        for name in ("scores", "p"):
            yield Case(
                f"{value} in {name} of slots that do not count", clean, {**clean, name: args[name].where(valid, value)}
            )
    yield Case(
        "NaN in a score that counts", {**clean, "scores": filled(args["scores"], (1, 0), math.nan)}, spreads=True
    )


def hidden_dense_loss(args: Args) -> Iterator[Case]:
    clean = {**args, "q_start": 0}
    for value in POISONS:
        for name in ("k", "main_kv"):
            spoiled = {name: spoiled_rows(args[name], slice(len(args["q"]), None), value)}
            yield Case(f"{value} in {name} after the last query", clean, {**clean, **spoiled})
    yield Case("NaN in a key that is seen", {**clean, "k": spoiled_rows(args["k"], 1, math.nan)}, spreads=True)


def hidden_columns(args: Args) -> Iterator[Case]:
    columns = args["logits"].shape[1]
    t = torch.arange(columns)
    starts, ends = torch.full_like(args["starts"], 5), torch.full_like(args["ends"], columns - 7)
    clean = {**args, "starts": starts, "ends": ends}
    for value in POISONS:
        spoiled = args["logits"].masked_fill((t < 5) | (t >= columns - 7), value)
        yield Case(f"{value} outside of the bounds", clean, {**clean, "logits": spoiled})


HIDDEN: dict[str, Callable[[Args], Iterator[Case]]] = {
    "sparse_mla_fwd": hidden_sparse_mla,
    "sparse_mla_bwd": hidden_sparse_mla,
    "attn_dist": hidden_sparse_mla,
    "block_sparse_attn_fwd": hidden_block_sparse,
    "block_sparse_attn_bwd": hidden_block_sparse,
    "indexer_logits": hidden_indexer,
    "indexer_logits_bwd": hidden_indexer,
    "indexer_topk": hidden_indexer,
    "indexer_logits_paged": hidden_paged,
    "indexer_topk_paged": hidden_paged,
    "indexer_scores": hidden_lists,
    "indexer_scores_bwd": hidden_lists,
    "indexer_loss": hidden_loss,
    "indexer_dense_loss": hidden_dense_loss,
    "topk_select": hidden_columns,
}
