"""Calls of operators whose arguments are made, and whose results are checked, on the CPU."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext.testing.tolerances import check

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Args = dict[str, Any]


def on_gpu(value: Any) -> Any:
    """A copy on the GPU in the same layout, in an allocation of its own that ends at the last element."""
    if not isinstance(value, Tensor):
        return value
    offset, reach = (
        value.storage_offset(),
        1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)),
    )
    if value.numel() == 0:
        return value.cuda()
    memory = value.as_strided((offset + reach,), (1,), 0).cuda()
    return memory.as_strided(value.shape, value.stride(), offset)


def call(op: str, args: Args) -> tuple[Tensor, ...]:
    """The results of torch.ops.dsa.<op>, back on the CPU."""
    results = getattr(torch.ops.dsa, op)(**{name: on_gpu(value) for name, value in args.items()})
    return tuple(t.cpu() for t in ((results,) if isinstance(results, Tensor) else results))


def checked(op: str, **args: Any) -> tuple[Tensor, ...]:
    results = call(op, args)
    check(op, results, args)
    return results


def swapped(x: Tensor) -> Tensor:
    """Heads [B, H, N, D] that are [N, B, H, D] in memory, as in sequence-first models."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
