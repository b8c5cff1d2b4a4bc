"""The lightning indexer: projections around indexer_logits, indexer_topk and indexer_scores."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from dsa_ext import functional
from dsa_ext.functional._loss import loss_rows, reduced_loss
from dsa_ext.nn.paged_cache import PagedKVCache, PrefillStep
from dsa_ext.nn.projections import plain_weight
from dsa_ext.nn.rotary import PlacedRows, RopeLayout, Yarn, apply_rope, check_layout, check_yarn, placed
from dsa_ext.ops._checks import check_sizes, describe
from dsa_ext.ops._library import as_autocast, check_input, is_transformed


class IndexerTensors(NamedTuple):
    """The indexer's queries, keys and head weights for B sequences of S tokens.

    Attributes:
        q: queries [B, S, Hi, Di], in the dtype of the layer.
        k: keys [B, S, Di], in the dtype of the layer.
        weights: weight of each head [B, S, Hi], fp32 (float64 for float64), with the factor (Di * Hi)**-0.5.
    """

    q: Tensor
    k: Tensor
    weights: Tensor


class LightningIndexer(nn.Module):
    """Selects the keys of each query with small heads, as in DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).

    q is a projection of the layer's query latent, k and the head weights are projections of its input. RoPE is applied
    to the first `rope_dim` columns of q and k. The factor Di**-0.5 * Hi**-0.5 is part of the
    weights.

    Parameters: `wq_b.weight` [Hi * Di, q_lora_rank], `wk.weight` [Di, hidden_size], `k_norm.weight`, `k_norm.bias`
    [Di], `weights_proj.weight` [Hi, hidden_size].

    Args:
        hidden_size: columns of the layer's input.
        q_lora_rank: columns of the layer's query latent.
        heads: number of heads Hi: 8, 16, 32 or 64.
        head_dim: columns per head Di: 64 or 128.
        rope_dim: number of columns with RoPE, even.
        rope_theta: base of RoPE's frequencies.
        rope: which columns RoPE rotates together: "half" or "interleaved", see apply_rope.
        yarn: slows RoPE's frequencies for longer sequences.
        hadamard: multiply q and k by the orthogonal Hadamard matrix, which leaves q.k unchanged and spreads outliers
            before quantization to fp8.
        precision: precision of the scores that select keys: "fp8" quantizes q and k with quantize_indexer. Scores for
            training are never quantized.
    """

    def __init__(
        self,
        hidden_size: int,
        q_lora_rank: int,
        *,
        heads: int = 64,
        head_dim: int = 128,
        rope_dim: int = 64,
        rope_theta: float = 10_000.0,
        rope: RopeLayout = "half",
        yarn: Yarn | None = None,
        hadamard: bool = False,
        precision: Literal["fp8", "bf16"] = "fp8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if precision not in ("fp8", "bf16"):
            raise ValueError(f"LightningIndexer: precision must be 'fp8' or 'bf16', got {precision!r}")
        check_sizes("LightningIndexer", hidden_size=hidden_size, q_lora_rank=q_lora_rank)
        check_sizes("LightningIndexer", heads=heads, head_dim=head_dim)
        if hadamard and head_dim & (head_dim - 1):
            raise ValueError(f"LightningIndexer: head_dim must be a power of 2 with hadamard, got {head_dim}")
        if not isinstance(rope_dim, int) or rope_dim not in range(0, head_dim + 1, 2):
            expected = f"rope_dim must be an even int from 0 to head_dim={head_dim}"
            raise ValueError(f"LightningIndexer: {expected}, got {rope_dim!r}")
        check_layout("LightningIndexer", "rope", rope)
        check_yarn("LightningIndexer", yarn, rope_theta)
        self.heads, self.head_dim, self.rope_dim, self.hadamard = heads, head_dim, rope_dim, hadamard
        self.rope_theta, self.rope, self.yarn, self.precision = rope_theta, rope, yarn, precision
        self.wq_b = nn.Linear(q_lora_rank, heads * head_dim, bias=False, device=device, dtype=dtype)
        self.wk = nn.Linear(hidden_size, head_dim, bias=False, device=device, dtype=dtype)
        self.k_norm = nn.LayerNorm(head_dim, device=device, dtype=dtype)
        self.weights_proj = nn.Linear(hidden_size, heads, bias=False, device=device, dtype=dtype)
        self.check_topk(1)

    def check_topk(self, topk: int) -> None:
        """Raises the error of a selection of `topk` keys, or of these heads, if the operators do not take them."""
        q = torch.empty(0, self.heads, self.head_dim, device="meta", dtype=torch.bfloat16)
        weights = q.new_empty(0, self.heads, dtype=torch.float32)
        bounds = q.new_empty(0, dtype=torch.int32)
        functional.indexer_topk(q, q.new_empty(0, self.head_dim), weights, bounds, bounds, topk)

    def forward(self, x: Tensor, q_latent: Tensor, positions: Tensor | PlacedRows | None = None) -> IndexerTensors:
        """`x` [B, S, hidden_size], `q_latent` [B, S, q_lora_rank], and `positions` for RoPE: [S], [B, S] or PlacedRows;
        0 to S - 1 by default."""
        check_input("LightningIndexer", x, plain_weight(self.wk))
        check_input("LightningIndexer", q_latent, plain_weight(self.wq_b), name="q_latent")
        if q_latent.shape[:-1] != x.shape[:-1]:
            expected = ", ".join(str(size) for size in x.shape[:-1])
            raise ValueError(f"LightningIndexer: q_latent must be [{expected}, ...] like x, got {describe(q_latent)}")
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        positions = placed(positions)
        q = self._placed(self.wq_b(q_latent).unflatten(-1, (self.heads, self.head_dim)), positions)
        k = self.wk(x)
        k = self._placed(self.k_norm(k).to(k.dtype), positions)  # autocast computes norms in fp32
        weights = self.weights_proj(x)
        weights = weights if weights.dtype == torch.float64 else weights.float()
        return IndexerTensors(q, k, weights * (self.head_dim * self.heads) ** -0.5)

    def _placed(self, x: Tensor, positions: Tensor | PlacedRows) -> Tensor:
        options: Any = {"columns": self.rope_dim, "layout": self.rope, "yarn": self.yarn}
        x = apply_rope(x, positions, self.rope_theta, **options)
        return functional.hadamard_transform(x) if self.hadamard else x

    def select(self, tensors: IndexerTensors, topk: int, bounds: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Ids of the `topk` keys with the highest scores [B, S, topk], int32: ascending, then -1. `bounds` are the
        first key and the one after the last that a query sees, int32 [B, S]: by default the keys up to its own
        position."""
        if bounds is None:
            starts, ends = causal_bounds(tensors.k)
            return _select_within(tensors, starts, ends, ends - 1, topk, self.precision)
        return select_keys(tensors, *bounds, topk, self.precision)

    @torch.no_grad()
    def select_cached(self, tensors: IndexerTensors, cache: PagedKVCache, layer: int, topk: int) -> Tensor:
        """Writes the keys of the cache's current step, and selects for each of its queries among all keys that its
        sequence has in the cache: int32 [B, S, topk], ascending in the order of the sequence, then -1.

        They are cache slots in a step of decoding, and numbers of keys as in PagedKVCache.gather in one of prefill. A
        query of which all scores are NaN gets its own key, as in select.
        """
        step = cache.step
        (q, k, weights), k_scale = as_selected(tensors, self.precision)
        cache.write_index(layer, k, k_scale)
        if isinstance(step, PrefillStep):
            k, k_scale = cache.gather_index(layer)
            bounds = step.starts[0], step.ends[0]
            keys, _ = functional.indexer_topk(q[0], k, weights[0], *bounds, topk, k_scale=k_scale)
            return _with_last_key(keys[None], step.ends - 1)
        pages, heads = cache.index_keys(layer), weights.flatten(0, 1)
        slots, _ = functional.indexer_topk_paged(
            q, pages, heads, step.context_lens, step.block_table, topk, return_slots=True
        )
        return _with_last_key(slots.view(*q.shape[:2], topk), step.slots)

    def scores(self, tensors: IndexerTensors, ids: Tensor) -> Tensor:
        """Scores of the listed keys [B, S, K], -inf where an id is not one of the S keys. Differentiable."""
        check_ids("LightningIndexer", ids, tensors.q)
        return scores_of_keys(tensors, ids)

    def logits(self, tensors: IndexerTensors) -> Tensor:
        """Scores of all keys up to each query's own position [B, S, S], -inf for later ones. Differentiable."""
        starts, ends = causal_bounds(tensors.k)
        rows = sequences(*tensors, starts, ends)
        logits = [functional.indexer_logits(*row) for row in rows]
        return torch.stack(logits).view(*tensors.k.shape[:2], tensors.k.shape[1])


