"""The attention of absorbed_attention in plain formulas, which torch.compile and the transforms of torch.func take
apart: they decide themselves what to keep for the backward."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from dsa_ext import functional
from dsa_ext.nn.absorption import Queries, Rope, absorbed_queries
from dsa_ext.nn.expanded import Expanded
from dsa_ext.nn.heads import multiply_heads
from dsa_ext.nn.rotary import rotated


def plain_attention(
    heads: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    kv: Tensor,
    ids: Tensor,
    rope: Rope,
    starts: Tensor | None,
    ends: Tensor | None,
    expanded: Expanded,
    distribution: bool,
    slots: dict[str, Any],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values of the heads [B, S, H, v]; without expanded queries lse [B, S, H]; and with `distribution` the weights of
    the listed keys [B, S, K], summed over heads. Arguments as of absorbed_attention; sparse_mha must take the columns
    of expanded queries."""
    seq, sm_scale = heads.shape[1], slots["sm_scale"]
    values, ps, lse = [], [], None
    for rows, keys in expanded.places():
        listed = ids[:, rows, 0] - keys.start
        inputs = (
            *_expanded_inputs(heads[:, rows], key_weight, value_weight, kv[:, keys, 0], _of_rows(rope, rows)),
            listed,
        )
        q_start = rows.start - keys.start
        causal = expanded.causal and rows.stop == keys.stop
        options = {"sm_scale": sm_scale, "causal": causal, "q_start": q_start, "window": expanded.window}
        value, lse_of_rows = functional.sparse_mha(*inputs, **options, return_lse=True)
        values.append(value)
        if distribution:
            q, k, k_rope, _, _ = (t.detach() for t in inputs)
            ps.append(functional.sparse_mha_dist(q, k, k_rope, listed, lse_of_rows.detach(), **options))
    if expanded.rows < seq or seq == 0:
        others = slice(expanded.rows, seq)
        q, listed = absorbed_queries(heads[:, others], key_weight, _of_rows(rope, others)), ids[:, others]
        visible = Queries(slice(None), others).visible(starts, ends)
        latent, lse = functional.sparse_mla(
            q, kv, listed, d_v=value_weight.shape[2], return_lse=True, **visible, **slots
        )
        values.append(multiply_heads(latent, value_weight.mT))
        if distribution:
            p = functional.attn_dist(q.detach(), kv.detach(), listed, lse.detach(), sm_scale=sm_scale, **visible)
            ps.append(p[:, :, 0])
    of_all = None if lse is None or expanded.rows > 0 else lse.detach()
    return torch.cat(values, dim=1), of_all, torch.cat(ps, dim=1) if distribution else None


def _of_rows(rope: Rope, rows: slice) -> Rope:
    return Rope(rope.cos[:, rows], rope.sin[:, rows], rope.interleaved)


def _expanded_inputs(
    heads: Tensor, key_weight: Tensor, value_weight: Tensor, keys: Tensor, rope: Rope
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, k_rope and v of sparse_mha, from latent keys [B, T, latent + rope]."""
    n_heads, nope, latent = key_weight.shape
    plain, turning = heads.tensor_split([nope], dim=-1)
    q = torch.cat([plain, rotated(turning, *rope)], dim=-1)
    rows, k_rope = keys.tensor_split([latent], dim=-1)
    weights = torch.cat([key_weight, value_weight], dim=1).flatten(0, 1)
    k, v = linear(rows, weights).unflatten(-1, (n_heads, -1)).tensor_split([nope], dim=-1)
    return q, k, k_rope, v
