"""The attention of absorbed_attention in plain formulas, which torch.compile and the transforms of torch.func take
apart: they decide themselves what to keep for the backward."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from dsa_ext import functional
from dsa_ext.nn.absorption import Rope, absorbed_queries
from dsa_ext.nn.expanded import Expanded, divided
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
    for rows, keys, causal in expanded.places():
        options = {
            "sm_scale": sm_scale,
            "causal": causal,
            "q_start": rows.start - keys.start,
            "window": expanded.window,
        }
        of_sequences = []
        for sequences in divided(heads.shape[0], expanded.most_sequences):
            of_rows = heads[sequences, rows], key_weight, value_weight, kv[sequences, keys, 0]
            inputs = _expanded_inputs(*of_rows, _part(rope, sequences, rows))
            listed = ids[sequences, rows, 0] - keys.start
            of_sequences.append(_attend_in_expanded_form(inputs, listed, options, distribution))
        values.append(_joined([value for value, _ in of_sequences], 0))
        ps.append(_joined([p for _, p in of_sequences], 0))
    if expanded.rows < seq or seq == 0:
        others = slice(expanded.rows, seq)
        q, listed = absorbed_queries(heads[:, others], key_weight, _part(rope, slice(None), others)), ids[:, others]
        visible: dict[str, Any] = {"q_start": expanded.rows}
        if starts is not None and ends is not None:
            visible = {"starts": starts[:, others], "ends": ends[:, others]}
        latent, lse = functional.sparse_mla(
            q, kv, listed, d_v=value_weight.shape[2], return_lse=True, **visible, **slots
        )
        values.append(multiply_heads(latent, value_weight.mT))
        if distribution:
            p = functional.attn_dist(q.detach(), kv.detach(), listed, lse.detach(), sm_scale=sm_scale, **visible)
            ps.append(p[:, :, 0])
    of_all = None if lse is None or expanded.rows > 0 else lse.detach()
    return _joined(values, 1), of_all, _joined(ps, 1) if distribution else None


def _attend_in_expanded_form(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], listed: Tensor, options: dict[str, Any], distribution: bool
) -> tuple[Tensor, Tensor]:
    """Values, and the weights of the listed keys; without `distribution` any tensor instead."""
    values, lse = functional.sparse_mha(*inputs, listed, **options, return_lse=True)
    if not distribution:
        return values, lse
    q, k, k_rope = (t.detach() for t in inputs[:3])
    return values, functional.sparse_mha_dist(q, k, k_rope, listed, lse.detach(), **options)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _part(rope: Rope, sequences: slice, rows: slice) -> Rope:
    cos, sin = (t[sequences if t.shape[0] > 1 else slice(None), rows] for t in rope[:2])
    return Rope(cos, sin, rope.interleaved)


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