def check_ids(module: str, ids: Any, x: Tensor) -> None:
    """Raises an error unless ids are lists of keys for the rows of x [B, S, ...]."""
    is_list = isinstance(ids, Tensor) and ids.dtype == torch.int32 and ids.dim() == 3
    if not is_list or ids.shape[:2] != x.shape[:2] or ids.shape[2] < 1:
        raise ValueError(f"{module}: ids must be int32 [B={x.shape[0]}, S={x.shape[1]}, K], got {describe(ids)}")


def sequences(*tensors: Tensor) -> list[tuple[Any, ...]]:
    """The tensors of each sequence of a batch. An empty batch gives those of one sequence without tokens: results that
    are computed from them have the usual dtype and graph."""
    return list(zip(*tensors, strict=True)) or [tuple(t.flatten(0, 1) for t in tensors)]


def as_selected(tensors: IndexerTensors, precision: Literal["fp8", "bf16"]) -> tuple[IndexerTensors, Tensor | None]:
    """The tensors as the selection takes them, and the scales of keys in fp8 [B, S]."""
    if precision != "fp8":
        return tensors, None
    q, q_scale, k, k_scale = functional.quantize_indexer(tensors.q, tensors.k)
    return IndexerTensors(q, k, tensors.weights.float() * q_scale), k_scale


