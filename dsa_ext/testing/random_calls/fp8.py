"""Random calls of act_quant and fp8_gemm."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops.fp8 import _LIBRARY_IS_THERE
from dsa_ext.reference.fp8 import BLOCK
from dsa_ext.testing.random_calls.call import Args
from dsa_ext.testing.random_calls.draw import Draw

#: Rows beyond which fp8_gemm on a GPU uses cuBLASLt's matmul, if the installed version has it.
_MAX_ROWS = 64


def act_quant(draw: Draw) -> Args:
    leading = [draw.length(300) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
    count, *leading = draw.within(BLOCK, draw.length(64), *leading)
    x = draw.floats(*leading, count * BLOCK, dtype=draw.choice((torch.bfloat16, torch.float32)), name="x")
    if draw.chance(0.15):
        for special in (torch.nan, torch.inf, -torch.inf):
            x = x.masked_fill(draw.uniform(*x.shape) < 0.002, special)
        draw.notes.append("specials")
    return {"x": draw.view(x, "free"), "round_scale": draw.chance(0.5)}


def fp8_gemm(draw: Draw) -> Args:
    rows = 0 if draw.chance(0.02) else draw.size(_MAX_ROWS if draw.chance(0.7) else 400)
    rows, width, count = draw.within(4, rows, draw.length(8192), draw.length(32))
    if draw.device.type == "cuda" and not _LIBRARY_IS_THERE and width % 16 == 0:
        rows = min(rows, _MAX_ROWS)
    columns = count * BLOCK
    a, a_s = reference.act_quant(draw.floats(rows, columns, name="a"), draw.chance(0.3))
    b, b_s = reference.prepare_weight(draw.floats(width, columns, name="b") * max(1, columns) ** -0.5, draw.chance(0.3))
    return {
        "a": draw.view(a),
        "a_s": _scales(draw, a_s),
        "b": draw.view(b),
        "b_s": _scales(draw, b_s),
    }


def _scales(draw: Draw, scales: Tensor) -> Tensor:
    """Mostly in the layout of the operator that makes them, otherwise with any strides."""
    return scales if draw.chance(0.6) else draw.view(scales, "free")
