"""The first queries of SparseMLA, which see no more keys than are selected, on the CPU."""

from typing import Any

import pytest
import torch
from test_sparse_mla_module import TOPK, make_input, make_layer, total
from torch import Tensor

from dsa_ext.nn import absorption


@pytest.mark.parametrize("seq", [3, TOPK, 9])
@pytest.mark.parametrize("plain_output", [False, True])
def test_the_first_queries(seq: int, plain_output: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """See no more keys than are selected: their attention is dense, with the results and the gradients of listed keys,
    which all queries have with deterministic gradients."""
    layer, x = make_layer(), make_input(seq=seq).requires_grad_()
    if not plain_output:
        layer.o_proj.register_forward_hook(lambda *_: None)
    rows = expanded_rows_of(monkeypatch)

    def results() -> tuple[Tensor, ...]:
        result = layer(x)
        loss = result.out.sin().sum() + result.indexer_loss
        return result.out, result.indexer_loss, *torch.autograd.grad(loss, [x, *layer.parameters()])

    torch.use_deterministic_algorithms(True)
    try:
        expected = results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not rows
    torch.testing.assert_close(results(), expected)
    assert rows == [min(seq, TOPK)] * (1 if seq <= TOPK else 2)
    with torch.no_grad():
        torch.testing.assert_close(layer(x).out, expected[0])


def test_queries_that_are_not_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed sequences, and of ids from elsewhere, which may be any."""
    layer, x = make_layer(), make_input(1)
    rows = expanded_rows_of(monkeypatch)
    packed = layer(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    total(packed).backward()
    own = torch.arange(9, dtype=torch.int32).view(1, 9, 1)
    total(layer(x, ids=own)).backward()
    assert not rows


def expanded_rows_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the number of queries of each dense attention."""
    rows, plain = [], absorption.ExpandedAttention

    def counted(heads: Tensor, *args: Any, **options: Any) -> Any:
        rows.append(heads.shape[1])
        return plain(heads, *args, **options)

    monkeypatch.setattr(absorption, "ExpandedAttention", counted)
    return rows
