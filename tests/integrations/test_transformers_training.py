"""Training of the indexers of transformers' models, and recorded selections."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_models import MODELS, integration, make_model, tokens, transformers

from dsa_ext.nn import absorption


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_the_indexer(name: str, checkpointing: bool) -> None:
    model, ids = make_model(name, initializer_range=0.3).train(), tokens()
    if checkpointing:
        model.activation_checkpointing_enable()
    plain = model(ids, labels=ids, use_cache=False).loss
    handle = integration.enable(model, train_indexer=True, loss_coeff=0.5)
    loss = model(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, plain + 0.5 * handle.indexer_loss(), rtol=1e-4, atol=1e-5)
    loss.backward()
    learning = {n: p for n, p in model.named_parameters() if ".indexer." in n}
    assert learning
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in learning.values())

    optimizer = torch.optim.Adam(learning.values(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        model(ids, use_cache=False)
        handle.indexer_loss().backward()
        losses.append(handle.indexer_loss().item())
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    with torch.no_grad():
        model(ids)
    with pytest.raises(RuntimeError, match=r"Handle\.indexer_loss: there is no loss"):
        handle.indexer_loss()
    handle.disable()


@pytest.mark.parametrize("name", MODELS)
def test_replay_of_selections(name: str) -> None:
    model, ids = make_model(name), tokens()
    handle = integration.enable(model, train_indexer=True)
    with handle.record() as recorded:
        expected = model(ids, use_cache=False).logits
    selecting = [i for i, layer in enumerate(model.model.layers) if layer.self_attn.indexer is not None]
    assert list(recorded) == selecting
    with torch.no_grad():
        for layer in model.model.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.wq_b.weight.neg_()
    assert not torch.equal(model(ids, use_cache=False).logits, expected)
    with handle.replay(recorded):
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        handle.indexer_loss().backward()
    assert model.model.layers[0].self_attn.indexer.wq_b.weight.grad.abs().sum() > 0
    with handle.record() as again:
        model(ids, use_cache=False)
    assert not torch.equal(again[selecting[0]], recorded[selecting[0]])


@pytest.mark.parametrize("name", MODELS)
def test_replay_of_generation(name: str) -> None:
    """What is recorded while tokens are generated, one by one, is what one forward over them needs."""
    model, prompt = make_model(name), tokens(2, 12)
    with integration.enable(model) as handle, torch.no_grad():
        with handle.record() as recorded:
            text = model.generate(prompt, max_new_tokens=20, do_sample=False)
        logits = model(text[:, :-1]).logits
        with handle.replay(recorded):
            replayed = model(text[:, :-1]).logits
    assert all(ids.shape == (2, 31, 8) for ids in recorded.values())
    torch.testing.assert_close(replayed, logits, rtol=1e-4, atol=1e-5)


def test_replayed_keys_that_a_query_may_not_see_reach_no_result() -> None:
    model, ids = make_model(num_hidden_layers=2), tokens(1, 20)
    handle = integration.enable(model, train_indexer=True)
    every = torch.arange(20, dtype=torch.int32).expand(1, 20, 20)
    results = []
    for listed in (every, torch.where(every <= every.mT, every, -1)):
        with handle.replay({0: listed, 1: listed}):
            results.append((model(ids).logits, handle.indexer_loss()))
    torch.testing.assert_close(*results)


def test_errors_of_replay() -> None:
    model, ids = make_model("GlmMoeDsa"), tokens()
    with integration.enable(model) as handle:
        with (
            pytest.raises(ValueError, match=r"replay: ids must be of the layers \[0, 2\], got \[0\]"),
            handle.replay({0: ids}),
        ):
            pass
        wrong = torch.zeros(2, 64, 8, dtype=torch.int32)
        message = r"replay: ids of layer 0 must be int32 \[2, 40, K\], got int32 \[2, 64, 8\]"
        with handle.replay({0: wrong, 2: wrong}), pytest.raises(ValueError, match=message):
            model(ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count_in_the_loss(side: str) -> None:
    model, ids = make_model(initializer_range=0.3), tokens(1, 40)
    handle = integration.enable(model, train_indexer=True)
    model(ids, use_cache=False)
    expected = handle.indexer_loss()
    padding, is_token = torch.zeros_like(ids), torch.ones_like(ids)
    order = [padding, ids] if side == "left" else [ids, padding]
    mask = [padding, is_token] if side == "left" else [is_token, padding]
    model(torch.cat(order, 1), attention_mask=torch.cat(mask, 1), use_cache=False)
    torch.testing.assert_close(handle.indexer_loss(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:dsa_ext")
def test_a_forward_in_transformers_has_no_indexer_loss() -> None:
    model, ids = make_model().train(), tokens()
    mask = torch.ones_like(ids)
    mask[:, 7] = 0
    plain = model(ids, labels=ids, attention_mask=mask, use_cache=False).loss
    handle = integration.enable(model, train_indexer=True)
    model(ids, labels=ids, use_cache=False).loss.backward()
    with pytest.warns(UserWarning, match="the indexers do not learn in this step"):
        loss = model(ids, labels=ids, attention_mask=mask, use_cache=False).loss
    torch.testing.assert_close(loss, plain)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"Handle\.indexer_loss: there is no loss"):
        handle.indexer_loss()


def test_the_loss_is_added_where_it_is_computed() -> None:
    model, ids = make_model().train(), tokens()
    expected = model(ids, labels=ids, use_cache=False).loss
    wrapper = nn.ModuleDict({"base": model})
    handle = integration.enable(wrapper, train_indexer=True)  # type: ignore[arg-type]
    loss = model(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, expected + handle.indexer_loss(), rtol=1e-4, atol=1e-5)
    handle.disable()
    with pytest.raises(ValueError, match="enable: loss_coeff must be 0, since the model has no head"):
        integration.enable(model.model, train_indexer=True)
    with integration.enable(model.model, train_indexer=True, loss_coeff=0) as handle:
        model(ids, use_cache=False)
        handle.indexer_loss().backward()


def test_ids_of_others_hide_later_keys() -> None:
    model, ids = make_model(), tokens()
    other = torch.cat([ids[:, :20], tokens(seed=1)[:, 20:]], dim=1)
    everything = torch.arange(40, dtype=torch.int32).expand(2, 40, 40).contiguous()
    with integration.enable(model) as handle, handle.replay(dict.fromkeys(range(4), everything)), torch.no_grad():
        logits = [model(x, use_cache=False).logits[:, :20] for x in (ids, other)]
    torch.testing.assert_close(*logits)


def test_reentrant_checkpointing_does_not_train_the_indexer() -> None:
    model, ids = make_model().train(), tokens()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with (
        integration.enable(model, train_indexer=True),
        pytest.warns(UserWarning, match="gradient checkpointing must not be reentrant"),
    ):
        model(ids, labels=ids, use_cache=False).loss.backward()


def test_accumulated_gradients() -> None:
    """With num_items_in_batch, the losses of parts of a batch add up to that of the whole batch."""
    model, ids = make_model(initializer_range=0.3).train(), tokens(4, 24)
    with integration.enable(model, train_indexer=True):
        expected = model(ids, labels=ids, use_cache=False).loss
        items = ids[:, 1:].numel()
        parts = [model(x, labels=x, use_cache=False, num_items_in_batch=items).loss for x in ids.split([1, 3])]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_an_enabled_model(how: Any) -> None:
    model, ids = make_model(initializer_range=0.3).train(), tokens()
    with integration.enable(model, train_indexer=True) as handle:
        expected = model(ids, labels=ids, use_cache=False).loss
        before = handle.indexer_loss()
        other = how(model)
        loss = other(ids, labels=ids, use_cache=False).loss
        torch.testing.assert_close(loss, expected)
        loss.backward()
        assert handle.indexer_loss() is not None
        torch.testing.assert_close(handle.indexer_loss(), before)
    assert other.model.layers[0].self_attn.indexer.wq_b.weight.grad.abs().sum() > 0
    assert model.model.layers[0].self_attn.indexer.wq_b.weight.grad is None


def test_another_model_with_the_same_config() -> None:
    model, ids = make_model(), tokens()
    other = transformers.DeepseekV32ForCausalLM(model.config).eval()
    config = model.config
    with torch.no_grad():
        expected = other(ids).logits
        with integration.enable(model):
            assert torch.equal(other(ids).logits, expected)
            model(ids)
    assert model.config is config
    assert model.model.layers[0].self_attn.config is config


def test_changes_of_the_config_stay() -> None:
    model = make_model()
    with integration.enable(model):
        model.resize_token_embeddings(120, mean_resizing=False)
        model.config.use_cache = False
    assert model.config.vocab_size == 120
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"


def test_what_is_saved_while_enabled(tmp_path: Any) -> None:
    model, ids = make_model(), tokens()
    with torch.no_grad():
        expected = model(ids).logits
    with integration.enable(model):
        model.save_pretrained(tmp_path)
    assert "dsa" not in (tmp_path / "config.json").read_text()
    with torch.no_grad():
        torch.testing.assert_close(type(model).from_pretrained(tmp_path).eval()(ids).logits, expected)


def test_records_follow_a_cropped_cache() -> None:
    """As in assisted generation, which removes tokens that it rejects from the cache."""
    model, ids = make_model(), tokens()
    with integration.enable(model) as handle, torch.no_grad():
        with handle.record() as expected:
            model(ids, use_cache=False)
        cache = transformers.DynamicCache(config=model.config)
        with handle.record() as recorded:
            model(torch.cat([ids[:, :20], ids[:, :5]], dim=1), past_key_values=cache)
            cache.crop(-5)
            model(ids[:, 20:], past_key_values=cache)
    assert all(torch.equal(recorded[layer], expected[layer]) for layer in expected)

    with integration.enable(model) as handle, torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :8], past_key_values=cache)
        with handle.record() as recorded:  # from the ninth token on
            model(ids[:, 8:24], past_key_values=cache)
            cache.crop(-3)
            model(ids[:, 21:], past_key_values=cache)
    assert all(torch.equal(recorded[layer], expected[layer][:, 8:]) for layer in expected)


def test_replay_of_assisted_generation() -> None:
    model, prompt = make_model(), torch.cat([tokens(1, 12)] * 2, dim=1)
    with integration.enable(model) as handle, torch.no_grad():
        with handle.record() as recorded:
            text = model.generate(prompt, max_new_tokens=9, do_sample=False, prompt_lookup_num_tokens=3)
        logits = model(text[:, :-1]).logits
        with handle.replay({layer: ids[:, : text.shape[1] - 1] for layer, ids in recorded.items()}):
            torch.testing.assert_close(model(text[:, :-1]).logits, logits, rtol=1e-4, atol=1e-5)


class Flags(TorchDispatchMode):
    """The argument `deterministic` of the operators that compute gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [argument.name for argument in func._schema.arguments]
        if func.namespace == "dsa" and func._opname.endswith("_bwd"):
            place = arguments.index("deterministic")
            self.seen.setdefault(func._opname, set()).add(len(args) > place and args[place])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_deterministic_gradients(deterministic: bool | None, checkpointing: bool) -> None:
    model, ids = make_model().train(), tokens()
    if checkpointing:
        model.activation_checkpointing_enable()
    with integration.enable(model, train_indexer=True, deterministic=deterministic), Flags() as flags:
        model(ids, labels=ids, use_cache=False).loss.backward()
    wanted = {bool(deterministic)}
    assert flags.seen == {"sparse_mla_bwd": wanted, "indexer_scores_bwd": wanted}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train_indexer", [False, True])
