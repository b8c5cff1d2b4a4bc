"""The kernel of act_quant, bit by bit against the reference on the CPU, and its other promises."""

import pytest
import torch
from streams import captured_and_aside
from torch import Tensor

import dsa_ext
from dsa_ext import reference

pytestmark = pytest.mark.gpu

both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def make(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Blocks with magnitudes from 1e-6 to 1e6."""
    generator = torch.Generator("cuda").manual_seed(seed)
    blocks = torch.randn(*shape[:-1], shape[-1] // 128, 128, generator=generator, device="cuda")
    blocks *= 10 ** (12 * torch.rand(*blocks.shape[:-1], 1, generator=generator, device="cuda") - 6)
    return blocks.flatten(-2).to(dtype)


def bits(y: Tensor) -> Tensor:
    """The bits of fp8 numbers, with one pattern for every NaN."""
    return torch.where(y.float().isnan(), 0x7F, y.view(torch.uint8))


def check(x: Tensor, round_scale: bool = False) -> tuple[Tensor, Tensor]:
    y, s = dsa_ext.act_quant(x, round_scale=round_scale)
    expected_y, expected_s = reference.act_quant(x.cpu(), round_scale)
    assert (y.shape, y.stride(), s.stride()) == (x.shape, expected_y.stride(), expected_s.stride())
    torch.testing.assert_close(s.cpu(), expected_s, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(bits(y).cpu(), bits(expected_y))
    return y, s


@both_dtypes
@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 128),
        (128,),
        (6, 128),
        (2, 33, 128),
        (5, 7, 64, 128),
        (3, 256),
        (7, 1536),
        (8, 1024),
        (9, 1152),
        (2, 33, 640),
        (64, 7168),
        (1000, 2048),
    ],
    ids=str,
)
def test_values(shape: tuple[int, ...], round_scale: bool, dtype: torch.dtype) -> None:
    check(make(*shape, dtype=dtype), round_scale)


def test_every_bf16_number() -> None:
    """All signs and exponents, next to largest elements of many magnitudes: quotients near every tie."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.float().abs() <= 1e30]
    for seed, largest in enumerate((1e-5, 1e-3, 0.7, 1.0, 3.1, 447.0, 448.0, 1e5)):
        shown = numbers[numbers.float().abs() <= largest]
        shown = shown[torch.randperm(len(shown), generator=torch.Generator().manual_seed(seed))]
        shown = shown[: len(shown) // 127 * 127].view(-1, 127)
        check(torch.cat([shown, torch.full_like(shown[:, :1], largest)], 1).cuda())


@both_dtypes
@pytest.mark.parametrize("round_scale", [False, True])
def test_special_values(round_scale: bool, dtype: torch.dtype) -> None:
    x = make(20, 256, dtype=dtype)
    x[0] = 0
    x[1] = -0.0
    x[2, 7], x[3, 130], x[4, 5] = torch.nan, torch.inf, -torch.inf
    x[5, 3:5] = torch.tensor([torch.inf, torch.nan])
    x[6, :128] = 3e38
    x[7, :128] = 1e-40
    x[8, 10:20] = -0.0
    x[9, :64] *= 1e-30
    y, s = check(x, round_scale)
    clean = torch.ones(20, 2, dtype=torch.bool)
    clean[2, 0] = clean[3, 1] = clean[4, 0] = clean[5, 0] = False
    assert torch.equal(s.cpu().isfinite(), clean), "what is not finite stays in its block"
    assert y[2, 128:].float().isfinite().all()


@both_dtypes
def test_layouts(dtype: torch.dtype) -> None:
    x = make(6, 5, 2 * 384, dtype=dtype)
    apart = torch.full((7, 384 + 8), torch.nan, device="cuda", dtype=dtype)
    views = [x.transpose(0, 1), x[:, ::2], x[..., 384:], x[1:2, :, 128:256], x[:, 1], x.mT.contiguous().mT]
    views += [apart[:, 8:], apart[:, 4:-4], apart.flatten()[1 : 1 + 256].view(2, 128), x[:1, :1].expand(3, 4, 768)]
    for view in views:
        if not view.isfinite().all():
            view.copy_(make(*view.shape, dtype=dtype))
        check(view)


@both_dtypes
@pytest.mark.parametrize("columns", [128, 256])
def test_rows_that_are_taken_together_only_where_they_are_contiguous(columns: int, dtype: torch.dtype) -> None:
    """A multiple of 8 rows of one block: contiguous, apart, at odd addresses, repeated, transposed."""
    wide = make(64, 384, dtype=dtype)
    for rows in (
        wide[:, :columns].contiguous(),
        wide[:, :columns],
        wide[:, 128 : 128 + columns],
        wide[:, 1 : 1 + columns],
        wide.view(-1)[1 : 1 + 16 * columns].view(16, columns),
        wide[::2, :columns],
        wide[:1, :columns].expand(24, -1),
        wide[:, :columns].contiguous().view(8, 8, columns).transpose(0, 1),
    ):
        check(rows)


@pytest.mark.parametrize("shape", [(0, 256), (3, 0), (2, 0, 128)], ids=str)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    check(torch.zeros(shape, device="cuda"))


@pytest.mark.gpu_memory(5)
def test_rows_more_than_2_to_the_31_elements_apart() -> None:
    buffer = torch.empty(2**31 + 4096, device="cuda", dtype=torch.bfloat16)
    far = buffer.as_strided((2, 1024), (2**31 + 1024, 1))
    far.copy_(make(2, 1024))
    check(far)


@pytest.mark.gpu_memory(12)
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.randn(1, 4096, device="cuda").bfloat16().expand(2**19 + 3, 4096).contiguous()
    y, s = dsa_ext.act_quant(x)
    expected_y, expected_s = check(x[:1])
    for part in (slice(0, 1000), slice(-1000, None)):
        assert (y[part].view(torch.uint8) == expected_y.view(torch.uint8)).all()
        assert (s[part] == expected_s).all()


def test_graph_capture_at_first_call_and_side_stream() -> None:
    x = make(64, 7168)
    captured, aside = captured_and_aside(dsa_ext.act_quant, x)
    for a, b, c in zip(captured, aside, check(x), strict=True):
        assert torch.equal(a.float(), c.float())
        assert torch.equal(b.float(), c.float())


def test_compile() -> None:
    x = make(64, 1024)
    compiled = torch.compile(dsa_ext.act_quant, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(x), check(x), strict=True):
        assert (a.stride(), a.dtype) == (b.stride(), b.dtype)
        assert torch.equal(a.float(), b.float())
