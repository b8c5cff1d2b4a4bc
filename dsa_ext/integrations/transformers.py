"""DeepSeek Sparse Attention of Hugging Face transformers, computed by the operators of this package.

`enable` replaces the attention layers of a model, `register` those of models that are made later. No mask
of queries times keys is made: the model hands each layer the first and the last key that a query may see.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention
from transformers.monkey_patching import register_patch_mapping

from dsa_ext import functional
from dsa_ext.nn.heads import absorbed_queries, multiply_heads
from dsa_ext.nn.indexer import IndexerTensors, scores_of_keys, select_keys
from dsa_ext.nn.rotary import rotated

#: The name of the attention implementation in a model's config.
NAME = "dsa_ext"
_LATENT, _ROPE = 512, 64
_INDEXER_HEADS, _INDEXER_COLUMNS, _MAX_TOPK, _MAX_HEADS = (8, 16, 32, 64), (64, 128), 4096, 128
Precision = Literal["bf16", "fp8"]


@dataclass
class _Options:
    """What the layers of a model share."""

    indexer: Precision = "bf16"
    train_indexer: bool = False
    #: The indexer's loss in the last forward, by layer.
    losses: dict[int, Tensor] = field(default_factory=dict)


class Handle:
    """Undoes `enable`, by `disable()` or at the end of a `with` block."""

    def __init__(self, options: _Options, undo: list[Callable[[], None]]) -> None:
        self._options, self._undo = options, undo

    def indexer_loss(self) -> Tensor:
        """The loss of the indexers in the last forward pass, the mean over layers."""
        if not self._options.losses:
            raise RuntimeError("there is no indexer loss: pass train_indexer=True and run a forward with gradients")
        return torch.stack(list(self._options.losses.values())).mean()

    def disable(self) -> None:
        """Restores the model. Further calls do nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()


