"""The attention layers of transformers' models on the operators."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import pad
from transformers.cache_utils import Cache
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from dsa_ext.integrations.transformers.masks import NAME, bounds_of
from dsa_ext.nn.absorbed import absorbed_attention
from dsa_ext.nn.absorption import Rope
from dsa_ext.nn.expanded import NONE, expanded_queries
from dsa_ext.nn.indexer import IndexerTensors, loss_of_keys, select_keys
from dsa_ext.nn.projections import has_bias, plain_weight, weight_of
from dsa_ext.nn.rotary import rotated
from dsa_ext.ops._checks import describe, dtype_name
from dsa_ext.ops.indexer import DIMS, HEADS, MAX_TOPK
from dsa_ext.ops.sparse_mla import MAX_HEADS_PER_GROUP, VALUE_COLUMNS, WIDTHS

_ROPE = WIDTHS[0] - VALUE_COLUMNS
Precision = Literal["bf16", "fp8"]


@dataclass
class Options:
    """What the layers of a model share."""

    indexer: Precision = "bf16"
    train_indexer: bool = False
    deterministic: bool = False
    #: The indexer's loss in the last forward, by layer.
    losses: dict[int, Tensor] = field(default_factory=dict)
    #: Where selections are recorded, and which are used instead of the indexer's, by layer.
    recorded: dict[int, Tensor] | None = None
    first_recorded: dict[int, int] = field(default_factory=dict)  # the position at which a record begins
    replayed: Mapping[int, Tensor] = field(default_factory=dict)

    def indexer_loss(self) -> Tensor | None:
        """The mean over layers, or None if there is no loss."""
        losses = list(self.losses.values())  # on the devices of their layers
        return torch.stack([loss.to(losses[0].device) for loss in losses]).mean() if losses else None

    def __getstate__(self) -> dict[str, Any]:
        """For copies of the model: without what belongs to a forward pass."""
        return vars(self) | {"losses": {}, "recorded": None, "replayed": {}}


class LossWithIndexer:
    """The loss function of a model, and `coeff` times the loss of its indexers."""

    def __init__(self, plain: Callable[..., Tensor], options: Options, coeff: float) -> None:
        self.plain, self.options, self.coeff = plain, options, coeff

    def __call__(self, logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        loss = self.plain(logits, labels, **kwargs)
        added = self.options.indexer_loss()
        if added is None:
            if torch.is_grad_enabled():
                warnings.warn(_NO_LOSS, stacklevel=2)
            return loss
        items = kwargs.get("num_items_in_batch")
        if items is not None:  # one of several batches whose gradients are accumulated
            targets = kwargs.get("shift_labels")
            targets = labels[..., 1:] if targets is None else targets
            added = added * (targets != kwargs.get("ignore_index", -100)).sum().to(added.device) / items
        return loss + self.coeff * added.to(loss)


_NO_LOSS = (
    "dsa_ext: the indexers do not learn in this step, because their layers ran in transformers or without gradients; "
    "gradient checkpointing must not be reentrant"
)


def misfit(layer: Any) -> str | None:
    """Why a layer cannot run on the operators; None if it can."""
    c, dtype = layer.config, layer.kv_a_proj_with_mqa.weight.dtype
    requirements = {
        f"kv_lora_rank must be {VALUE_COLUMNS}, got {c.kv_lora_rank}": c.kv_lora_rank == VALUE_COLUMNS,
        f"qk_rope_head_dim must be {_ROPE}, got {c.qk_rope_head_dim}": c.qk_rope_head_dim == _ROPE,
        f"num_attention_heads must be at most {MAX_HEADS_PER_GROUP}, got {layer.num_heads}": layer.num_heads
        <= MAX_HEADS_PER_GROUP,
        f"attention_dropout must be 0, got {c.attention_dropout}": c.attention_dropout == 0,
        f"index_n_heads must be one of {HEADS}, got {c.index_n_heads}": c.index_n_heads in HEADS,
        f"index_head_dim must be one of {DIMS}, got {c.index_head_dim}": (c.index_head_dim in DIMS),
        f"index_topk must be from 1 to {MAX_TOPK}, got {c.index_topk}": 1 <= c.index_topk <= MAX_TOPK,
        "kv_b_proj must have no bias, got one": not has_bias(layer.kv_b_proj),
        f"config.is_causal must be True, got {getattr(c, 'is_causal', True)}": getattr(c, "is_causal", True),
        f"weights must be bfloat16 (on the CPU also float32), got {dtype_name(dtype)}": dtype != torch.float16,
    }
    reasons = [reason for reason, holds in requirements.items() if not holds]
    return "; ".join(reasons) or None


def _latent_weights(layer: Any, like: Tensor) -> list[Tensor]:
    """The weights of kv_b_proj for keys and for values, per head: [H, columns, 512]."""
    weight = weight_of(type(layer).__name__, layer.kv_b_proj, like)
    heads = weight.unflatten(0, (-1, layer.qk_nope_head_dim + layer.v_head_dim))
    return list(heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1))


def _shared_by_ranks(latent: Tensor, projection: Any) -> Tensor:
    """With tensor parallelism each rank has some of the heads: the gradient of the latent is the sum over ranks."""
    weight = projection.weight
    if not isinstance(weight, DTensor):
        return latent
    shared = DTensor.from_local(latent, weight.device_mesh, [Replicate()], run_check=False)
    return shared.to_local(grad_placements=[Partial()])


def _indexer_tensors(
    indexer: Any, x: Tensor, q_resid: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool, cache: Cache | None
) -> IndexerTensors:
    cos, sin = tables
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    q = rotated(q, cos[:, :, None].to(q.dtype), sin[:, :, None].to(q.dtype), interleaved)
    k = indexer.k_norm(indexer.wk(x)).to(q.dtype)
    k = rotated(k, cos.to(k.dtype), sin.to(k.dtype), interleaved)
    if cache is not None:
        k = cache.update_indexer(k, indexer.layer_idx)
    weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype))
    weights = weights if weights.dtype == torch.float64 else weights.float()
    return IndexerTensors(q, k, weights * (indexer.n_heads**-0.5 * indexer.softmax_scale))


def _attend(
    layer: Any,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    mask: Tensor | None,
    cache: Cache | None,
    ids: Tensor | None,
    interleaved_indexer: bool,
) -> tuple[Tensor, Tensor] | None:
    """Output [B, S, hidden_size] and the ids of the selected keys [B, S, K], which are selected if `ids` is None. None
    if the mask has no bounds; then nothing has changed."""
    options: Options = getattr(layer, "_dsa_options", _DEFAULT)
    is_first = is_compiling() or torch._C._current_graph_task_id() == -1  # not when a checkpoint computes it again
    if is_first:
        options.losses.pop(layer.layer_idx, None)
    bounds = bounds_of(mask, x)
    if bounds is None:
        return None
    past = 0 if cache is None or options.recorded is None else int(cache.get_seq_length(layer.layer_idx))
    cos, sin = (table[..., : _ROPE // 2] for table in tables)

    q_resid = layer.q_a_layernorm(layer.q_a_proj(x))
    heads = layer.q_b_proj(q_resid).unflatten(-1, (-1, layer.qk_head_dim))
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    key_weight, value_weight = _latent_weights(layer, heads)
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([VALUE_COLUMNS, _ROPE], dim=-1)
    latent = layer.kv_a_layernorm(latent).to(heads.dtype)
    latent = _shared_by_ranks(latent, layer.kv_b_proj)
    k_rope = rotated(k_rope, cos, sin, interleaved=True)
    if cache is not None:
        cached = cache.update(latent[:, None], k_rope[:, None], layer.layer_idx)
        latent, k_rope = (t.squeeze(1) for t in cached)
    kv = torch.cat([latent, k_rope], dim=-1)[:, :, None]

    trains = options.train_indexer and torch.is_grad_enabled() and ids is None
    tensors = replayed = None
    if ids is None:
        with torch.set_grad_enabled(trains):
            tensors = _indexer_tensors(
                layer.indexer, x.detach(), q_resid.detach(), (cos, sin), interleaved_indexer, cache
            )
        ids = replayed = options.replayed.get(layer.layer_idx)
        if ids is None:
            topk = min(layer.indexer.index_topk, kv.shape[1])
            ids = select_keys(tensors, bounds.starts, bounds.ends, topk, options.indexer)
        elif ids.dtype != torch.int32 or ids.shape[:-1] != x.shape[:-1]:
            expected = f"int32 [{x.shape[0]}, {x.shape[1]}, K]"
            raise ValueError(f"replay: ids of layer {layer.layer_idx} must be {expected}, got {describe(ids)}")
        if options.recorded is not None:
            _record(options, layer.layer_idx, ids, past)
    listed = ids[:, :, None]
    # The bounds also hold for ids that come from elsewhere, in the absorbed form.
    visible: dict[str, Any] = {} if mask is None else {"starts": bounds.starts, "ends": bounds.ends}
    # An indexer, here or in an earlier layer, selects each key once, and every key of the first queries. A replayed
    # selection may be any other, and should give the bits that it gave when it was recorded.
    expanded = NONE
    selects = mask is None or tensors is not None
    if selects and kv.shape[1] == x.shape[1] and options.recorded is None and not options.replayed:
        sizes = ids.shape[2], heads.shape[2], key_weight.shape[1], _ROPE, value_weight.shape[1]
        known: dict[str, Any] = {"bounded": mask is not None, "longest": bounds.longest, "causal": bounds.is_causal}
        expanded = expanded_queries(x.shape[1], *sizes, **known)
    rope = Rope(cos[:, :, None], sin[:, :, None], interleaved=True)
    out_weight = plain_weight(layer.o_proj)
    out, _, p, _ = absorbed_attention(
        heads, key_weight, value_weight, kv, listed, rope, sm_scale=layer.scaling,
        out_weight=out_weight, deterministic=options.deterministic, distribution=trains and tensors is not None,
        expanded=expanded, **visible,
    )  # fmt: skip
    out = layer.o_proj(out.flatten(2)) if out_weight is None else out
    if tensors is not None and p is not None:
        if isinstance(layer.kv_b_proj.weight, DTensor):  # heads are split over ranks
            torch.distributed.all_reduce(p, group=layer.kv_b_proj.weight.device_mesh.get_group())
        # Selected ids are within the bounds or -1; replayed ones may be any.
        inside = None if replayed is None else (ids >= bounds.starts[..., None]) & (ids < bounds.ends[..., None])
        counts: Any = {"valid": inside, "row_weights": bounds.counts.to(p.dtype)}
        loss = loss_of_keys(tensors, ids, p, **counts, deterministic=options.deterministic)
        if is_first:
            options.losses[layer.layer_idx] = loss
    return out, ids


def _record(options: Options, layer_idx: int, ids: Tensor, past: int) -> None:
    """Appends ids to those of the `past` tokens that are in the cache, of which some may have been removed again."""
    recorded = options.recorded
    assert recorded is not None
    if past == 0 or layer_idx not in recorded:
        options.first_recorded[layer_idx] = past
    else:
        before = recorded[layer_idx][:, : past - options.first_recorded[layer_idx]]
        slots = max(before.shape[-1], ids.shape[-1])
        ids = torch.cat([pad(part, (0, slots - part.shape[-1]), value=-1) for part in (before, ids)], dim=1)
    recorded[layer_idx] = ids


_DEFAULT = Options()


def _settle(layer: Any) -> None:
    """Makes a new layer one of transformers again if it does not fit; otherwise its model needs no masks."""
    if misfit(layer) is None and layer.config._attn_implementation != "eager":
        layer.config._attn_implementation = NAME
    else:
        layer.__class__ = next(kind for kind, replacement in REPLACEMENTS.items() if type(layer) is replacement)


def _warn_of_mask() -> None:
    warnings.warn(
        "dsa_ext: the keys that a query may see are not one interval, so the attention of transformers runs instead",
        stacklevel=2,
    )


class _Recorded(type):
    """Once a replacement is registered, transformers records attention weights of layers of that class: here also those
    that stay, or are made, layers of transformers."""

    def __instancecheck__(cls, layer: Any) -> bool:
        return isinstance(layer, cls.__bases__[0])


class DsaDeepseekV32Attention(DeepseekV32Attention, metaclass=_Recorded):
    """DeepseekV32Attention on the operators of this package."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        _settle(self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        done = _attend(self, hidden_states, position_embeddings, attention_mask, past_key_values, None, False)
        if done is not None:
            return done[0], None
        assert attention_mask is not None  # None has bounds
        _warn_of_mask()
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, position_ids, **kwargs
        )


class DsaGlmMoeDsaAttention(GlmMoeDsaAttention, metaclass=_Recorded):
    """GlmMoeDsaAttention on the operators of this package. Layers that share an indexer pass the ids on."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        _settle(self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        shared = prev_topk_indices if self.skip_topk else None
        if self.skip_topk and shared is None:
            raise ValueError(f"layer {self.layer_idx} shares the indexer of an earlier layer: pass prev_topk_indices")
        done = _attend(self, hidden_states, position_embeddings, attention_mask, past_key_values, shared, True)
        if done is not None:
            return done[0], None, done[1]
        assert attention_mask is not None  # None has bounds
        _warn_of_mask()
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, position_ids, shared, **kwargs
        )


REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    DeepseekV32Attention: DsaDeepseekV32Attention,
    GlmMoeDsaAttention: DsaGlmMoeDsaAttention,
}
