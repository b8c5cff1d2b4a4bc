"""Seeded inputs for sparse_mla: ordinary ones, and those that break kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

#: Rows of random keys that random_indices ranks at a time.
_ROWS_ELEMENTS = 2**28


@dataclass
class Inputs:
    q: Tensor  # [B, S, H, D]
    kv: Tensor  # [B, S_kv, G, D]
    indices: Tensor  # [B, S, G, K] int32


def make_inputs(
    batch: int = 1,
    seq: int = 8,
    s_kv: int = 64,
    heads: int = 16,
    groups: int = 1,
    topk: int = 32,
    d_qk: int = 576,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Inputs:
    """Normal q and kv, and distinct random ids; rows with fewer keys than slots end in padding."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    return Inputs(
        q=normal(batch, seq, heads, d_qk),
        kv=normal(batch, s_kv, groups, d_qk),
        indices=random_indices((batch, seq, groups, topk), s_kv, generator),
    )


def random_indices(shape: tuple[int, int, int, int], s_kv: int, generator: torch.Generator) -> Tensor:
    """Distinct ids of [0, s_kv) in random order, int32 [B, S, G, K]; -1 after the last where K > s_kv."""
    device, topk = generator.device, shape[3]
    indices = torch.full(shape, -1, dtype=torch.int32, device=device)
    if s_kv == 0:
        return indices
    rows = indices.view(-1, topk)
    count = min(topk, s_kv)
    for part in rows.split(max(1, _ROWS_ELEMENTS // s_kv)):
        keys = torch.rand(len(part), s_kv, generator=generator, device=device)
        part[:, :count] = keys.topk(count, dim=1).indices.int()
        if count < topk:
            part[:, :count] = part[:, :count][:, torch.randperm(count, generator=generator, device=device)]
    return indices


def spoil_indices(indices: Tensor, s_kv: int, seed: int = 0) -> Tensor:
    """A copy in which a third of the slots are ids that must be skipped, one a row is listed twice, and the first query
    has nothing but padding."""
    generator = torch.Generator(indices.device).manual_seed(seed)
    bad = torch.tensor([INT32_MIN, -1, s_kv, INT32_MAX], dtype=torch.int32, device=indices.device)
    choice = torch.randint(0, 12, indices.shape, generator=generator, device=indices.device)
    spoiled = torch.where(choice < 4, bad[choice.clamp(max=3)], indices)
    spoiled[..., -1] = spoiled[..., 0]
    spoiled[:, 0] = -1
    return spoiled


def poison_unselected(kv: Tensor, indices: Tensor, visible: Tensor) -> Tensor:
    """A copy of kv in which every row that no query sees is NaN or Inf. `visible` marks the slots that count."""
    batch, s_kv, groups, _ = kv.shape
    selected = torch.zeros(batch, s_kv + 1, groups, dtype=torch.bool, device=kv.device)
    ids = torch.where(visible, indices, s_kv).long()
    b = torch.arange(batch, device=kv.device)[:, None, None, None]
    g = torch.arange(groups, device=kv.device)[:, None]
    selected[b, ids, g] = True
    poison = torch.full_like(kv, torch.nan)
    poison[:, 1::2] = torch.inf
    return torch.where(selected[:, :s_kv, :, None], kv, poison)


def strided_copy(tensor: Tensor, *, swap_leading: bool = False, pad: int = 64) -> Tensor:
    """The same values as a view of a larger buffer: wider rows, spare rows around it, and, if wanted, the two leading
    dimensions transposed. Every row still starts 16-byte aligned. What lies between the rows is NaN."""
    source = tensor.transpose(0, 1) if swap_leading else tensor
    shape = list(source.shape)
    buffer = tensor.new_full([shape[0] + 1, shape[1] + 2, *shape[2:-1], shape[-1] + pad], torch.nan)
    view = buffer[1:, 1:-1, ..., pad // 2 : pad // 2 + shape[-1]]
    view.copy_(source)
    return view.transpose(0, 1) if swap_leading else view
