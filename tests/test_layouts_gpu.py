"""Every operator in every layout of its arguments, on a GPU: fake results have the layout of real ones, and values do
not depend on the layout."""

from typing import Any

import pytest
import torch
from layouts import ORIGINS, call, calls_in_layouts, check_compiled, dense, expected_of, form, ordinary, torn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa_ext
from dsa_ext import ops

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def is_legal(x: Tensor) -> bool:
    """Whether rows are dense and start 16-byte aligned."""
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    dense = x.shape[-1] <= 1 or x.stride(-1) == 1
    return dense and x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in steps)


def results_or_refusal(op: str, args: dict[str, Any]) -> tuple[Tensor, ...] | str:
    try:
        return call(op, args)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("op", ops.OPERATORS)
@pytest.mark.parametrize("batch", [1, 2])
def test_fake_and_real_results_agree(op: str, batch: int, deterministic_algorithms: None) -> None:
    """A call fails only for the layout of a tensor that is not legal, and the error says so."""
    base = ordinary(op, batch, DEVICE)
    base_results = call(op, base)
    for name, args in calls_in_layouts(op, batch, DEVICE):
        results = results_or_refusal(op, args)
        if isinstance(results, str):
            assert "stride" in results or "aligned" in results, (name, results)
            assert not all(is_legal(value) for value in args.values() if isinstance(value, Tensor)), (name, results)
            continue
        with FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(value) if isinstance(value, Tensor) else value for n, value in args.items()}
            assert [form(result) for result in call(op, fake)] == [form(result) for result in results], name
        for got, expected in zip(results, expected_of(op, args, base, base_results), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


def test_gated_fusion_of_rows_that_empty_like_tears_apart() -> None:
    torch.manual_seed(0)
    fine, coarse, dout = (torch.randn(1, 3, 20, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    args = {"dout": dout, "fine": torn(fine), "coarse": torn(coarse), "gate": torch.randn(1, 3, 20, device=DEVICE)}
    assert torch.empty_like(args["fine"]).stride(3) != 1
    for op in ("gated_fusion_fwd", "gated_fusion_bwd"):
        given = {name: value for name, value in args.items() if op == "gated_fusion_bwd" or name != "dout"}
        for got, expected in zip(call(op, given), call(op, dense(given)), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("within", [False, True])
def test_compile(origin: str, within: bool) -> None:
    check_compiled(origin, DEVICE, torch.bfloat16, within=within)


def test_compile_for_all_sizes() -> None:
    check_compiled("a slice", DEVICE, torch.bfloat16, within=False, dynamic=True)


@pytest.mark.parametrize(
    "arrange",
    [
        lambda x: x[:, :1].expand(-1, 3, -1),
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x[:1, :1].expand(4, 3, -1),
        lambda x: x[..., None, :].expand(-1, -1, 5, -1),
        lambda x: x[:, :, None, :128].expand(-1, -1, 5, -1).transpose(0, 2),
    ],
)
def test_act_quant_of_expanded_tensors(arrange: Any) -> None:
    x = arrange(torch.randn(2, 3, 256, device=DEVICE, dtype=torch.bfloat16))
    for got, expected in zip(dsa_ext.act_quant(x), dsa_ext.act_quant(x.contiguous()), strict=True):
        assert form(got) == form(expected)
        assert torch.equal(got.float(), expected.float())
