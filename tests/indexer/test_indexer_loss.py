"""indexer_loss without a GPU: its reference against torch.nn.functional.kl_div; the operator."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from torch import Tensor
from torch.nn.functional import kl_div

import dsa_ext
from dsa_ext.testing.inputs import make_indexer_inputs, make_inputs

OP = torch.ops.dsa.indexer_loss.default
native, cpu, fake = callers("indexer_loss")
R, K = 4, 7


def arguments(**changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "scores": torch.randn(R, K, generator=generator),
        "p": torch.rand(R, K, generator=generator),
        "valid": torch.rand(R, K, generator=generator) < 0.7,
        "row_weights": torch.rand(R, generator=generator),
        **changes,
    }


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"scores": torch.zeros(R, K).bfloat16()}, "scores must be float32 [R, K], got bfloat16 [4, 7]"),
    ({"scores": torch.zeros(1, R, K)}, "scores must be float32 [R, K], got float32 [1, 4, 7]"),
    ({"p": torch.zeros(K, R)}, "p must be float32 [R=4, K=7], got float32 [7, 4]"),
    ({"p": torch.zeros(R, K).double()}, "p must be float32 [R, K], got float64 [4, 7]"),
    ({"valid": torch.zeros(R, K)}, "valid must be bool [R, K], got float32 [4, 7]"),
    ({"valid": torch.zeros(R, 1).bool()}, "valid must be bool [R=4, K=7], got bool [4, 1]"),
    ({"row_weights": torch.zeros(R, 1)}, "row_weights must be float32 [R], got float32 [4, 1]"),
    ({"row_weights": torch.zeros(K)}, "row_weights must be float32 [R=4], got float32 [7]"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, "indexer_loss", arguments(**changes), message)


def test_errors_of_layout_and_device() -> None:
    with pytest.raises(RuntimeError, match="scores must have stride 1 in its last dimension, got stride 4"):
        native(**arguments(scores=torch.zeros(K, R).T))
    with pytest.raises(RuntimeError, match="scores must be on a CUDA device, got cpu"):
        native(**arguments(p=torch.zeros(R, 3 * K)[:, 1 : K + 1], scores=torch.zeros(1, K).expand(R, K)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("p", (6, 2, 3)), ("p", (12, 3)), ("valid", (3, 4, 3)), ("row_weights", (6, 2)), ("row_weights", (12,))],
)
def test_leading_dimensions_are_those_of_scores(name: str, shape: tuple[int, ...]) -> None:
    args = {"p": torch.rand(2, 6, 3)}
    args[name] = torch.ones(shape, dtype=torch.bool if name == "valid" else torch.float32)
    with pytest.raises(RuntimeError, match=f"^dsa::indexer_loss: {name} must have the shape .* of scores, got"):
        dsa_ext.indexer_loss(torch.randn(2, 6, 3), **args)


def test_errors_of_the_function() -> None:
    args = arguments()
    scores, p = args.pop("scores"), args.pop("p")
    with pytest.raises(RuntimeError, match="reduction must be 'none', 'mean' or 'sum', got 'average'"):
        dsa_ext.indexer_loss(scores, p, reduction="average")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="p must not require a gradient: only scores has one"):
        dsa_ext.indexer_loss(scores, p.requires_grad_())
    with pytest.raises(RuntimeError, match="row_weights must not require a gradient: only scores has one"):
        dsa_ext.indexer_loss(scores, p.detach(), row_weights=args["row_weights"].requires_grad_())


def expected_rows(scores: Tensor, p: Tensor, counts: Tensor) -> Tensor:
    """Row by row with PyTorch's operators, from the valid slots only."""
    rows = []
    for row_scores, row_p, row_counts in zip(scores, p, counts, strict=True):
        target = row_p[row_counts] / row_p[row_counts].sum()
        log_q = row_scores[row_counts].log_softmax(-1)
        rows.append(kl_div(log_q, target, reduction="sum") if row_counts.any() else scores.new_zeros(()))
    return torch.stack(rows)


