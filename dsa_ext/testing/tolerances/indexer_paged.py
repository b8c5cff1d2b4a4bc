"""Error bounds of the indexer's scores of keys in a paged cache: those of indexer_logits for the gathered keys."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsa_ext import reference
from dsa_ext.testing.tolerances import indexer
from dsa_ext.testing.tolerances.limits import TINY, Expected


def indexer_logits_paged(args: dict[str, Any]) -> list[Expected]:
    q, k_cache, table = (args[name] for name in ("q", "k_cache", "block_table"))
    batch, queries, _, dim = q.shape
    blocks, page = k_cache.shape[:2]
    held = table.shape[1] * page
    columns = held if args["max_len"] is None else args["max_len"]
    keys, scales = reference.cached_keys(k_cache, dim)
    keys = torch.cat([keys.view(torch.uint8), keys.new_zeros(1, page, dim).view(torch.uint8)]).view(keys.dtype)
    scales = None if scales is None else torch.cat([scales, scales.new_ones(1, page)])
    lengths = reference.query_lengths(args["context_lens"], queries, min(held, columns)).int()
    t = torch.arange(columns, device=q.device)
    judged = []
    for b in range(batch):
        exists = (table[b] >= 0) & (table[b] < blocks)
        places = table[b].where(exists, blocks).long()
        one = {"q": q[b], "k": keys[places].flatten(0, 1), "weights": args["weights"][b * queries : (b + 1) * queries]}
        one |= {"starts": torch.zeros_like(lengths[b]), "ends": lengths[b]}
        one |= {"k_scale": None if scales is None else scales[places].flatten(), "clean": True, "deterministic": False}
        (found,) = indexer.indexer_logits(one)
        read = pad(exists.repeat_interleave(page), (0, max(0, columns - held)))[:columns]
        hidden = ~(read & (t < lengths[b][:, None]))
        unspecified = torch.zeros_like(hidden) if args["clean"] else t >= lengths[b][:, None]
        judged.append([x.expand(queries, columns) for x in _of_columns(found, columns, hidden, unspecified)])
    if not judged:
        empty = q.new_zeros(0, columns, dtype=torch.float64)
        return [Expected("logits", empty, empty, empty, None)]
    value, bound, noise, free, loose = (torch.cat(parts) for parts in zip(*judged, strict=True))
    return [Expected("logits", value, bound, noise, found.similarity, free, loose)]


def _of_columns(found: Expected, columns: int, hidden: Tensor, unspecified: Tensor) -> tuple[Tensor, ...]:
    """The expected logits, their bounds, their noise, and where they are free and loose; -inf where `hidden`."""

    def cut(x: Tensor) -> Tensor:
        return pad(x, (0, max(0, columns - x.shape[-1])))[..., :columns]

    free = hidden.new_zeros(hidden.shape) if found.free is None else cut(found.free)
    loose = hidden.new_zeros(hidden.shape) if found.loose is None else cut(found.loose)
    return (
        cut(found.value).masked_fill(hidden, -torch.inf),
        cut(found.bound).masked_fill(hidden, TINY),
        cut(found.noise).masked_fill(hidden, TINY),
        free & ~hidden | unspecified,
        loose & ~hidden,
    )
