"""The benchmark of the sparse MLA layer: its dense layer computes what SparseMLA does, and it counts every operator."""

import importlib
from types import ModuleType

import pytest
import torch

from dsa_ext.nn import SparseMLA


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("bench.sparse_mla.bench_sparse_mla_layer")


@pytest.fixture
def layer() -> SparseMLA:
    torch.manual_seed(0)
    indexer = {"heads": 8, "head_dim": 64}
    sizes = {"q_lora_rank": 32, "nope_dim": 16, "v_dim": 24, "topk": 5, "rope_theta": 100.0}
    return SparseMLA(48, 4, **sizes, indexer=indexer, dtype=torch.float64)


@pytest.mark.parametrize("pad_values", [False, True])
def test_dense_layer(bench: ModuleType, layer: SparseMLA, pad_values: bool) -> None:
    layer.phase = "dense"
    x = torch.randn(2, 9, 48, dtype=torch.float64)
    torch.testing.assert_close(bench.dense_layer(layer, x, pad_values=pad_values), layer(x).out)


def test_operators_of_a_step(bench: ModuleType, layer: SparseMLA, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """An event after which 1 ms passes."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def elapsed_time(self, _end: "Event") -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    x = torch.randn(2, 9, 48, dtype=torch.float64)
    step = bench.Step(lambda: layer(x)[:2], list(layer.parameters()), torch.ones_like(x))
    times = step.operator_times()
    assert times.pop("matmul") >= 9 + 13, "seven projections and two einsums, and their gradients but those of inputs"
    assert {"indexer_topk", "sparse_mla_fwd", "attn_dist", "indexer_scores", "indexer_loss"} <= set(times)
    assert times["sparse_mla_bwd"] == 2, "one for each sequence"
    assert times["sparse_mla_fwd"] == 4, "also of the first rows, for the target of the indexer"
    assert step.times() == {"forward": 1, "backward": 1}
