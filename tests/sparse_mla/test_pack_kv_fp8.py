"""pack_kv_fp8 without a GPU: its layout and its values, and the operator's errors."""

import math

import pytest
import torch
from callers import assert_error, callers

import dsa_ext
from dsa_ext import reference


@pytest.mark.parametrize(("d_qk", "width"), [(576, 656), (512, 528)])
def test_layout(d_qk: int, width: int) -> None:
    kv = (torch.randn(2, 3, 1, d_qk) * torch.tensor([1e-6, 1.0, 300.0])[:, None, None]).bfloat16()
    packed = dsa_ext.pack_kv_fp8(kv)
    assert packed.shape == (2, 3, 1, width)
    assert packed.dtype == torch.uint8
    assert packed.is_contiguous()
    y, scales = dsa_ext.act_quant(kv[..., :512])
    assert torch.equal(packed[..., :512], y.view(torch.uint8))
    assert torch.equal(packed[..., 512:528].contiguous().view(torch.float32), scales.contiguous())
    assert torch.equal(packed[..., 528:].contiguous().view(torch.bfloat16), kv[..., 512:])


@pytest.mark.parametrize("d_qk", [576, 512])
def test_unpacking(d_qk: int) -> None:
    kv = torch.randn(50, d_qk).bfloat16()
    keys = reference.unpack_kv_fp8(dsa_ext.pack_kv_fp8(kv), torch.float64)
    largest = kv[:, :512].double().abs().unflatten(1, (4, 128)).amax(2).repeat_interleave(128, 1)
    # Half a step of e4m3: 2^-4 of a number, or of the smallest normal one, 2^-6 of 448 steps for the largest.
    bound = 2.0**-4 * kv[:, :512].double().abs().maximum(largest * 2.0**-6 / 448)
    assert ((keys[:, :512] - kv[:, :512].double()).abs() <= bound * (1 + 1e-6)).all()
    assert torch.equal(keys[:, 512:], kv[:, 512:].double())


def test_what_is_not_finite_spoils_its_block() -> None:
    for value in (math.nan, math.inf, -math.inf):
        kv = torch.randn(3, 576).bfloat16()
        kv[1, 130] = value
        keys = reference.unpack_kv_fp8(dsa_ext.pack_kv_fp8(kv))
        assert keys[1, 128:256].isnan().all()
        assert keys[1, :128].isfinite().all()
        assert keys[1, 256:].isfinite().all()
        assert keys[[0, 2]].isfinite().all()


def test_any_strides() -> None:
    kv = torch.randn(4, 6, 640).bfloat16()[:, ::2, 3:579]
    assert torch.equal(dsa_ext.pack_kv_fp8(kv), dsa_ext.pack_kv_fp8(kv.contiguous()))
    assert torch.equal(dsa_ext.pack_kv_fp8(kv.transpose(0, 1)), dsa_ext.pack_kv_fp8(kv).transpose(0, 1))
    assert dsa_ext.pack_kv_fp8(kv[:0]).shape == (0, 3, 656)
    assert dsa_ext.pack_kv_fp8(kv[0, 0]).shape == (656,)


@pytest.mark.parametrize(
    ("kv", "got"),
    [
        (torch.zeros(3, 576), "float32 [3, 576]"),
        (torch.zeros(3, 640).bfloat16(), "bfloat16 [3, 640]"),
        (torch.zeros([]).bfloat16(), "bfloat16 []"),
    ],
)
@pytest.mark.parametrize("caller", range(3), ids=["native", "cpu", "fake"])
def test_errors(kv: torch.Tensor, got: str, caller: int) -> None:
    message = f"kv must be bfloat16 [.., D] with D 576 or 512, got {got}"
    assert_error(callers("pack_kv_fp8")[caller], "pack_kv_fp8", {"kv": kv}, message)


def test_opcheck() -> None:
    for d_qk in (576, 512):
        torch.library.opcheck(torch.ops.dsa.pack_kv_fp8.default, (torch.randn(2, 5, d_qk).bfloat16(),))
