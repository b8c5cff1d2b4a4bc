"""The kernel of RoPE against the formula in PyTorch, which has the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_ext.nn import apply_rope, rotary
from dsa_ext.ops.rotary import write_rotated_is_compiled

pytestmark = pytest.mark.gpu
layouts = pytest.mark.parametrize(("interleaved", "interleaved_out"), [(a, b) for a in (0, 1) for b in (0, 1)])


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().cuda()


def tables(*shape: int) -> tuple[Tensor, Tensor]:
    angles = normal(*shape).float()
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def compare(
    patch: pytest.MonkeyPatch, out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, *layout: Any, first: int = 0
) -> int:
    """Both ways, and the number of calls of the kernel."""
    assert write_rotated_is_compiled()
    calls: list[Any] = []
    kernel = torch.ops.dsa._write_rotated
    patch.setattr(torch.ops.dsa, "_write_rotated", lambda *args: (calls.append(args), kernel(*args)))
    rotary.write_rotated(out, x, cos, sin, *layout, first=first)
    expected = torch.full_like(out, 7)
    patch.setattr(rotary, "write_rotated_is_compiled", lambda: False)
    rotary.write_rotated(expected, x, cos, sin, *layout, first=first)
    patch.undo()
    assert equal(out, expected)
    return len(calls)


@layouts
@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        ((2, 5, 3, 64), 32), ((1, 300, 128, 64), 32), ((3, 7, 128), 32), ((2, 1, 64, 128), 32), ((1, 9, 2, 24), 4),
        ((2, 0, 3, 64), 32),
    ],
    ids=str,
)  # fmt: skip
def test_bits(
    shape: tuple[int, ...], pairs: int, interleaved: bool, interleaved_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(*shape)
    for batch in {1, shape[0]}:
        cos, sin = tables(batch, shape[1], *(1,) * (len(shape) - 3), pairs)
        assert compare(monkeypatch, torch.empty_like(x), x, cos, sin, interleaved, interleaved_out) == 1


@layouts
def test_columns_of_wider_rows(interleaved: bool, interleaved_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention calls it: the last columns of q, into the last columns of the absorbed queries; nothing else is
    written."""
    heads, q = normal(2, 9, 16, 192), torch.full((2, 9, 16, 576), 3.0, dtype=torch.bfloat16, device="cuda")
    cos, sin = tables(2, 9, 1, 32)
    assert compare(monkeypatch, q[..., 512:], heads[..., 128:], cos, sin, interleaved, interleaved_out) == 1
    assert (q[..., :512] == 3).all()
    swapped = normal(9, 2, 16, 192).transpose(0, 1)[..., 128:]
    assert compare(monkeypatch, q[..., 512:], swapped, cos, sin, interleaved, interleaved_out) == 1


@layouts
def test_pairs_behind_other_columns(interleaved: bool, interleaved_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = normal(2, 9, 16, 208)
    cos, sin = tables(2, 9, 1, 32)
    for first in (0, 8, 128, 144):
        out = torch.empty_like(heads)
        assert compare(monkeypatch, out, heads, cos, sin, interleaved, interleaved_out, first=first) == 1
        assert equal(out[..., :first], heads[..., :first])
        assert equal(out[..., first + 64 :], heads[..., first + 64 :])
    assert compare(monkeypatch, out, heads, cos, sin, interleaved, interleaved_out, first=12) == 0


@pytest.mark.parametrize("interleaved", [False, True])
def test_in_place(interleaved: bool) -> None:
    heads, (cos, sin) = normal(2, 300, 16, 192), tables(2, 300, 1, 32)
    out, rope = torch.empty_like(heads), heads[..., 128:]
    rotary.write_rotated(out, heads, cos, sin, interleaved, interleaved, first=128)
    rotary.write_rotated(rope, rope, cos, sin, interleaved, interleaved)
    assert equal(heads, out)


@layouts
@pytest.mark.parametrize("what", ["start", "stride", "pairs", "fp32"])
def test_other_layouts(what: str, interleaved: bool, interleaved_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not take them."""
    x, pairs = normal(2, 5, 3, 80), 32
    x = {
        "start": x[..., 3:67],
        "stride": normal(2, 5, 3, 70)[..., :64],
        "pairs": x[..., :60],
        "fp32": x[..., :64].float(),
    }[what]
    if what == "pairs":
        pairs = 30
    cos, sin = (t.to(x.dtype) for t in tables(2, 5, 1, pairs))
    assert compare_any(monkeypatch, x, cos, sin, interleaved, interleaved_out) == 0


def compare_any(patch: pytest.MonkeyPatch, x: Tensor, *rest: Any) -> int:
    out = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    if x.dtype == torch.bfloat16:
        return compare(patch, out, x, *rest)
    calls: list[Any] = []
    patch.setattr(torch.ops.dsa, "_write_rotated", lambda *args: calls.append(args))
    rotary.write_rotated(out, x, *rest)
    assert out.isfinite().all()
    return len(calls)


def test_far_rows_and_graphs() -> None:
    """Offsets above 2^31 elements, gradients, and a CUDA graph."""
    wide = torch.empty(3, 2**30 + 64, dtype=torch.bfloat16, device="cuda")
    x = wide[:, :640].view(3, 1, 10, 64).requires_grad_()
    positions = torch.full((3, 1), 5, device="cuda")
    with torch.no_grad():
        x.copy_(normal(3, 1, 10, 64))
    out = apply_rope(x, positions, layout="interleaved")
    out.backward(out.detach())
    torch.testing.assert_close(x.grad.float(), x.detach().float(), rtol=2e-2, atol=2e-2)
    near = x.detach().contiguous()
    assert equal(out.detach(), apply_rope(near, positions, layout="interleaved"))
    graph = torch.cuda.CUDAGraph()
    apply_rope(near, positions)
    with torch.cuda.graph(graph):
        captured = apply_rope(near, positions)
    near.mul_(-2)
    graph.replay()
    assert equal(captured, apply_rope(near, positions))
