"""Calls of sparse_mla_bwd on a GPU, and their check against the reference in float64 on the same GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_ext.testing.tolerances import backward_errors

FWD = torch.ops.dsa.sparse_mla_fwd.default
OP = torch.ops.dsa.sparse_mla_bwd.default
DEVICE = "cuda"
both_modes = pytest.mark.parametrize("deterministic", [False, True])


def normal(like: Tensor, seed: int = 1) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def check(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    with_dlse: bool = False,
    deterministic: bool = False,
    return_dist: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse = FWD(q, kv, indices, **options)
    dout, dlse = normal(out), normal(lse, 2) if with_dlse else None
    modes = {"deterministic": deterministic, "return_dist": return_dist}
    *got, dist = OP(dout, q, kv, out, lse, indices, **options, dlse=dlse, **modes)
    assert all(tensor.is_contiguous() for tensor in (*got, dist))
    backward_errors((*got, dist), dout, q, kv, out, lse, indices, dlse, **options, return_dist=return_dist).check()
    return got
