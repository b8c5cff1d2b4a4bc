"""What layers get instead of a mask: the first and the last key that each query may see."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from dsa_ext.nn.indexer import causal_bounds
from dsa_ext.reference.indexer import runs

#: The name of the attention implementation in a model's config.
NAME = "dsa_ext"
#: The attribute of bounds that says how far a query sees at most, its own key included. A copy has none.
_LONGEST = "dsa_longest"
#: A number that is added to a score hides the key from here on down.
_HIDDEN = -1e4


def row_bounds(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: Any = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls to make a mask: starts and ends of the keys that each query sees, and 1 for a query that
    is no padding, int32 [B, 1, S, 3]; with a fourth column, of zeros, if it is known that no query sees a later key
    than its own. An ordinary mask if these keys are not one interval, or if `use_vmap` says that the function may be
    other than one of positions. None, except in a compiled graph, if each of S queries sees all of S keys up to its
    own."""

    def ordinary_mask() -> Tensor:
        options = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        options |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask}
        mask: Tensor | None = sdpa_mask(
            batch_size, q_length, kv_length, mask_function=mask_function, use_vmap=use_vmap, device=device, **options
        )
        assert mask is not None
        return mask

    if use_vmap:
        return ordinary_mask()
    is_causal = mask_function is causal_mask_function and not is_compiling()
    is_whole = isinstance(q_offset, int) and (q_offset, kv_offset, kv_length) == (0, 0, q_length)
    is_full = attention_mask is None or (attention_mask.shape[1] >= kv_length and bool(attention_mask.all()))
    if is_causal and is_whole and is_full:
        return None
    position = q_offset - kv_offset + torch.arange(q_length, device=device)  # among the keys
    sees_no_later_key = mask_function is causal_mask_function
    if sees_no_later_key:
        starts = torch.zeros(batch_size, q_length, device=device, dtype=torch.long)
        ends = (position + 1).expand(batch_size, q_length)
    else:
        starts, ends, is_interval = _around(mask_function, batch_size, position, kv_length, kv_offset)
        if not _holds(is_interval):
            return ordinary_mask()
        sees_no_later_key = not is_compiling() and bool((ends <= position + 1).all())
    counts = torch.ones_like(starts)
    if attention_mask is not None:
        is_token = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        is_token = pad(is_token, (0, kv_length - is_token.shape[1]))  # as transformers does
        first, end, is_interval = _intervals(is_token)
        if not _holds(is_interval):
            return ordinary_mask()
        starts, ends = torch.maximum(starts, first[:, None]), torch.minimum(ends, end[:, None])
        own = position.clamp(max=kv_length - 1).expand(batch_size, q_length)
        counts = is_token.gather(1, own).long()
    columns = [starts, ends, counts, *([torch.zeros_like(starts)] if sees_no_later_key else [])]
    bounds = torch.stack(columns, dim=-1).int()[:, None]
    if is_whole and not is_compiling():
        seen = torch.where(starts < ends, position + 1 - starts, 0)
        setattr(bounds, _LONGEST, int(seen.max()) if seen.numel() > 0 else 0)
    return bounds


def _around(
    function: Callable[..., Any], batch: int, position: Tensor, keys: int, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Starts and ends [B, S] of the keys around its own `position` that a function of positions shows each query; and
    whether it shows these keys and no others.

    Bisection finds them. A compiled graph then looks at a query's own key only, since the functions of transformers
    have no holes; otherwise all keys are looked at, for some queries at a time.
    """
    sequence = torch.arange(batch, device=position.device)[:, None]
    bits = 0
    while 2**bits <= keys:  # not bit_length(), which would make a compiled graph one for this number of keys alone
        bits += 1

    def farthest(direction: int) -> Tensor:
        key = position.expand(batch, -1)
        for bit in reversed(range(bits)):
            further = key + direction * 2**bit
            seen = function(sequence, 0, position + offset, further.clamp(0, keys - 1) + offset)
            key = torch.where(seen & (further >= 0) & (further < keys), further, key)
        return key

    starts, ends = farthest(-1), farthest(1) + 1
    if is_compiling():
        return starts, ends, function(sequence, 0, position + offset, position + offset)
    key, is_exact = torch.arange(keys, device=position.device), torch.ones((), device=position.device, dtype=torch.bool)
    for run in runs(len(position), batch * keys):
        seen = function(sequence[..., None], 0, position[run, None] + offset, key + offset)
        is_exact &= (seen == (key >= starts[:, run, None]) & (key < ends[:, run, None])).all()
    return starts, ends, is_exact


def _holds(condition: Tensor) -> bool:
    """Whether it holds for all elements. A compiled graph cannot decide: there it is an error later if it does not."""
    if not is_compiling():
        return bool(condition.all())
    message = "dsa_ext: in a compiled model the keys that a query may see must be one interval"
    torch._assert_async(condition.all(), message)
    return True


def _intervals(visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of a bool tensor, the first true column and the one after the last, both 0 if there is none; and
    whether all between are true."""
    columns = visible.shape[-1]
    any_visible = visible.any(-1)
    first = visible.int().argmax(-1)
    end = torch.where(any_visible, columns - visible.flip(-1).int().argmax(-1), 0)
    return first, end, visible.sum(-1) == torch.where(any_visible, end - first, 0)


class RowBounds(NamedTuple):
    """What each query sees [B, S]."""

    starts: Tensor  # first key, int32
    ends: Tensor  # the one after the last
    counts: Tensor  # 1 if the query counts in losses, 0 if it is padding
    is_causal: bool  # whether it is known that no query sees a later key than its own
    longest: int | None = None  # how many keys up to its own a query sees at most, if it is known


def bounds_of(mask: Tensor | None, x: Tensor) -> RowBounds | None:
    """The bounds of the rows of x [B, S, ...] from what the model hands its layers: the result of row_bounds, or a mask
    [B, 1, S, T], of booleans or numbers to add. None if it is no mask of one interval per query."""
    batch, seq = x.shape[:2]
    if mask is None:
        starts, ends = causal_bounds(x)
        return RowBounds(starts, ends, torch.ones_like(ends), is_causal=True)
    if mask.dtype == torch.int32 and mask.shape[-1] in (3, 4):
        starts, ends, counts = mask[:, 0, :, :3].expand(batch, seq, 3).unbind(-1)
        return RowBounds(starts, ends, counts, mask.shape[-1] == 4, getattr(mask, _LONGEST, None))
    if mask.shape[1] != 1:
        return None
    mask = mask[:, 0]
    visible = mask if mask.dtype == torch.bool else mask == 0
    first, end, is_mask = _intervals(visible)
    if mask.dtype != torch.bool:
        is_mask = is_mask & (visible | (mask <= _HIDDEN)).all(-1)
    if not _holds(is_mask):
        return None
    starts, ends = (bound.int().expand(batch, seq) for bound in (first, end))
    return RowBounds(starts, ends, (starts < ends).int(), is_causal=False)


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
