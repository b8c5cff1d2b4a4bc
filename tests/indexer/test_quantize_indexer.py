"""quantize_indexer: its formula, and selections that are bitwise equal in training and in serving."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import dsa_ext

HEADS, TOPK = 8, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(tokens: int, dim: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and weights of so many tokens, with outliers."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q, k = normal(tokens, HEADS, dim), normal(tokens, dim)
    q[..., 3] *= 50
    k[:, 3] *= 50
    return q.bfloat16(), k.bfloat16(), normal(tokens, HEADS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("recipe", ["ue8m0", "ue8m0_hadamard", "fp32"])
def test_formula(recipe: str, dim: int, device: str) -> None:
    q, k, _ = make(20, dim, device)
    results = dsa_ext.quantize_indexer(q, k, recipe)  # type: ignore[arg-type]
    for x, y, scale in ((q, *results[:2]), (k, *results[2:])):
        assert (y.dtype, y.shape) == (torch.float8_e4m3fn, x.shape)
        assert (scale.dtype, scale.shape) == (torch.float32, x.shape[:-1])
        if recipe == "ue8m0_hadamard":
            continue
        expected = x.float().abs().amax(-1).clamp(min=1e-4) / torch.full_like(scale, 448.0)
        if recipe == "ue8m0":
            expected = torch.exp2(expected.log2().ceil())
        assert torch.equal(scale, expected)
        assert torch.equal(y.float(), (x.float() / scale[..., None]).to(torch.float8_e4m3fn).float())
    products = torch.einsum("shd,td->sht", results[0].float() * results[1][..., None], results[2].float())
    error = products * results[3] - torch.einsum("shd,td->sht", q.float(), k.float())
    assert error.norm() < 0.05 * torch.einsum("shd,td->sht", q.float(), k.float()).norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("recipe", ["ue8m0", "ue8m0_hadamard"])
def test_the_same_selection_in_training_and_in_serving(recipe: str, dim: int, device: str) -> None:
    """Two sequences in one packed call, alone, in chunks, and token by token: the same bits."""
    lengths, total = (23, 40), 63
    q, k, weights = make(total, dim, device)
    first = torch.tensor([0] * lengths[0] + [lengths[0]] * lengths[1], device=device, dtype=torch.int32)
    ends = torch.arange(1, total + 1, device=device, dtype=torch.int32)

    def select(rows: slice, keys: slice) -> Tensor:
        """Ids in the packed buffer that the queries `rows` select among `keys`, quantized in this call alone."""
        q8, q_scale, k8, k_scale = dsa_ext.quantize_indexer(q[rows], k[keys], recipe)  # type: ignore[arg-type]
        bounds = ((t[rows] - keys.start).clamp(max=keys.stop - keys.start) for t in (first, ends))
        ids, _ = dsa_ext.indexer_topk(q8, k8, weights[rows] * q_scale, *bounds, TOPK, k_scale=k_scale)
        return torch.where(ids >= 0, ids + keys.start, -1)

    packed = select(slice(0, total), slice(0, total))
    begin = 0
    for length in lengths:
        end = begin + length
        assert torch.equal(select(slice(begin, end), slice(begin, end)), packed[begin:end])
        for step in (1, 7):
            for at in range(begin, end, step):
                rows = slice(at, min(at + step, end))
                assert torch.equal(select(rows, slice(begin, rows.stop)), packed[rows])
        begin = end


@pytest.mark.parametrize("size", [1, 2, 64, 128])
def test_hadamard_transform(size: int) -> None:
    """It is symmetric and orthogonal, its numbers are equal in magnitude, and its first row is constant."""
    matrix = dsa_ext.hadamard_transform(torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix.abs(), torch.full_like(matrix, size**-0.5))
    assert (matrix[0] > 0).all()
    x = torch.randn(3, 5, size, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(dsa_ext.hadamard_transform(x), x @ matrix)
    assert torch.autograd.gradcheck(dsa_ext.hadamard_transform, x)


@pytest.mark.parametrize("recipe", ["ue8m0", "ue8m0_hadamard", "fp32"])
def test_float64_is_rounded_first(recipe: Any) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((50, 8, 128), (70, 128)))
        of_float64 = dsa_ext.quantize_indexer(q, k, recipe)
        of_fp32 = dsa_ext.quantize_indexer(q.float(), k.float(), recipe)
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(of_float64, of_fp32, strict=True))


def test_errors() -> None:
    message = "dsa::hadamard_transform: x must be floating-point [..., a power of 2], got float32 [2, 12]"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        dsa_ext.hadamard_transform(torch.ones(2, 12))
    q, k, _ = make(4, 64, "cpu")
    message = "dsa::quantize_indexer: recipe must be 'ue8m0', 'ue8m0_hadamard' or 'fp32', got 'int8'"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        dsa_ext.quantize_indexer(q, k, "int8")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="dsa::quantize_indexer: k must be on cpu like q, got meta"):
        dsa_ext.quantize_indexer(q, k.to("meta"))
    message = "dsa::quantize_indexer: k must be bfloat16, float32 or float64 [..., 64 or 128], got bfloat16 [4, 63]"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        dsa_ext.quantize_indexer(q, k[:, 1:])
    message = "dsa::quantize_indexer: k must be bfloat16 [..., 128] like q, got bfloat16 [4, 64]"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        dsa_ext.quantize_indexer(torch.cat([q, q], dim=-1), k)
    with pytest.raises(RuntimeError, match=r"k must be bfloat16 .* like q, got float32"):
        dsa_ext.quantize_indexer(q, k.float())
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="quantize_indexer: forward-mode differentiation"):
        dsa_ext.quantize_indexer(q, forward_ad.make_dual(k, torch.ones_like(k)))
    for arguments in ((q, k), (q, k, "ue8m0_hadamard")):
        with pytest.raises(RuntimeError, match=r"^dsa::quantize_indexer: the gradient transforms of torch\.func"):
            torch.func.grad(lambda q, *rest: dsa_ext.quantize_indexer(q, *rest)[1].sum())(*arguments)