def test_the_first_queries_are_dense(name: str, train_indexer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer, also in those that share an indexer, with what listed keys give."""
    model, ids = make_model(name).train(), tokens()
    rows, plain = [], absorption.ExpandedAttention

    def counted(heads: Any, *args: Any, **options: Any) -> Any:
        rows.append(heads.shape[1])
        return plain(heads, *args, **options)

    monkeypatch.setattr(absorption, "ExpandedAttention", counted)

    def results(deterministic: bool, **inputs: Any) -> list[Any]:
        model.zero_grad()
        with integration.enable(model, train_indexer=train_indexer, deterministic=deterministic):
            out = model(ids, labels=ids, use_cache=False, **inputs)
            out.loss.backward()
        return [out.logits, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = results(True)
    assert not rows
    for inputs in ({}, {"attention_mask": torch.ones_like(ids)}):
        torch.testing.assert_close(results(False, **inputs), expected, rtol=1e-4, atol=1e-5)
    learning = 0 if not train_indexer else sum(layer.self_attn.indexer is not None for layer in model.model.layers)
    passes = 2 * 4 - learning  # forward and backward, but no forward where an indexer learns
    assert rows == [8] * (passes * len(ids) * 2)
    rows.clear()
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    results(False, attention_mask=padded)
    packed = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    results(False, position_ids=packed)
    with integration.enable(model) as handle, torch.no_grad():
        with handle.record() as selections:
            model(ids, use_cache=False)
        with handle.replay(selections):
            model(ids, use_cache=False)
    assert not rows
