"""torch.ops.dsa.block_select: schema, checks, CPU and fake implementation. It has no gradient and counts no FLOPs."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_tensor, fail
from dsa_ext.ops._library import explain_missing_cuda, follow_autocast, library, without_gradient
from dsa_ext.reference.block_select import slots

_OP = "block_select"
_MAX_BLOCKS = 16384

library.define(
    "block_select(Tensor scores, SymInt? topk=None, float tau=0.9, SymInt min_blocks=1, float min_ratio=0.05, "
    "float max_ratio=0.5) -> (Tensor q2k_index, Tensor q2k_num)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
explain_missing_cuda(_OP)


def _check(scores: Tensor, topk: int | None, tau: float, min_blocks: int, min_ratio: float, max_ratio: float) -> None:
    check_tensor(_OP, "scores", scores, (torch.float32, torch.bfloat16), B=None, H=None, Mq=None, Mkv=None)
    if scores.shape[3] > _MAX_BLOCKS:
        fail(_OP, f"scores must have at most {_MAX_BLOCKS} blocks a row, got {scores.shape[3]}")
    if topk is not None and topk < 1:
        fail(_OP, f"topk must be at least 1, got {topk}")
    if not 0 < tau <= 1:
        fail(_OP, f"tau must be above 0 and at most 1, got {tau:g}")
    if min_blocks < 0:
        fail(_OP, f"min_blocks must be at least 0, got {min_blocks}")
    if not 0 <= min_ratio <= max_ratio <= 1:
        fail(_OP, f"min_ratio and max_ratio must be ascending, from 0 to 1, got {min_ratio:g} and {max_ratio:g}")


def _cpu(
    scores: Tensor,
    topk: int | None = None,
    tau: float = 0.9,
    min_blocks: int = 1,
    min_ratio: float = 0.05,
    max_ratio: float = 0.5,
) -> tuple[Tensor, Tensor]:
    _check(scores, topk, tau, min_blocks, min_ratio, max_ratio)
    return reference.block_select(scores, topk, tau, min_blocks, min_ratio, max_ratio)


def _fake(
    scores: Tensor,
    topk: int | None = None,
    tau: float = 0.9,
    min_blocks: int = 1,
    min_ratio: float = 0.05,
    max_ratio: float = 0.5,
) -> tuple[Tensor, Tensor]:
    _check(scores, topk, tau, min_blocks, min_ratio, max_ratio)
    rows, blocks = scores.shape[:3], scores.shape[3]
    width = slots(blocks, topk, min_blocks, max_ratio)
    return scores.new_empty(*rows, width, dtype=torch.int32), scores.new_empty(rows, dtype=torch.int32)


library.impl(_OP, _cpu, "CPU")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
without_gradient(_OP)
follow_autocast(_OP)
