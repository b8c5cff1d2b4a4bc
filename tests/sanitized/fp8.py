"""Quantization and matrix products of e4m3."""

import itertools

import torch

from dsa_ext import reference
from sanitized.calls import BF16, checked, random

# (M, N): one block, parts of a CTA's rows and columns, several CTAs.
ACT_QUANT = ((1, 128), (9, 1152), (17, 2176))
# (M, N, K): one row, every template instance (kRows), clusters, several tiles per CTA, several launches.
FP8_GEMM = ((1, 1, 128), (9, 200, 640), (30, 64, 2176), (64, 8500, 256), (70, 72, 384))


def act_quant() -> None:
    for (rows, columns), dtype in itertools.product(ACT_QUANT, (BF16, torch.float32)):
        for round_scale in (False, True):
            checked("act_quant", x=random(rows, columns).to(dtype), round_scale=round_scale)
    checked("act_quant", x=random(2, 1, 256).expand(2, 3, 256))


def fp8_gemm() -> None:
    for rows, width, columns in FP8_GEMM:
        x, w = (random(n, columns).to(BF16) for n in (rows, width))
        args = dict(zip(("a", "a_s", "b", "b_s"), (*reference.act_quant(x), *reference.prepare_weight(w)), strict=True))
        checked("fp8_gemm", **args)