def enable(
    model: PreTrainedModel,
    *,
    indexer: Precision = "bf16",
    train_indexer: bool = False,
    loss_coeff: float = 1.0,
    strict: bool = True,
) -> Handle:
    """Makes the attention layers of a DeepSeek-V3.2 or GLM-MoE-DSA model run on the operators of this package.

    Parameters, caches and outputs are those of the model: checkpoints, generation, gradient checkpointing, autocast and
    adapters work as before.

    Args:
        model: a model of transformers, or one that contains such layers.
        indexer: precision of the scores that select keys, "bf16" or "fp8".
        train_indexer: the indexers get gradients of their loss, from the selected keys (arXiv 2512.02556, section
            2.1). Otherwise they get none, as in transformers.
        loss_coeff: with train_indexer, `loss_coeff` times the mean of the layers' losses is added to the loss that the
            model computes from labels. 0 if you add `Handle.indexer_loss` yourself.
        strict: raise an error if a layer does not fit the operators. Otherwise such layers stay as they are.

    Returns:
        a handle that restores the model. In a `with` statement it does so at the end of the block.

    Raises:
        ValueError: there is no such layer, or `strict` and one of them does not fit; the message says why.
    """
    if indexer not in ("bf16", "fp8"):
        raise ValueError(f"enable: indexer must be 'bf16' or 'fp8', got {indexer!r}")
    layers = {name: layer for name, layer in model.named_modules() if type(layer) in _REPLACEMENTS}
    if not layers:
        raise ValueError(f"enable: {type(model).__name__} has no layer of DeepseekV32 or GlmMoeDsa")
    reasons = {name: reason for name, layer in layers.items() if (reason := _misfit(layer)) is not None}
    if reasons and strict:
        raise ValueError("enable: these layers do not fit:\n" + "\n".join(f"{n}: {r}" for n, r in reasons.items()))

    options, undo = _Options(indexer, train_indexer), list[Callable[[], None]]()
    for name, layer in layers.items():
        if name not in reasons:
            _replace(layer, options, undo)
    if not reasons:
        for config in {id(layer.config): layer.config for layer in layers.values()}.values():
            _set(config, "_attn_implementation", NAME, undo)
    handle = Handle(options, undo)
    if train_indexer and loss_coeff != 0 and hasattr(model, "loss_function"):
        plain = model.loss_function

        def with_indexer_loss(*args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = plain(*args, **kwargs)
            return loss + loss_coeff * handle.indexer_loss().to(loss) if options.losses else loss

        _set(model, "loss_function", with_indexer_loss, undo)
    return handle


def register() -> None:
    """Makes models that are created from now on run on the operators, as far as their layers fit."""
    register_patch_mapping({kind.__name__: replacement for kind, replacement in _REPLACEMENTS.items()}, overwrite=True)


def _set(target: Any, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    before = getattr(target, name)
    setattr(target, name, value)
    undo.append(lambda: setattr(target, name, before))


def _replace(layer: nn.Module, options: _Options, undo: list[Callable[[], None]]) -> None:
    kind = type(layer)
    layer.__class__ = _REPLACEMENTS[kind]
    layer._dsa_options = options  # type: ignore[assignment]

    def restore() -> None:
        layer.__class__ = kind
        del layer._dsa_options

    undo.append(restore)


def _misfit(layer: Any) -> str | None:
    """Why a layer cannot run on the operators; None if it can."""
    c = layer.config
    conditions = {
        f"kv_lora_rank must be {_LATENT}, got {c.kv_lora_rank}": c.kv_lora_rank == _LATENT,
        f"qk_rope_head_dim must be {_ROPE}, got {c.qk_rope_head_dim}": c.qk_rope_head_dim == _ROPE,
        f"num_attention_heads must be at most {_MAX_HEADS}, got {layer.num_heads}": layer.num_heads <= _MAX_HEADS,
        f"attention_dropout must be 0, got {c.attention_dropout}": c.attention_dropout == 0,
        f"index_n_heads must be one of {_INDEXER_HEADS}, got {c.index_n_heads}": c.index_n_heads in _INDEXER_HEADS,
        f"index_head_dim must be one of {_INDEXER_COLUMNS}, got {c.index_head_dim}": c.index_head_dim
        in _INDEXER_COLUMNS,
        f"index_topk must be at most {_MAX_TOPK}, got {c.index_topk}": c.index_topk <= _MAX_TOPK,
    }
    return next((reason for reason, holds in conditions.items() if not holds), None)


# ---- bounds instead of masks


def _row_bounds(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = None,
    **kwargs: Any,
) -> Tensor:
    """What transformers calls to make a mask: starts and ends of the keys that each query sees, int32 [B, 1, S, 2]. An
    ordinary mask if padding is not on the left and right alone."""
    position = q_offset + torch.arange(q_length, device=device)
    starts = torch.zeros(batch_size, q_length, device=device, dtype=torch.long)
    if q_length > 1:
        # Packed sequences begin where a query does not see the key before it.
        sequence = torch.arange(batch_size, device=device)[:, None]
        sees_previous = mask_function(sequence, 0, position, (position - 1).clamp(min=0))
        starts = torch.where(sees_previous, starts, position).cummax(-1).values
    ends = (position + 1).expand(batch_size, q_length)
    if attention_mask is not None:
        is_token = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        first, end, is_interval = _intervals(is_token)
        if not is_compiling() and not bool(is_interval.all()):
            arguments = {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask}
            mask: Tensor | None = sdpa_mask(
                batch_size, q_length, kv_length, mask_function=mask_function, device=device,
                **{**kwargs, **arguments, "allow_is_causal_skip": False},
            )  # fmt: skip
            assert mask is not None
            return mask
        starts, ends = torch.maximum(starts, first[:, None]), torch.minimum(ends, end[:, None])
    return torch.stack([starts, ends], dim=-1).int()[:, None]


def _intervals(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of a bool tensor, the first true column and the one after the last, both 0 if there is none; and
    whether all between are true."""
    columns = visible.shape[-1]
    any_visible = visible.any(-1)
    first = visible.int().argmax(-1)
    end = torch.where(any_visible, columns - visible.flip(-1).int().argmax(-1), 0)
    return first, end, visible.sum(-1) == torch.where(any_visible, end - first, 0)


def _bounds(mask: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor] | None:
    """starts and ends [B, S] from what the model hands its layers: those of _row_bounds, or a mask [B, 1, S, T], of
    booleans or numbers to add. None if it is no mask of one interval per query."""
    if mask.dtype == torch.int32 and mask.shape[-1] == 2:
        starts, ends = mask[:, 0].expand(batch, seq, 2).unbind(-1)
        return starts, ends
    if mask.shape[1] != 1:
        return None
    first, end, is_interval = _intervals(mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0)
    if not is_compiling() and not bool(is_interval.all()):
        return None
    return first.int().expand(batch, seq), end.int().expand(batch, seq)


def _masked_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> Any:
    """Attention of a layer that has no bounds: scaled_dot_product_attention with the selection in the mask."""
    selected = kwargs.pop("indices")
    hidden = torch.ones(*selected.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
    hidden = hidden.scatter(-1, selected.long(), False)[:, None]
    if attention_mask.dtype == torch.bool:
        attention_mask = attention_mask & ~hidden
    else:
        attention_mask = attention_mask.masked_fill(hidden, torch.finfo(query.dtype).min)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NAME, _masked_attention)
AttentionMaskInterface.register(NAME, _row_bounds)


# ---- the layer


def _latent_weights(layer: Any) -> list[Tensor]:
    """The weights of kv_b_proj for keys and for values, per head: [H, columns, 512]."""
    projection = layer.kv_b_proj
    if type(projection) is nn.Linear:
        weight = projection.weight
    else:  # wrapped, by an adapter or a quantizer: its product with the unit matrix
        like = layer.kv_a_proj_with_mqa.weight
        weight = projection(torch.eye(_LATENT, device=like.device, dtype=like.dtype)).T
    heads = weight.unflatten(0, (-1, layer.qk_nope_head_dim + layer.v_head_dim))
    return list(heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1))


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
    weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype)).float()
    return IndexerTensors(q, k, weights * (indexer.n_heads**-0.5 * indexer.softmax_scale))


def _attend(
    layer: Any,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: Cache | None,
    ids: Tensor | None,
    interleaved_indexer: bool,
) -> tuple[Tensor, Tensor] | None:
    """Output [B, S, hidden_size] and the ids of the selected keys [B, S, K], which are selected if `ids` is None. None
    if the mask has no bounds; then nothing has changed."""
    bounds = _bounds(mask, *x.shape[:2])
    if bounds is None:
        return None
    options: _Options = getattr(layer, "_dsa_options", _DEFAULT)
    cos, sin = (table[..., : _ROPE // 2] for table in tables)

    q_resid = layer.q_a_layernorm(layer.q_a_proj(x))
    heads = layer.q_b_proj(q_resid).unflatten(-1, (-1, layer.qk_head_dim))
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    key_weight, value_weight = _latent_weights(layer)
    q = absorbed_queries(heads, key_weight, cos[:, :, None], sin[:, :, None], interleaved=True)
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([_LATENT, _ROPE], dim=-1)
    latent = layer.kv_a_layernorm(latent).to(heads.dtype)
    k_rope = rotated(k_rope, cos, sin, interleaved=True)
    if cache is not None:
        cached = cache.update(latent[:, None], k_rope[:, None], layer.layer_idx)
        latent, k_rope = (t.squeeze(1) for t in cached)
    kv = torch.cat([latent, k_rope], dim=-1)[:, :, None]

    trains = options.train_indexer and torch.is_grad_enabled() and ids is None
    tensors = None
    if ids is None:
        with torch.set_grad_enabled(trains):
            tensors = _indexer_tensors(
                layer.indexer, x.detach(), q_resid.detach(), (cos, sin), interleaved_indexer, cache
            )
        ids = select_keys(tensors, *bounds, min(layer.indexer.index_topk, kv.shape[1]), options.indexer)
    listed = ids[:, :, None]
    scaling = {"causal": False, "sm_scale": layer.scaling}
    attended, lse = functional.sparse_mla(q, kv, listed, d_v=_LATENT, return_lse=True, **scaling)
    out = layer.o_proj(multiply_heads(attended, value_weight.mT).flatten(2))
    if tensors is not None and trains:
        p = functional.attn_dist(q.detach(), kv.detach(), listed, lse.detach(), **scaling)[:, :, 0]
        starts, ends = bounds
        loss = functional.indexer_loss(scores_of_keys(tensors, ids), p, row_weights=(starts < ends).to(p.dtype))
        if is_compiling() or torch._C._current_graph_task_id() == -1:  # not when a checkpoint computes it again
            options.losses[layer.layer_idx] = loss
    else:
        options.losses.pop(layer.layer_idx, None)
    return out, ids


_DEFAULT = _Options()


def _settle(layer: Any) -> None:
    """Makes a new layer one of transformers again if it does not fit; otherwise its model needs no masks."""
    if _misfit(layer) is None:
        layer.config._attn_implementation = NAME
    else:
        layer.__class__ = next(kind for kind, replacement in _REPLACEMENTS.items() if type(layer) is replacement)


def _warn_of_mask() -> None:
    warnings.warn(
        "dsa_ext: the keys that a query may see are not one interval, so the attention of transformers runs instead",
        stacklevel=2,
    )


class DsaDeepseekV32Attention(DeepseekV32Attention):
    """DeepseekV32Attention on the operators of this package."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        _settle(self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        done = _attend(self, hidden_states, position_embeddings, attention_mask, past_key_values, None, False)
        if done is not None:
            return done[0], None
        _warn_of_mask()
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, position_ids, **kwargs
        )


class DsaGlmMoeDsaAttention(GlmMoeDsaAttention):
    """GlmMoeDsaAttention on the operators of this package. Layers that share an indexer pass the ids on."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        _settle(self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        shared = prev_topk_indices if self.skip_topk else None
        done = _attend(self, hidden_states, position_embeddings, attention_mask, past_key_values, shared, True)
        if done is not None:
            return done[0], None, done[1]
        _warn_of_mask()
        return super().forward(
            hidden_states, position_embeddings, attention_mask, past_key_values, position_ids, shared, **kwargs
        )


_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    DeepseekV32Attention: DsaDeepseekV32Attention,
    GlmMoeDsaAttention: DsaGlmMoeDsaAttention,
}
