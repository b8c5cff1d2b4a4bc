"""SparseMLA under torch.export, selective checkpointing, and autocast around its backward pass only."""

from functools import partial
from typing import Any

import pytest
import torch
from test_sparse_mla_module_rows import COLUMNS, CU_SEQLENS, make_input, make_layer
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dsa_ext.nn import SparseMLA

#: Of the expanded form, for four heads that select four keys.
LIMIT = 136


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("lengths", [(2, 18, LIMIT), (LIMIT + 2, 160, 4096)])
def test_export(lengths: tuple[int, int, int], gradients: bool, strict: bool) -> None:
    """A length that is dynamic on one side of the limit of the expanded form."""
    least, example, most = lengths
    layer, dynamic = make_layer(**COLUMNS), torch.export.Dim("S", min=least, max=most)
    with torch.set_grad_enabled(gradients):
        given = {"dynamic_shapes": ({1: dynamic},), "strict": strict}
        exported = torch.export.export(layer, (make_input(2, example),), **given).module()
        for seq in (least, example, min(most, 200)):
            x = make_input(2, seq)
            torch.testing.assert_close(exported(x)[0], layer(x).out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize("columns", [{}, COLUMNS], ids=["other columns", "columns of sparse_mha"])
@torch.no_grad()
def test_export_with_any_batch(columns: dict[str, int], phase: Any) -> None:
    """For inference: losses of the warm-up are computed one sequence after another."""
    layer = make_layer(**columns, phase=phase)
    sizes = {0: torch.export.Dim("B", min=2, max=64), 1: torch.export.Dim("S", min=2, max=LIMIT)}
    exported = torch.export.export(layer, (make_input(2, 18),), dynamic_shapes=(sizes,)).module()
    for batch, seq in ((2, 2), (5, 18), (3, LIMIT)):
        x = make_input(batch, seq)
        torch.testing.assert_close(exported(x)[0], layer(x).out, rtol=1e-4, atol=1e-5)


def test_export_with_any_number_of_packed_sequences() -> None:
    layer, x = make_layer(), make_input()
    given = {"cu_seqlens": CU_SEQLENS}
    sizes = {"x": {}, "cu_seqlens": {0: torch.export.Dim("sequences", min=2)}}
    exported = torch.export.export(layer, (x,), given, dynamic_shapes=sizes).module()
    for bounds in (CU_SEQLENS, torch.tensor([0, 7, 18], dtype=torch.int32)):
        expected = layer(x, cu_seqlens=bounds).out
        torch.testing.assert_close(exported(x, cu_seqlens=bounds)[0], expected, rtol=1e-4, atol=1e-5)


def gradients_of(layer: SparseMLA, result: Any) -> list[Tensor]:
    return list(torch.autograd.grad(result.out.sin().sum() + result.indexer_loss, list(layer.parameters())))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("columns", [{}, COLUMNS], ids=["other columns", "columns of sparse_mha"])
@pytest.mark.parametrize("indexer_loss", ["forward", "deferred"])
def test_selective_checkpointing_keeps_the_selection(indexer_loss: Any, columns: dict[str, int], batch: int) -> None:
    layer, x = make_layer(**columns, indexer_loss=indexer_loss), make_input(batch)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.dsa.indexer_topk.default])
    expected = gradients_of(layer, layer(x))
    got = gradients_of(layer, checkpoint(layer, x, use_reentrant=False, context_fn=contexts))
    torch.testing.assert_close(got, expected)


def test_tracing_keeps_the_key_of_queries_whose_scores_are_nan() -> None:
    layer, x = make_layer().requires_grad_(False), make_input()
    torch.nn.init.constant_(layer.indexer.k_norm.weight, torch.nan)
    traced = torch.jit.trace(lambda x: layer.select(x), x, check_trace=False)
    assert traced(x).equal(layer.select(x))
    assert (layer.select(x)[..., 0] >= 0).all()


@pytest.mark.parametrize("batch", [1, 2])
def test_selective_checkpointing_keeps_the_key_of_queries_whose_scores_are_nan(batch: int) -> None:
    layer, x = make_layer(), make_input(batch)
    torch.nn.init.constant_(layer.indexer.k_norm.weight, torch.nan)
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.dsa.indexer_topk.default])
    result = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    assert result.ids[..., 0].equal(torch.arange(x.shape[1], dtype=torch.int32).expand(batch, -1))
    assert (result.ids[..., 1:] == -1).all()
    gradients_of(layer, result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [{}, COLUMNS], ids=["other columns", "columns of sparse_mha"])
@pytest.mark.parametrize("indexer_loss", ["forward", "deferred"])
def test_autocast_around_the_backward_only(indexer_loss: Any, columns: dict[str, int], dtype: torch.dtype) -> None:
    layer = make_layer(**columns, indexer_loss=indexer_loss).float()
    x = make_input(2, 18).float()
    expected, result = gradients_of(layer, layer(x)), layer(x)
    with torch.autocast("cpu", dtype):
        got = gradients_of(layer, result)
    for ours, exact in zip(got, expected, strict=True):  # linear layers multiply in `dtype` there
        assert (ours - exact).norm() <= 2e-2 * exact.norm()
