"""The benchmark of transformers' models: both attention layers that it compares compute the same."""

import importlib

import torch
from transformers_models import integration


def test_layers() -> None:
    bench = importlib.import_module("bench.integrations.bench_transformers")
    sizes = {"hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
    model = bench.make_model(**sizes, index_n_heads=16, index_head_dim=128, index_topk=6)
    x = torch.randn(1, 20, 48)
    with integration.enable(model, train_indexer=True):
        integrated, own = bench.layers(model)
        torch.testing.assert_close(integrated(x), own(x), rtol=1e-4, atol=1e-5)
        loss = bench.step(model, torch.randint(bench.VOCABULARY, (1, 20)))
    assert 0 < loss < 20
    assert all(p.grad is not None for n, p in model.named_parameters() if ".indexer." in n)
