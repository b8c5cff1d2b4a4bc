"""torch.ops.dsa.topk_select: schema, checks, CPU and fake implementation. It has no gradient and counts no FLOPs."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor
from dsa_ext.ops._indexer import check_topk
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, without_gradient

_OP = "topk_select"
_DTYPES = (torch.float32, torch.bfloat16)

library.define(
    "topk_select(Tensor logits, Tensor starts, Tensor ends, SymInt topk) -> (Tensor indices, Tensor values)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(logits: Tensor, starts: Tensor, ends: Tensor, topk: int) -> None:
    on_cpu = logits.device.type == "cpu" and logits.dtype == torch.float64
    check_tensor(_OP, "logits", logits, (torch.float64,) if on_cpu else _DTYPES, R=None, C=None)
    check_tensor(_OP, "starts", starts, torch.int32, R=logits.shape[0])
    check_tensor(_OP, "ends", ends, torch.int32, R=logits.shape[0])
    check_topk(_OP, topk)
    check_same_device(_OP, "logits", logits, starts=starts, ends=ends)


def _cpu(logits: Tensor, starts: Tensor, ends: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    _check(logits, starts, ends, topk)
    return reference.topk_select(logits, starts, ends, topk)


def _fake(logits: Tensor, starts: Tensor, ends: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    _check(logits, starts, ends, topk)
    rows = logits.shape[0]
    return logits.new_empty(rows, topk, dtype=torch.int32), logits.new_empty(rows, topk)


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)
follow_autocast(_OP)
