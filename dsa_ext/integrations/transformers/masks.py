"""What layers get instead of a mask: the first and the last key that each query may see."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

#: The name of the attention implementation in a model's config.
NAME = "dsa_ext"


def row_bounds(
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
        own = (position - kv_offset).clamp(max=is_token.shape[1] - 1).expand(batch_size, q_length)
        ends = torch.where(is_token.gather(1, own), ends, 0)  # queries that are padding see nothing
    return torch.stack([starts, ends], dim=-1).int()[:, None]


def _intervals(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of a bool tensor, the first true column and the one after the last, both 0 if there is none; and
    whether all between are true."""
    columns = visible.shape[-1]
    any_visible = visible.any(-1)
    first = visible.int().argmax(-1)
    end = torch.where(any_visible, columns - visible.flip(-1).int().argmax(-1), 0)
    return first, end, visible.sum(-1) == torch.where(any_visible, end - first, 0)


def bounds_of(mask: Tensor, batch: int, seq: int) -> tuple[Tensor, Tensor] | None:
    """starts and ends [B, S] from what the model hands its layers: those of row_bounds, or a mask [B, 1, S, T], of
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
AttentionMaskInterface.register(NAME, row_bounds)