@pytest.mark.parametrize("with_valid", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_kl_div(with_valid: bool, with_weights: bool, reduction: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 3, 50, generator=generator, dtype=torch.float64) * 3
    p = torch.rand(2, 3, 50, generator=generator, dtype=torch.float64) * 64
    p[..., ::7] = 0
    scores[..., 3::9] = -math.inf
    valid = torch.rand(2, 3, 50, generator=generator) < 0.6 if with_valid else None
    if valid is not None:
        valid[0, 1] = False
    weights = torch.rand(2, 3, generator=generator, dtype=torch.float64) if with_weights else None
    counts = (scores > -math.inf) & (True if valid is None else valid)

    leaf, other = scores.clone().requires_grad_(), scores.clone().requires_grad_()
    loss = dsa_ext.indexer_loss(leaf, p, valid=valid, row_weights=weights, reduction=reduction)
    rows = expected_rows(other.flatten(0, 1), p.flatten(0, 1), counts.flatten(0, 1)).view(2, 3)
    weighted = rows if weights is None else rows * weights
    total = 6 if weights is None else weights.sum()
    expected = {"none": weighted, "mean": weighted.sum() / total, "sum": weighted.sum()}[reduction]
    torch.testing.assert_close(loss, expected)
    upstream = torch.rand(loss.shape, generator=generator, dtype=torch.float64)
    (got,) = torch.autograd.grad(loss, leaf, upstream)
    (wanted,) = torch.autograd.grad(expected, other, upstream)
    torch.testing.assert_close(got, wanted.masked_fill(~counts, 0))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_may_be_scaled_in_place(reduction: Any) -> None:
    scores, p = torch.randn(5, 7).requires_grad_(), torch.rand(5, 7)
    (expected,) = torch.autograd.grad(3 * dsa_ext.indexer_loss(scores, p, reduction=reduction).sum(), scores)
    loss = dsa_ext.indexer_loss(scores, p, reduction=reduction)
    loss *= 3
    loss.sum().backward()
    torch.testing.assert_close(scores.grad, expected)


def test_rows_without_a_slot_or_a_teacher() -> None:
    scores = torch.tensor([[-math.inf] * 3, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]).requires_grad_()
    p = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    valid = torch.tensor([[True] * 3, [True] * 3, [False] * 3])
    for reduction in ("mean", "sum"):
        loss = dsa_ext.indexer_loss(scores, p, valid=valid, reduction=reduction)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss, scores)
        assert loss == 0
        assert (gradient == 0).all()
    assert dsa_ext.indexer_loss(scores, p, row_weights=torch.zeros(3)) == 0
    assert dsa_ext.indexer_loss(scores[:0], p[:0]) == 0
    assert dsa_ext.indexer_loss(scores[:, :0], p[:, :0]) == 0


def test_a_slot_without_target_may_be_out_of_range() -> None:
    """The difference of the two scores overflows, but it is multiplied by a target of 0."""
    scores, p = torch.tensor([[3e38, -3e38], [-3e38, 3e38]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    loss, dscores = torch.ops.dsa.indexer_loss(scores, p)
    assert not loss.any()
    assert not dscores.any()
    loss, _ = torch.ops.dsa.indexer_loss(torch.tensor([[math.nan, 0.0]]), torch.tensor([[0.0, 1.0]]))
    assert loss.isnan()


@pytest.mark.parametrize("scale", [1e-12, 1e-19])
def test_targets_with_a_small_sum(scale: float) -> None:
    """Heads whose attention is elsewhere, in a sink for example, leave little to the listed keys."""
    scores, p = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.1]])
    for got, expected in zip(
        torch.ops.dsa.indexer_loss(scores, p * scale), torch.ops.dsa.indexer_loss(scores, p), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_nan_in_a_row_of_weight_0() -> None:
    scores = torch.tensor([[1.0, math.nan], [1.0, 2.0]]).requires_grad_()
    loss = dsa_ext.indexer_loss(scores, torch.ones(2, 2), row_weights=torch.tensor([0.0, 1.0]))
    (gradient,) = torch.autograd.grad(loss, scores)
    assert loss > 0
    assert gradient.isfinite().all()
    assert not gradient[0].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    """They do not reach slots and rows that do not count."""
    args = arguments(row_weights=torch.full((R,), value))
    args["valid"][0], args["valid"][1:, 0] = False, True
    loss, dscores = OP(**args)
    assert loss[0] == 0
    assert not loss[1:].isfinite().any()
    assert not dscores[~args["valid"]].any()


def test_a_negative_target_is_nan() -> None:
    args = arguments(valid=None)
    args["p"][1, 2] = -1.0
    loss, _ = OP(**args)
    assert loss.isnan().tolist() == [False, True, False, False]


def test_the_loss_of_a_perfect_indexer() -> None:
    scores = torch.randn(5, 40, dtype=torch.float64).requires_grad_()
    loss = dsa_ext.indexer_loss(scores, 7 * scores.detach().softmax(-1))
    (gradient,) = torch.autograd.grad(loss, scores)
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_gradcheck() -> None:
    args = arguments()
    double = {name: t.double() if t.is_floating_point() else t for name, t in args.items()}
    scores = double.pop("scores").requires_grad_()
    assert torch.autograd.gradcheck(lambda s: dsa_ext.indexer_loss(s, reduction="none", **double), scores)


@pytest.mark.parametrize("names", [(), ("valid",), ("valid", "row_weights")])
def test_opcheck(names: tuple[str, ...]) -> None:
    args = arguments()
    torch.library.opcheck(OP, (args["scores"].requires_grad_(), args["p"]), {name: args[name] for name in names})


def test_training_step_of_an_indexer() -> None:
    """Scores of the listed keys against the attention that they get: the whole chain, compiled."""
    small = make_indexer_inputs(6, 12, 8, 64, dtype=torch.float32)
    attended = make_inputs(1, 6, 12, 4, 1, 12, 576, dtype=torch.float32)
    _, lse = dsa_ext.sparse_mla(attended.q, attended.kv, attended.indices, return_lse=True, q_start=6)
    p = dsa_ext.attn_dist(attended.q, attended.kv, attended.indices, lse, q_start=6)
    q = small.q.requires_grad_()

    def step(q: Tensor) -> Tensor:
        logits = dsa_ext.indexer_logits(q, small.k, small.weights, small.ks, small.ke)
        listed = logits.gather(1, attended.indices[0, :, 0].long())
        return dsa_ext.indexer_loss(listed, p[0, :, 0])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(step(q), q)
    torch.testing.assert_close(torch.autograd.grad(compiled(q), q), expected)
    assert expected[0].abs().sum() > 0
