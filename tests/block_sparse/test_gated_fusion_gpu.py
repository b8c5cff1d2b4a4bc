"""The kernels of gated_fusion against the reference in float64 on the same GPU, and their other promises."""

import math

import pytest
import torch
from streams import captured_and_aside
from torch import Tensor

import dsa_ext
from dsa_ext.testing import tolerances

pytestmark = pytest.mark.gpu

FWD, BWD = torch.ops.dsa.gated_fusion_fwd.default, torch.ops.dsa.gated_fusion_bwd.default
both_gates = pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32], ids=str)


def make(*sizes: int, gate_dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """dout, fine, coarse [B, H, N, D] and gate."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = [torch.randn(sizes, generator=generator, device="cuda").bfloat16() for _ in range(3)]
    return [*rows, (4 * torch.randn(sizes[:3], generator=generator, device="cuda")).to(gate_dtype)]


def check(dout: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
    got = (FWD(*args), *BWD(dout, *args))
    named = dict(zip(("fine", "coarse", "gate"), args, strict=True))
    tolerances.check("gated_fusion_fwd", got[0], named)
    tolerances.check("gated_fusion_bwd", got[1:], {"dout": dout, **named})
    for name, a, like in zip(("out", "dfine", "dcoarse", "dgate"), got, (args[0], *args), strict=True):
        assert (a.dtype, a.shape) == (like.dtype, like.shape), name
        assert a.stride() == torch.empty_like(like).stride(), name
    for a, b in zip(got, (FWD(*args), *BWD(dout, *args)), strict=True):
        assert torch.equal(a, b)
    return got


@both_gates
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [(1, 1, 1), (1, 3, 31), (2, 5, 67), (1, 12, 64), (3, 1, 1000), (1, 12, 5000)], ids=str)
def test_values(rows: tuple[int, int, int], dim: int, gate_dtype: torch.dtype) -> None:
    check(*make(*rows, dim, gate_dtype=gate_dtype))


@both_gates
@pytest.mark.parametrize("dim", [64, 128])
def test_layouts(dim: int, gate_dtype: torch.dtype) -> None:
    """Each argument has a different layout: the results are bitwise equal."""
    dout, fine, coarse, gate = make(2, 5, 67, dim, gate_dtype=gate_dtype)
    expected = check(dout, fine, coarse, gate)

    def turned(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def apart(x: Tensor) -> Tensor:
        """A view of a wider buffer."""
        buffer = x.new_full((*x.shape[:-2], 2, x.shape[-2], x.shape[-1]), torch.nan)
        buffer[..., 1, :, :] = x
        return buffer[..., 1, :, :]

    for args in (
        (dout, turned(fine), coarse, turned(gate)),
        (turned(dout), turned(fine), turned(coarse), gate),
        (apart(dout), fine, turned(coarse), apart(gate)),
        (dout.mT.contiguous().mT, apart(fine), apart(coarse), gate.permute(2, 1, 0).contiguous().permute(2, 1, 0)),
    ):
        for a, b in zip(check(*args), expected, strict=True):
            assert torch.equal(a, b)


def test_expanded_arguments() -> None:
    """Gradients that autograd expands for a sum, and one gate for all heads."""
    _, fine, coarse, gate = make(2, 5, 67, 128)
    one = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(fine.shape)
    check(one, fine, coarse, gate[:, :1].expand(-1, 5, -1))


def test_gates_of_every_size() -> None:
    dout, fine, coarse, _ = make(1, 1, 10, 128)
    gate = torch.tensor([-math.inf, -200.0, -80, -30, -1, 0, 1, 30, 80, math.inf], device="cuda")[None, None]
    _, dfine, dcoarse, _ = check(dout, fine, coarse, gate)
    shares = gate.double().sigmoid()[..., None], (-gate.double()).sigmoid()[..., None]
    for got, share in zip((dfine, dcoarse), shares, strict=True):
        torch.testing.assert_close(got.double(), share * dout.double(), rtol=2**-8, atol=1e-37)


def test_nan_stays_in_its_row() -> None:
    dout, fine, coarse, gate = make(1, 3, 40, 64)
    expected = FWD(fine, coarse, gate)
    gate[0, 1, 7] = torch.nan
    out, (*_, dgate) = FWD(fine, coarse, gate), BWD(dout, fine, coarse, gate)
    bad = torch.zeros(1, 3, 40, dtype=torch.bool, device="cuda")
    bad[0, 1, 7] = True
    assert torch.equal(out.isnan(), bad[..., None].expand_as(out))
    assert torch.equal(dgate.isnan(), bad)
    assert torch.equal(out[~bad], expected[~bad])


@pytest.mark.parametrize("sizes", [(0, 2, 3, 64), (1, 0, 3, 64), (1, 2, 0, 128)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int, int]) -> None:
    dout, *args = make(*sizes)
    assert FWD(*args).shape == args[0].shape
    assert [t.shape for t in BWD(dout, *args)] == [t.shape for t in args]


@pytest.mark.gpu_memory(6)
def test_rows_more_than_2_to_the_31_elements_apart() -> None:
    buffer = torch.empty(2**31 + 1024, device="cuda", dtype=torch.bfloat16)
    dout, fine, coarse, gate = make(1, 2, 2, 64)
    for strides in ((0, 2**31 + 512, 64, 1), (0, 64, 2**31 + 512, 1)):
        far = buffer.as_strided(fine.shape, strides)
        far.copy_(fine)
        got = (FWD(coarse, far, gate), *BWD(dout, coarse, far, gate)[::2])
        expected = (FWD(coarse, fine, gate), *BWD(dout, coarse, fine, gate)[::2])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_graph_capture_at_first_call_and_side_stream() -> None:
    dout, *args = make(1, 12, 64, 128)
    captured, aside = captured_and_aside(lambda *args: (FWD(*args), *BWD(dout, *args)), *args)
    expected = check(dout, *args)
    for a, b, c in zip(captured, aside, expected, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


def test_autograd_opcheck_and_compile() -> None:
    dout, *args = make(1, 3, 70, 128)
    leaves = [t.requires_grad_() for t in args]
    torch.library.opcheck(FWD, tuple(leaves))
    torch.library.opcheck(BWD, (dout, *(t.detach() for t in args)))

    def gradients(call: object) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves), leaves, dout)  # type: ignore[operator]

    expected = BWD(dout, *args)
    compiled = torch.compile(dsa_ext.gated_fusion, fullgraph=True, backend="aot_eager")
    for call in (dsa_ext.gated_fusion, compiled):
        assert all(torch.equal(a, b) for a, b in zip(gradients(call), expected, strict=True))


def test_errors() -> None:
    _, fine, coarse, gate = make(1, 3, 70, 128)
    with pytest.raises(RuntimeError, match="gated_fusion_fwd: gate must be on the device of fine, cuda:0, got cpu"):
        FWD(fine, coarse, gate.cpu())
