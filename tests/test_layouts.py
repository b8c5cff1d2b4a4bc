"""Every operator in every layout of its arguments, on the CPU: fake results have the layout of real ones, and values do
not depend on the layout."""

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from callers import to_fake_cuda
from hypothesis import given
from hypothesis import strategies as st
from layouts import ORIGINS, call, calls_in_layouts, check_compiled, expected_of, form, ordinary
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsa_ext import ops
from dsa_ext.reference.layout import empty_rows_like

all_operators = pytest.mark.parametrize("op", ops.OPERATORS)


def fake_forms(op: str, args: dict[str, Any], device: str) -> list[tuple[Any, ...]]:
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return to_fake_cuda(value) if device == "cuda" else mode.from_tensor(value)

        return [form(result) for result in call(op, {name: fake(value) for name, value in args.items()})]


@all_operators
@pytest.mark.parametrize("batch", [1, 2])
def test_fake_and_real_results_agree(op: str, batch: int) -> None:
    base = ordinary(op, batch)
    base_results = call(op, base)
    for name, args in calls_in_layouts(op, batch):
        results = call(op, args)
        forms = [form(result) for result in results]
        for device in ("cpu", "cuda"):
            assert fake_forms(op, args, device) == forms, (name, device)
        for got, expected in zip(results, expected_of(op, args, base, base_results), strict=True):
            # With another layout, products may be summed in another order.
            scale = float(expected.double().nan_to_num(0, 0, 0).abs().amax()) if expected.numel() else 0.0
            torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=scale / 64, equal_nan=True)


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """Any sizes, in any order in memory, with gaps, expanded dimensions, and any stride of dimensions of size 1."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    strides, stride = [0] * len(sizes), draw(st.sampled_from([1, 1, 8]))
    for dim in draw(st.permutations(range(len(sizes)))):
        strides[dim] = draw(st.sampled_from([stride, stride, stride, 0]))
        if sizes[dim] == 1:
            strides[dim] = draw(st.sampled_from([stride, 0, 1, 7, 12345]))
        stride *= max(1, sizes[dim]) + draw(st.sampled_from([0, 0, 0, 2]))
    return torch.empty_strided(sizes, strides, device="meta")


@given(x=strided())
def test_dense_strides_are_those_of_empty_like(host_functions: ModuleType, x: Tensor) -> None:
    got = torch.empty_strided(x.shape, host_functions.dense_strides(list(x.shape), list(x.stride())), device="meta")
    assert form(got) == form(torch.empty_like(x))


@given(x=strided(), columns=st.sampled_from([8, 64]))
def test_rows_of_results_are_dense(host_functions: ModuleType, x: Tensor, columns: int) -> None:
    """If the rows of the argument are dense and start aligned."""
    strides = [
        *(stride if size == 1 else columns * stride for size, stride in zip(x.shape, x.stride(), strict=True)),
        1,
    ]
    x = torch.empty_strided((*x.shape, columns), strides, device="meta")
    got = torch.empty_strided(x.shape, host_functions.dense_row_strides(list(x.shape), strides), device="meta")
    assert form(got) == form(empty_rows_like(x))
    if x.numel() > 0:
        assert got.stride(-1) == 1
        assert all(size == 1 or stride % columns == 0 for size, stride in zip(x.shape[:-1], got.stride(), strict=False))


@all_operators
def test_empty_tensors(op: str) -> None:
    """Each dimension that may have size 0, in two orders in memory."""
    base = ordinary(op, 2)
    tensors = {name: value for name, value in base.items() if isinstance(value, Tensor)}
    sizes = {size for value in tensors.values() for size in value.shape[:-1] if size > 1}
    for size in sizes:
        args = dict(base)
        for name, value in tensors.items():
            for dim in range(value.dim()):
                if value.shape[dim] == size:
                    args[name] = args[name].narrow(dim, 0, 0)
        for arrange in (Tensor.contiguous, lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0)):
            arranged = {name: arrange(args[name]) for name in tensors}
            try:
                forms = [form(result) for result in call(op, args | arranged)]
            except RuntimeError as error:  # sizes that must not be 0
                with pytest.raises(RuntimeError, match=f"^{re.escape(str(error))}$"):
                    fake_forms(op, args | arranged, "cpu")
                continue
            for device in ("cpu", "cuda"):
                assert fake_forms(op, args | arranged, device) == forms, size


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(origin: str, dynamic: bool) -> None:
    check_compiled(origin, "cpu", torch.float32, within=False, dynamic=dynamic, backend="aot_eager")


def test_inductor() -> None:
    """Inductor asserts the strides of results."""
    check_compiled("sequence first", "cpu", torch.float32, within=True)