@torch.no_grad()
def select_keys(
    tensors: IndexerTensors, starts: Tensor, ends: Tensor, topk: int, precision: Literal["fp8", "bf16"]
) -> Tensor:
    """Ids of the `topk` keys with the highest scores among those within the bounds, which are int32 [B, S], of each
    sequence: [B, S, topk], int32, ascending, then -1. The number of keys T may differ from that of queries.

    A query of which all scores are NaN gets the last of its keys, so that the NaN reaches its results and its loss.
    """
    # A bound outside of the sequence would be a key of another.
    starts, ends = (bound.clamp(0, tensors.k.shape[1]) for bound in (starts, ends))
    return _select_within(tensors, starts, ends, torch.where(starts < ends, ends - 1, -1), topk, precision)


@torch.no_grad()
def _select_within(
    tensors: IndexerTensors,
    starts: Tensor,
    ends: Tensor,
    last: Tensor,
    topk: int,
    precision: Literal["fp8", "bf16"],
) -> Tensor:
    """select_keys with bounds within the sequence, and the last key of each query, -1 if it has none."""
    batch = tensors.k.shape[0]
    selected, scales = as_selected(tensors, precision)
    q, k, weights = (t.flatten(0, 1) for t in selected)
    k_scale = None if scales is None else scales.flatten()
    if batch > 1:
        first = _first_keys(tensors)
        starts, ends = starts + first, ends + first
    ids, _ = functional.indexer_topk(q, k, weights, starts.flatten(), ends.flatten(), topk, k_scale=k_scale)
    ids = ids.view(*tensors.q.shape[:2], topk)
    if batch > 1:
        ids = torch.where(ids >= 0, ids - first[..., None], -1)
    return _with_last_key(ids, last)


