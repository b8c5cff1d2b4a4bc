"""RoPE in place on the CPU, where it is a formula in PyTorch; and the checks of the kernel's arguments."""

import itertools

import pytest
import torch
from commands import needs_library
from torch import Tensor

from dsa_ext.nn.rotary import write_rotated


def complex_pairs(x: Tensor, interleaved: bool) -> Tensor:
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    return torch.view_as_complex(pairs.contiguous())


@pytest.mark.parametrize(("interleaved", "interleaved_out"), list(itertools.product((False, True), repeat=2)))
def test_rotation(interleaved: bool, interleaved_out: bool) -> None:
    x, angles = torch.randn(2, 5, 3, 20, dtype=torch.float64), torch.randn(2, 5, 1, 8, dtype=torch.float64)
    out = torch.full((2, 5, 3, 30), 7.0, dtype=torch.float64)
    write_rotated(out[..., 4:24], x, angles.cos(), angles.sin(), interleaved, interleaved_out)
    expected = complex_pairs(x[..., :16], interleaved) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(complex_pairs(out[..., 4:20], interleaved_out), expected)
    assert torch.equal(out[..., 20:24], x[..., 16:])
    assert (out[..., :4] == 7).all()
    assert (out[..., 24:] == 7).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_behind_other_columns_and_in_place(interleaved: bool) -> None:
    x, angles = torch.randn(2, 5, 3, 28, dtype=torch.float64), torch.randn(2, 5, 1, 8, dtype=torch.float64)
    tables = angles.cos(), angles.sin()
    out, part = torch.empty_like(x), torch.empty(2, 5, 3, 16, dtype=torch.float64)
    write_rotated(out, x, *tables, interleaved, interleaved, first=8)
    write_rotated(part, x[..., 8:24], *tables, interleaved, interleaved)
    assert torch.equal(out, torch.cat([x[..., :8], part, x[..., 24:]], dim=-1))
    write_rotated(x, x, *tables, interleaved, interleaved, first=8)
    assert torch.equal(x, out)


def test_in_compiled_code() -> None:
    """Dynamo meets the formula in backward functions."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = torch.empty_like(x)
        write_rotated(out, x, cos, sin)
        return out

    x, angles = torch.randn(2, 9, 4, 64, dtype=torch.float64), torch.randn(2, 9, 1, 32, dtype=torch.float64)
    args = x, angles.cos(), angles.sin()
    got = torch.compile(turned, backend="aot_eager", dynamic=True, fullgraph=True)(*args)
    torch.testing.assert_close(got, turned(*args))


@needs_library
def test_errors() -> None:
    """Those that need no GPU."""
    x, cos = torch.randn(1, 2, 3, 64).bfloat16(), torch.randn(1, 2, 3, 32).bfloat16()
    wide = torch.randn(1, 2, 3, 72).bfloat16()
    for args, text in (
        ((x, x[..., 0], cos, cos), r"x and cos must be \[B, S, H, D\], got bfloat16 \[1, 2, 3\]"),
        ((x, x, cos[..., :30], cos), "cos must have a multiple of 4 columns, at most half of those of x"),
        ((x, x.float(), cos, cos), r"x must be bfloat16 \[B, S, H, D\], got float32"),
        ((x, x, cos, cos[..., :28]), r"sin must be bfloat16 \[B=1, S=2, H=3, D=32\], got bfloat16 \[1, 2, 3, 28\]"),
        ((x[:, :1], x, cos, cos), r"out must be bfloat16 \[B=1, S=2, H=3, D=64\], got bfloat16 \[1, 1, 3, 64\]"),
        ((x, wide[..., 4:68], cos, cos), "x must have dense rows that start 16-byte aligned"),
        ((x, x, cos, cos), "x must be on a Hopper GPU|x must be "),
    ):
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        with pytest.raises(RuntimeError, match=f"^dsa::_write_rotated: {text}"):
            torch.ops.dsa._write_rotated.default.redispatch(keys, *args, 0, False, False)
    for first in (4, -8, 8):
        with pytest.raises(RuntimeError, match=f"first must be a multiple of 8, from 0 to 0, got {first}"):
            torch.ops.dsa._write_rotated.default.redispatch(keys, x, x, cos, cos, first, False, False)
