"""The indexer's loss at listed keys, against indexer_loss of indexer_scores; and that training makes no pass over lists
besides the operators'."""

from typing import Any

import pytest
import torch
from test_sparse_mla_module_rows import COLUMNS, make_input, make_layer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_ext import functional
from dsa_ext.nn.indexer import IndexerTensors, loss_of_keys, scores_of_keys

SEQ, SLOTS = 9, 6


def make_inputs(batch: int, dtype: torch.dtype = torch.float64) -> tuple[IndexerTensors, Tensor, Tensor]:
    """The tensors of an indexer, ids of which some are no keys, and attention weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, SEQ, 8, 64), (batch, SEQ, 64), (batch, SEQ, 8)
    tensors = (torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)
    ids = torch.randint(-1, SEQ + 1, (batch, SEQ, SLOTS), generator=generator, dtype=torch.int32)
    return IndexerTensors(*tensors), ids, torch.rand(batch, SEQ, SLOTS, generator=generator, dtype=dtype)


def composed(tensors: IndexerTensors, ids: Tensor, p: Tensor, **options: Any) -> Tensor:
    return functional.indexer_loss(scores_of_keys(tensors, ids), p, **options)


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradients(batch: int, reduction: Any, masked: bool) -> None:
    tensors, ids, p = make_inputs(batch)
    options: dict[str, Any] = {"reduction": reduction}
    if masked:
        options |= {"valid": p > 0.2, "row_weights": torch.arange(batch * SEQ).double().view(batch, SEQ) % 3}
    losses = [compute(tensors, ids, p, **options) for compute in (loss_of_keys, composed)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad((0.3 * loss).sin(), tensors) for loss in losses))


def test_autocast_in_either_pass() -> None:
    tensors, ids, p = make_inputs(2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [compute(tensors, ids, p) for compute in (loss_of_keys, composed)]
        torch.testing.assert_close(*losses, rtol=0, atol=0)
    gradients = [torch.autograd.grad(loss, tensors) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=1e-4)  # of q and k in bf16
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of_keys(tensors, ids, p)
        torch.testing.assert_close(torch.autograd.grad(loss, tensors), gradients[0])
    loss = loss_of_keys(tensors, ids, p)
    exact = torch.autograd.grad(loss, tensors, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(torch.autograd.grad(loss, tensors), exact)


@pytest.mark.parametrize("learns", [(True, False, False), (False, True, False), (False, False, True)])
def test_an_indexer_of_which_a_part_learns(learns: tuple[bool, ...]) -> None:
    tensors, ids, p = make_inputs(2)
    given = IndexerTensors(*(t.detach().requires_grad_(r) for t, r in zip(tensors, learns, strict=True)))
    leaves = [t for t in given if t.requires_grad]
    gradients = [torch.autograd.grad(compute(given, ids, p), leaves) for compute in (loss_of_keys, composed)]
    torch.testing.assert_close(*gradients)


def test_batched_gradients() -> None:
    tensors, ids, p = make_inputs(2)
    factors = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    gradients = [
        torch.autograd.grad(compute(tensors, ids, p), tensors, factors, is_grads_batched=True)
        for compute in (loss_of_keys, composed)
    ]
    torch.testing.assert_close(*gradients)


def test_deterministic_reaches_the_backward() -> None:
    tensors, ids, p = make_inputs(1)
    given = []

    class Backward(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.dsa.indexer_scores_bwd.default:
                given.append(args[5:])
            return func(*args, **(kwargs or {}))

    for deterministic in (False, True):
        loss = loss_of_keys(tensors, ids, p, deterministic=deterministic)
        with Backward():
            torch.autograd.grad(loss, tensors)
    assert given == [(), (True,)]


def test_gradients_are_not_differentiable_again() -> None:
    tensors, ids, p = make_inputs(1)
    first, *_ = torch.autograd.grad(loss_of_keys(tensors, ids, p), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match=r"dsa::indexer_scores_bwd: second derivatives \(create_graph=True\)"):
        first.sum().backward()


@pytest.mark.parametrize("name", ["p", "valid", "row_weights"])
def test_wrong_shapes(name: str) -> None:
    tensors, ids, p = make_inputs(2)
    options = {"p": p, "valid": p > 0, "row_weights": p[..., 0]}
    options[name] = options[name].transpose(0, 1)
    with pytest.raises(RuntimeError, match=f"dsa::indexer_loss: {name} must have the shape"):
        loss_of_keys(tensors, ids, **options)


class PassesOverLists(TorchDispatchMode):
    """The operators of PyTorch that read or write a tensor of one number per query and slot."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = numbers
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        copies = not func.is_view and func._opname not in ("detach", "_unsafe_view", "empty", "new_empty")
        if func.namespace == "aten" and copies and any(t.numel() == self.numbers for t in tensors):
            self.names.append(str(func))
        return result


@pytest.mark.parametrize(("indexer_loss", "columns"), [("forward", COLUMNS), ("deferred", COLUMNS), ("deferred", {})])
def test_a_step_makes_no_pass_over_lists(indexer_loss: Any, columns: dict[str, int]) -> None:
    """Where all queries are in one form: expanded in columns that sparse_mha takes, and otherwise absorbed."""
    topk, seq = 7, 101  # prime numbers: no other tensor has so many elements
    layer, x = make_layer(**columns, topk=topk, indexer_loss=indexer_loss), make_input(1, seq)
    with PassesOverLists(seq * topk) as passes:
        result = layer(x)
        torch.autograd.grad((result.out.sin().sum() + 0.5 * result.indexer_loss), list(layer.parameters()))
    assert result.ids.numel() == passes.numbers
    assert passes.names == []