def _with_last_key(ids: Tensor, last: Tensor) -> Tensor:
    """The selected ids [B, S, K], where those of a query that has selected none begin with its last key: `last` [B, S],
    int32, -1 if it has no keys."""
    first = torch.where(ids[..., 0] < 0, last, ids[..., 0])
    if is_compiling() or is_transformed() or torch._C._is_tracing():
        return torch.cat([first[..., None], ids[..., 1:]], dim=-1)
    # In place, which spares a copy of all ids. Not a change of the version: selective checkpointing may keep what the
    # operator has returned, and gives it again, with this change.
    ids.data[..., 0] = first
    return ids


def scores_of_keys(tensors: IndexerTensors, ids: Tensor, deterministic: bool = False) -> Tensor:
    """Scores of the listed keys [B, S, K], -inf where an id is not one of the sequence's T keys. Differentiable."""
    return functional.indexer_scores(*_packed(tensors, ids), deterministic=deterministic).view(ids.shape)


def loss_of_keys(
    tensors: IndexerTensors,
    ids: Tensor,
    p: Tensor,
    *,
    valid: Tensor | None = None,
    row_weights: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    deterministic: bool = False,
) -> Tensor:
    """functional.indexer_loss of the scores of the listed keys, whose attention weights are `p` [B, S, K]."""
    if is_compiling() or is_transformed():
        scores = scores_of_keys(tensors, ids, deterministic)
        return functional.indexer_loss(scores, p, valid=valid, row_weights=row_weights, reduction=reduction)
    tensors = IndexerTensors(as_autocast(tensors.q), as_autocast(tensors.k), tensors.weights)
    _, *rows = loss_rows(ids, p, valid, row_weights)
    losses = _LossOfKeys.apply(*_packed(tensors, ids), *rows, deterministic)  # type: ignore[no-untyped-call]
    return reduced_loss(losses, row_weights, reduction)


class _LossOfKeys(torch.autograd.Function):
    """The loss of each row. All gradients are linear in that of the scores, and those of q and k in the weights: so the
    factor from autograd is applied to the weights, which spares a pass over the gradient of the scores. Their product
    must be in the range of fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        ids: Tensor,
        p: Tensor,
        valid: Tensor | None,
        row_weights: Tensor | None,
        deterministic: bool,
    ) -> Tensor:
        scores = functional.indexer_scores(q, k, weights, ids)
        losses: Tensor
        losses, dscores = torch.ops.dsa.indexer_loss(scores, p, valid, row_weights)
        ctx.save_for_backward(dscores, q, k, weights, ids)
        ctx.deterministic = deterministic
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        dscores, q, k, weights, ids = ctx.saved_tensors
        factor = dlosses[:, None]
        dq, dk, dweights = torch.ops.dsa.indexer_scores_bwd(dscores, q, k, weights * factor, ids, ctx.deterministic)
        return dq, dk, dweights * factor, *(None,) * 5


def _packed(tensors: IndexerTensors, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors and the ids of the listed keys with the sequences of a batch as one."""
    q, k, weights = (t.flatten(0, 1) for t in tensors)
    if tensors.k.shape[0] > 1:
        # An id of T or more would be a key of the next sequence.
        ids = torch.where((ids >= 0) & (ids < tensors.k.shape[1]), ids + _first_keys(tensors)[..., None], -1)
    return q, k, weights, ids.flatten(0, 1)


def _first_keys(tensors: IndexerTensors) -> Tensor:
    """The row of the first key of each sequence when keys are packed, int32 [B, 1]."""
    batch, seq_kv = tensors.k.shape[:2]
    return torch.arange(batch, device=tensors.k.device, dtype=torch.int32)[:, None] * seq_kv


def causal_bounds(k: Tensor) -> tuple[Tensor, Tensor]:
    """starts and ends, int32 [B, S], with which a query sees the keys up to its own position."""
    ends = torch.arange(1, k.shape[1] + 1, device=k.device, dtype=torch.int32).expand(k.shape[:2])
    return torch.zeros_like(ends), ends
