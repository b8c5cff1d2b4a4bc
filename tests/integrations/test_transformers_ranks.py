"""Models of transformers with tensor parallel weights, on two ranks with gloo on the CPU, against one rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import gloo_rank
from torch.distributed.tensor import DTensor
from transformers_models import MODELS, integration, make_model, tokens, transformers

pytest.importorskip("accelerate")


def run(rank: int, name: str, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with gloo_rank(rank, 2, folder):
        from transformers.distributed.configuration_utils import DistributedConfig

        kind = getattr(transformers, f"{name}ForCausalLM")
        models = [
            kind.from_pretrained(f"{folder}/model", distributed_config=config).train()
            for config in (None, DistributedConfig(tp_size=2))
        ]
        ids = tokens()
        results: list[list[Any]] = []
        for model in models:
            handle = integration.enable(model, train_indexer=True)
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            results.append([loss.detach(), handle.indexer_loss().detach()])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
        for (n, expected), (_, got) in zip(*(model.named_parameters() for model in models), strict=True):
            if "self_attn" in n:
                gradient = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
                atol = 1e-3 * float(expected.grad.abs().max())  # a score may round across the 0 of relu
                torch.testing.assert_close(gradient, expected.grad, rtol=1e-3, atol=atol, msg=n)


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # transformers would give each rank a GPU of its own
    # All keys are selected: sums over ranks round otherwise, and scores that nearly tie would select other keys.
    make_model(name, initializer_range=0.3, index_topk=100).save_pretrained(tmp_path / "model")
    torch.multiprocessing.spawn(run, (name, str(tmp_path)), nprocs=2)
