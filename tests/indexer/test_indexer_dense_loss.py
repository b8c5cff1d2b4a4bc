"""indexer_dense_loss without a GPU: against the operators that it is made of, and PyTorch's own loss."""

from typing import Any

import pytest
import torch
from callers import assert_error, callers, cpu
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import make_indexer_inputs

OP = "indexer_dense_loss"
S, HI, DI, H, D = 40, 8, 64, 4, 576


def arguments(s_kv: int = S, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(s_kv)
    index = make_indexer_inputs(S, s_kv, HI, DI, dtype=torch.float64)
    main_q = torch.randn(S, H, D, generator=generator, dtype=torch.float64)
    main_kv = torch.randn(s_kv, D, generator=generator, dtype=torch.float64)
    ids = torch.arange(s_kv, dtype=torch.int32).expand(1, S, 1, s_kv)
    _, lse = dsa_ext.sparse_mla(main_q[None], main_kv[None, :, None], ids, q_start=s_kv - S, return_lse=True)
    values = {"q": index.q, "k": index.k, "weights": index.weights, "main_q": main_q, "main_kv": main_kv, "lse": lse[0]}
    rows = torch.float32 if dtype == torch.bfloat16 else dtype
    return {name: value.to(rows if name in ("weights", "lse") else dtype) for name, value in values.items()}


def leaves_of(args: dict[str, Any]) -> list[Tensor]:
    return [args[name].requires_grad_() for name in ("q", "k", "weights")]


def composed(args: dict[str, Any], q_start: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The loss from the scores of all keys and the attention that the keys get."""
    s_kv = len(args["k"])
    ends = (q_start + torch.arange(S) + 1).clamp(max=s_kv) if causal else torch.full((S,), s_kv)
    starts = torch.zeros(S, dtype=torch.int32)
    scores = dsa_ext.indexer_logits(args["q"], args["k"], args["weights"], starts, ends.int())
    ids = torch.arange(s_kv, dtype=torch.int32).expand(1, S, 1, s_kv)
    p = dsa_ext.attn_dist(
        args["main_q"][None], args["main_kv"][None, :, None], ids, args["lse"][None], causal=causal, q_start=q_start
    )
    return scores, p[0, :, 0]


@pytest.mark.parametrize("chunk", [1, 2**24])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_value_and_gradients(
    chunk: int, causal: bool, weighted: bool, reduction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments(53)
    leaves = leaves_of(args)
    row_weights = torch.rand(S, dtype=torch.float64) if weighted else None
    scores, p = composed(args, 13, causal)
    expected = dsa_ext.indexer_loss(scores, p, row_weights=row_weights, reduction=reduction)
    monkeypatch.setattr(reference.indexer, "_CHUNK_ELEMENTS", chunk)
    options: dict[str, Any] = {"row_weights": row_weights, "causal": causal, "q_start": 13, "reduction": reduction}
    loss = dsa_ext.indexer_dense_loss(**args, **options)
    torch.testing.assert_close(loss, expected)
    got = torch.autograd.grad(3 * loss, leaves)
    torch.testing.assert_close(got, torch.autograd.grad(3 * expected, leaves))
    with torch.no_grad():
        torch.testing.assert_close(dsa_ext.indexer_dense_loss(**args, **options), expected)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_may_be_scaled_in_place(reduction: Any) -> None:
    args = arguments(53)
    leaves = leaves_of(args)
    expected = torch.autograd.grad(3 * dsa_ext.indexer_dense_loss(**args, reduction=reduction), leaves)
    loss = dsa_ext.indexer_dense_loss(**args, reduction=reduction)
    loss *= 3
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected)


@pytest.mark.parametrize("name", ["q", "weights", "main_q", "lse"])
def test_rows_of_weight_0_may_hold_nan(name: str) -> None:
    row_weights = (torch.arange(S) % 3).double()
    results = []
    for content in (0.5, torch.nan):
        args = arguments(53)
        args[name][row_weights == 0] = content
        leaves = leaves_of(args)
        loss = dsa_ext.indexer_dense_loss(**args, row_weights=row_weights, q_start=13)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    assert results[0][0] > 0
    assert all(result.isfinite().all() for result in results[1])
    torch.testing.assert_close(results[1], results[0])


def test_it_is_pytorch_s_divergence() -> None:
    args = arguments()
    scores, p = composed(args, 0, False)
    expected = torch.nn.functional.kl_div(scores.log_softmax(-1), p / p.sum(-1, keepdim=True), reduction="batchmean")
    torch.testing.assert_close(dsa_ext.indexer_dense_loss(**args, causal=False), expected)


def test_gradcheck() -> None:
    args = arguments()
    rest = [args[name] for name in ("main_q", "main_kv", "lse")]

    def loss(*leaves: Tensor) -> Tensor:
        return dsa_ext.indexer_dense_loss(*leaves, *rest)

    assert torch.autograd.gradcheck(loss, leaves_of(args), fast_mode=True)


def test_opcheck() -> None:
    args = arguments(dtype=torch.float32)
    leaves_of(args)
    overload = torch.ops.dsa.indexer_dense_loss.default
    torch.library.opcheck(overload, (*args.values(),), {"gradients": True})
    torch.library.opcheck(overload, tuple(value.detach() for value in args.values()))


def test_compile() -> None:
    torch._dynamo.reset()
    args = arguments(dtype=torch.float32)
    leaves = leaves_of(args)
    compiled = torch.compile(dsa_ext.indexer_dense_loss, fullgraph=True, backend="aot_eager")
    got, expected = compiled(**args), dsa_ext.indexer_dense_loss(**args)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize("q_start", [2**31 - 20, 2**40, 2**62])
def test_positions_far_away_see_all_keys(q_start: int) -> None:
    args = arguments(53)
    leaves = leaves_of(args)
    expected = dsa_ext.indexer_dense_loss(**args, causal=False)
    got = dsa_ext.indexer_dense_loss(**args, q_start=q_start)
    assert torch.equal(got, expected)
    assert all(map(torch.equal, torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves)))


@pytest.mark.parametrize("name", ["main_q", "main_kv", "lse", "row_weights"])
def test_teachers_have_no_gradient(name: str) -> None:
    args = arguments() | {"row_weights": torch.ones(S, dtype=torch.float64)}
    args[name] = args[name].requires_grad_()
    message = f"{name} must not require a gradient: only q, k and weights have one"
    assert_error(callers(OP)[1], OP, args, message)


@pytest.mark.parametrize("caller", callers(OP)[1:], ids=["cpu", "fake"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"main_q": torch.zeros(S + 1, H, D)}, "main_q must be bfloat16 [S, H, D], got float32 [41, 4, 576]"),
        (
            {"main_kv": torch.zeros(S, D - 1, dtype=torch.bfloat16)},
            "main_kv must be bfloat16 [S_kv=40, D=576], got bfloat16 [40, 575]",
        ),
        ({"lse": torch.zeros(S, H + 1)}, "lse must be float32 [S=40, H=4], got float32 [40, 5]"),
        ({"row_weights": torch.zeros(S - 1)}, "row_weights must be float32 [S=40], got float32 [39]"),
        *[
            ({"main_q": torch.zeros(S, H, dim).bfloat16(), "main_kv": torch.zeros(S, dim).bfloat16()}, message)
            for dim in (64, 575)
            for message in (f"main_q's head dimension must be 576 or 512, got {dim}",)
        ],
        (
            {"main_q": torch.zeros(S, 129, D).bfloat16(), "lse": torch.zeros(S, 129)},
            "main_q's heads must be at most 128, got 129",
        ),
        ({"weights": torch.zeros(S, HI - 1)}, "weights must be float32 [S=40, Hi=8], got float32 [40, 7]"),
        ({"q_start": -1}, "q_start must be from 0 to 2^62, got -1"),
        ({"q_start": 2**62 + 1}, "q_start must be from 0 to 2^62, got 4611686018427387905"),
        ({"sm_scale": 3e38}, "sm_scale must be from -2^127 to 2^127, got 3e+38"),
        ({"sm_scale": float("nan")}, "sm_scale must be from -2^127 to 2^127, got nan"),
        (
            {"q": torch.zeros(S, HI, DI).to(torch.float8_e4m3fn)},
            "q must be bfloat16, got float8_e4m3fn",
        ),
    ],
)
def test_bad_arguments(caller: Any, changes: dict[str, Any], message: str) -> None:
    assert_error(caller, OP, arguments(dtype=torch.bfloat16) | changes, message)


@pytest.mark.parametrize(("heads", "dim"), [(128, 512), (1, 576), (0, 576)])
def test_shapes_of_the_attention(heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    attention = {
        "main_q": torch.randn(S, heads, dim, generator=generator),
        "main_kv": torch.randn(S, dim, generator=generator),
        "lse": torch.zeros(S, heads),
    }
    args = arguments(dtype=torch.float32) | attention
    expected = dsa_ext.indexer_loss(*composed(args, 0, True))
    torch.testing.assert_close(dsa_ext.indexer_dense_loss(**args), expected)


@pytest.mark.parametrize("gradients", [False, True])
def test_flop_formula(gradients: bool) -> None:
    args = arguments(53)
    with FlopCounterMode(display=False) as counter:
        cpu(OP, **args, gradients=gradients)
    count = 2 * S * 53 * (H * D + (4 if gradients else 1) * HI * DI)
    assert counter.get_flop_counts()["Global"][torch.ops.dsa.indexer_dense_loss] == count


def test_bad_reduction() -> None:
    with pytest.raises(RuntimeError, match="reduction must be 'mean' or 'sum', got 'none'"):
        dsa_ext.indexer_dense_loss(**arguments(), reduction="none")  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_empty_tensors(sizes: tuple[int, int]) -> None:
    seq, s_kv = sizes
    index = make_indexer_inputs(seq, s_kv, HI, DI, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (index.q, index.k, index.weights)]
    loss = dsa_ext.indexer_dense_loss(*leaves, torch.ones(seq, H, D), torch.ones(s_kv, D), torch.ones(seq, H))
    assert loss == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, leaves))


def test_results_without_gradients() -> None:
    loss, *gradients = cpu(OP, **arguments())
    assert loss > 0
    assert all(gradient.numel() == 0 for gradient in gradients)
