"""The inputs of tests and benchmarks: lists of keys."""

import pytest
import torch

from dsa_ext.testing.inputs import drift_indices


def distinct(lists: torch.Tensor) -> int:
    return len(lists.unique())


def test_shares_of_drifting_lists() -> None:
    queries, topk, s_kv = 64, 1024, 16384
    lists = drift_indices((1, queries, 1, topk), s_kv, torch.Generator().manual_seed(0))[0, :, 0]
    assert ((lists >= 0) & (lists < s_kv)).all()
    assert (lists.diff() > 0).all()
    shared = [2 - distinct(lists[i : i + 2]) / topk for i in range(queries - 1)]
    assert sum(shared) / len(shared) == pytest.approx(0.4, abs=0.03)
    for neighbors, keys in ((4, 2.2), (8, 2.9)):
        unions = [distinct(run) / topk for run in lists.split(neighbors)]
        assert sum(unions) / len(unions) == pytest.approx(keys, abs=0.1)


def test_causal_lists_that_drift() -> None:
    lists = drift_indices((1, 100, 1, 40), 100, torch.Generator().manual_seed(0), causal=True)[0, :, 0]
    position = torch.arange(100)[:, None]
    assert (lists <= position).all()
    assert ((lists >= 0).sum(1) == (position[:, 0] + 1).clamp(max=40)).all()
    assert (lists[:40] == torch.where(torch.arange(40) <= position[:40], torch.arange(40), -1)).all()
    assert all(distinct(row[row >= 0]) == int((row >= 0).sum()) for row in lists)


def test_drifting_lists_of_few_keys() -> None:
    lists = drift_indices((2, 9, 3, 40), 30, torch.Generator().manual_seed(0))
    assert lists.shape == (2, 9, 3, 40)
    assert (lists == torch.cat([torch.arange(30), torch.full((10,), -1)])).all()
    assert (drift_indices((1, 2, 1, 5), 0, torch.Generator()) == -1).all()
