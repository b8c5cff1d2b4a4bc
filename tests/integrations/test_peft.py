"""Adapters of peft on the operators, against peft on the layers of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers_models import MODELS, integration, make_model, tokens

peft = pytest.importorskip("peft")

PROJECTIONS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


def adapted(model: Any, projections: list[str]) -> Any:
    """With low-rank updates that are not zero."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=projections, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("projections", [PROJECTIONS, ["q_a_proj"], ["o_proj"]], ids=["all", "q_a_proj", "o_proj"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name: str, projections: list[str]) -> None:
    """All keys are selected, so that no two scores can tie."""
    model, ids = adapted(make_model(name), projections).train(), tokens(seq=8)
    results: list[list[Any]] = []
    for enabled in (False, True):
        handle = integration.enable(model) if enabled else None
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
        if handle is not None:
            handle.disable()
    assert len(results[0]) > 4
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-6)


def test_adapters_of_an_enabled_model(tmp_path: Path) -> None:
    """Added, saved, merged and removed while the model is enabled."""
    ids = tokens(seq=8)
    with torch.no_grad():
        expected = adapted(make_model(), PROJECTIONS)(input_ids=ids).logits
        model = make_model()
        plain = model(ids).logits
        with integration.enable(model):
            wrapped = adapted(model, PROJECTIONS)
            torch.testing.assert_close(wrapped(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
            wrapped.save_pretrained(tmp_path)
            with wrapped.disable_adapter():
                torch.testing.assert_close(wrapped(input_ids=ids).logits, plain, rtol=1e-4, atol=1e-5)
            merged = wrapped.merge_and_unload()
            torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)
        loaded = peft.PeftModel.from_pretrained(make_model(), tmp_path)
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
