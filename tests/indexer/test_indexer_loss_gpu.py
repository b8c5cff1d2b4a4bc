"""The kernel of indexer_loss against the reference in float64 on the same GPU, and its other promises."""

import math

import pytest
import torch
from streams import check_script, written_late
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing import tolerances

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.indexer_loss.default
DEVICE = "cuda"


def make_gpu(rows: int, slots: int, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scores, p, valid and row_weights, with -inf and zeros among them; the first row has no valid slot."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=DEVICE)

    scores = torch.randn(rows, slots, generator=generator, device=DEVICE) * scale
    scores[uniform(rows, slots) < 0.1] = -math.inf
    p = uniform(rows, slots) ** 8 * 64
    p[uniform(rows, slots) < 0.1] = 0
    valid = uniform(rows, slots) < 0.8
    valid[:1] = False
    return scores, p, valid, uniform(rows)


def check(scores: Tensor, p: Tensor, valid: Tensor | None = None, row_weights: Tensor | None = None) -> None:
    loss, dscores = OP(scores, p, valid, row_weights)
    args = {"scores": scores, "p": p, "valid": valid, "row_weights": row_weights}
    tolerances.check("indexer_loss", (loss, dscores), args)


@pytest.mark.parametrize("slots", [0, 1, 5, 255, 256, 1023, 2048, 2049, 4099, 8192, 8193, 16384, 16388, 100003])
@pytest.mark.parametrize("rows", [0, 1, 3, 300])
def test_values_and_gradients(rows: int, slots: int) -> None:
    scores, p, valid, weights = make_gpu(rows, slots)
    check(scores, p)
    check(scores, p, valid)
    check(scores, p, valid, weights)
    check(scores, p, row_weights=weights)


def test_large_scores_and_small_teachers() -> None:
    scores, p, valid, weights = make_gpu(50, 3000, scale=300)
    check(scores, p, valid, weights)
    check(scores, p * 1e-9, valid)
    check(scores, p * 1e-19, valid)
    check(scores, p * 0, valid)


def test_large_targets() -> None:
    scores, p, valid, weights = make_gpu(9, 100)
    check(scores, p / 64 * 5e36, valid, weights)


@pytest.mark.parametrize("slots", [2, 3000, 20000])
def test_a_slot_without_target_may_be_out_of_range(slots: int) -> None:
    """The first and the last slot, with none that counts between them."""
    scores, p = torch.full((2, slots), -torch.inf, device="cuda"), torch.zeros(2, slots, device="cuda")
    scores[:, :: slots - 1] = torch.tensor([[3e38, -3e38], [-3e38, 3e38]], device="cuda")
    p[:, :: slots - 1] = torch.tensor([[1.0, 0.0], [0.0, 2.0]], device="cuda")
    loss, dscores = OP(scores, p)
    assert not loss.any()
    assert not dscores.any()
    loss, _ = OP(torch.tensor([[torch.nan, 0.0]], device="cuda"), torch.tensor([[0.0, 1.0]], device="cuda"))
    assert loss.isnan()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    scores, p, valid, weights = make_gpu(9, 300)
    weights[::2] = value
    loss, dscores = OP(scores, p, valid, weights)
    assert loss[0] == 0
    assert not dscores[~(valid & (scores > -math.inf))].any()
    assert not loss[2::2].isfinite().any()
    check(scores, p, valid, weights)


def test_nan_in_rows_of_weight_0() -> None:
    scores, p, valid, weights = make_gpu(9, 300)
    expected = OP(scores, p, valid, weights.masked_fill_(torch.arange(9, device=DEVICE) % 2 == 0, 0))
    scores[::4] = math.nan
    p[2::4] = math.nan
    for got, wanted in zip(OP(scores, p, valid, weights), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not expected[0][::2].any()


def test_nan_stays_in_its_row() -> None:
    scores, p, _, _ = make_gpu(9, 300)
    expected = OP(scores, p)
    scores[4, 7] = math.nan
    p[5, 8] = math.nan
    scores[5, 8] = 1.0
    loss, dscores = OP(scores, p)
    assert loss[4:6].isnan().all()
    others = [row for row in range(9) if row not in (4, 5)]
    assert torch.equal(loss[others], expected[0][others])
    assert torch.equal(dscores[others], expected[1][others])
    check(scores, p, ~(scores.isnan() | p.isnan()))


def test_views() -> None:
    scores, p, valid, weights = make_gpu(41, 1000)
    check(scores[::2, 3:700], p[::2, 1:698], valid[1::2, 300:997][:21].repeat(2, 1)[:21], weights[::2])
    check(scores[:1].expand(9, 1000), p[:9], valid[:1].expand(9, 1000), weights[:1].expand(9))


def test_repeats_are_bitwise_equal() -> None:
    args = make_gpu(500, 2048)
    first = OP(*args)
    for _ in range(25):
        assert all(torch.equal(a, b) for a, b in zip(OP(*args), first, strict=True))


def test_gradient_of_the_mean() -> None:
    scores, p, valid, weights = make_gpu(64, 500)
    leaf = scores.view(4, 16, 500).requires_grad_()
    args = {"valid": valid.view(4, 16, 500), "row_weights": weights.view(4, 16)}
    loss = dsa_ext.indexer_loss(leaf, p.view(4, 16, 500), **args)
    (got,) = torch.autograd.grad(loss, leaf)
    rows, gradient = reference.indexer_loss(scores.double(), p.double(), valid, weights.double())
    torch.testing.assert_close(loss.double(), rows.sum() / weights.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.double().view(64, 500), gradient / weights.sum(), rtol=1e-5, atol=1e-8)


def test_side_stream() -> None:
    scores, p, _, _ = make_gpu(100, 1000)
    expected, _ = OP(scores, p)
    loss, _ = written_late(scores, lambda late: OP(late, p))
    assert torch.equal(loss, expected)


GRAPH_SCRIPT = """
import torch, dsa_ext
scores, p = torch.randn(64, 2048, device="cuda"), torch.rand(64, 2048, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = torch.ops.dsa.indexer_loss(scores, p)
scores.mul_(0.5)
for _ in range(3):
    graph.replay()
assert all(torch.equal(a, b) for a, b in zip(captured, torch.ops.dsa.indexer_loss(scores, p)))
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


def test_opcheck() -> None:
    scores, p, valid, weights = make_gpu(5, 30)
    torch.library.opcheck(OP, (scores.requires_grad_(), p, valid, weights))


def test_errors_on_the_device() -> None:
    scores, p, valid, _ = make_gpu(5, 30)
    with pytest.raises(RuntimeError, match=r"dsa::indexer_loss: p must be on the device of scores, cuda:0, got cpu"):
        OP(scores, p.cpu())
    with pytest.raises(RuntimeError, match=r"dsa::indexer_loss: valid must be on the device of scores"):
        OP(scores, p, valid.cpu())
