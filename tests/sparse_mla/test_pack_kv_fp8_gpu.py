"""The kernel of pack_kv_fp8: bitwise the reference."""

import itertools
import math

import pytest
import torch
from streams import captured_and_aside
from torch import Tensor

import dsa_ext
from dsa_ext.testing.tolerances import check

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def make(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers whose rows have magnitudes from 2^-30 to 2^30."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=generator, device=DEVICE) * 60 - 30
    return (torch.randn(shape, generator=generator, device=DEVICE) * torch.exp2(sizes)).bfloat16()


def packed(kv: Tensor) -> Tensor:
    result = dsa_ext.pack_kv_fp8(kv)
    assert result.is_contiguous()
    check("pack_kv_fp8", result, {"kv": kv})
    return result


@pytest.mark.parametrize(
    ("rows", "d_qk"),
    list(itertools.product([(), (0,), (1,), (7,), (8,), (9,), (1000,), (3, 0, 2), (5, 64, 1)], [576, 512])),
)
def test_equals_the_reference(rows: tuple[int, ...], d_qk: int) -> None:
    packed(make(*rows, d_qk))


def test_what_is_not_finite() -> None:
    kv = make(400, 576)
    for i, value in enumerate((math.nan, math.inf, -math.inf)):
        kv.view(-1)[i * 31 :: 977] = value
    packed(kv)


def test_any_strides() -> None:
    wide = make(6, 4, 3, 640)
    expected = packed(wide[..., 8:584].contiguous())
    assert torch.equal(packed(wide[..., 8:584]), expected)
    assert torch.equal(packed(wide[..., 8:584].transpose(0, 1)), expected.transpose(0, 1))
    assert torch.equal(packed(wide[..., 3:579]), packed(wide[..., 3:579].contiguous()))
    assert torch.equal(
        packed(wide[:, :1, :, :576].expand(6, 5, 3, 576)), packed(wide[:, :1, :, :576]).expand(6, 5, 3, 656)
    )
    transposed = wide[0, 0].T.contiguous().T[:, :576]
    assert torch.equal(packed(transposed), packed(transposed.contiguous()))


def test_graphs_and_streams() -> None:
    kv = make(50, 576)
    expected = dsa_ext.pack_kv_fp8(kv)
    for got in captured_and_aside(dsa_ext.pack_kv_fp8, kv):
        assert torch.equal(got, expected)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.dsa.pack_kv_fp8.default, (make(2, 5, 576),))
