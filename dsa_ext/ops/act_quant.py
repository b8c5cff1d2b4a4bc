"""torch.ops.dsa.act_quant: schema, checks, CPU and fake implementation. It has no gradient and counts no FLOPs."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import describe, fail
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, without_gradient
from dsa_ext.reference.fp8 import BLOCK

_OP = "act_quant"

library.define(
    "act_quant(Tensor x, SymInt block=128, bool round_scale=False) -> (Tensor y, Tensor s)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(x: Tensor, block: int) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32) or x.dim() == 0 or x.shape[-1] % BLOCK != 0:
        fail(_OP, f"x must be bfloat16 or float32 [.., N] with N a multiple of {BLOCK}, got {describe(x)}")
    if block != BLOCK:
        fail(_OP, f"block must be {BLOCK}, got {block}")


def _cpu(x: Tensor, block: int = BLOCK, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    _check(x, block)
    return reference.act_quant(x, round_scale)


def _fake(x: Tensor, block: int = BLOCK, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    _check(x, block)
    y = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return y, x.new_empty(x.shape[-1] // BLOCK, *x.shape[:-1], dtype=torch.float32).movedim(0, -1)


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)
follow_autocast(_OP)
