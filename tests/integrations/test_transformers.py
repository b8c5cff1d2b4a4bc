"""The attention of transformers' DeepSeek-V3.2 and GLM-MoE-DSA models on the operators, against their own, on a CPU in
fp32."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers_models import MODELS, both, integration, make_model, tokens, transformers


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_restoring(name: str) -> None:
    model, ids = make_model(name), tokens()
    plain, ours = both(model, input_ids=ids)
    assert not torch.equal(ours.logits, plain.logits)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain.logits)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(name: str, checkpointing: bool) -> None:
    model, ids = make_model(name).train(), tokens()
    if checkpointing:
        model.activation_checkpointing_enable()
    gradients = []
    for enabled in (False, True):
        handle = integration.enable(model) if enabled else None
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        if handle is not None:
            handle.disable()
    assert gradients[0].keys() == gradients[1].keys()
    assert not any("indexer" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    model, ids = make_model(name), tokens(3, 30)
    mask = torch.ones_like(ids)
    for row, length in enumerate((30, 17, 4)):
        mask[row, slice(None, 30 - length) if side == "left" else slice(length, None)] = 0
    plain, ours = both(model, input_ids=ids, attention_mask=mask)
    is_token = mask.bool()
    torch.testing.assert_close(ours.logits[is_token], plain.logits[is_token], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences(name: str) -> None:
    model, ids = make_model(name), tokens(1, 30)
    positions = torch.cat([torch.arange(n) for n in (11, 1, 18)])[None]
    plain, ours = both(model, input_ids=ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)
    alone, _ = both(model, input_ids=ids[:, 12:])
    torch.testing.assert_close(ours.logits[:, 12:], alone.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["4D", "holes"])
def test_masks(name: str, kind: str) -> None:
    """An additive mask of intervals becomes bounds; a mask with holes runs in transformers, with a warning."""
    model, ids = make_model(name), tokens(1, 20)
    visible = torch.ones(20, 20, dtype=torch.bool).tril()
    if kind == "holes":
        mask = torch.ones_like(ids)
        mask[:, 7] = 0
        with pytest.warns(UserWarning, match="the keys that a query may see are not one interval"):
            plain, ours = both(model, input_ids=ids, attention_mask=mask)
        assert torch.equal(ours.logits[:, 8:], plain.logits[:, 8:])
        return
    visible[10:, :5] = False
    mask = torch.zeros(20, 20).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain, ours = both(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-4, atol=1e-5)


def generation(cache: str, seed: int) -> dict[str, Any]:
    """Arguments of `generate`: 64 tokens after two prompts, of which one is padded on the left."""
    ids = tokens(2, 12, seed)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    arguments = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 64, "do_sample": False}
    return arguments | {"disable_compile": True} | ({"cache_implementation": "static"} if cache == "static" else {})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generation_with_all_keys(name: str, cache: str, seed: int) -> None:
    model = make_model(name, seed, index_topk=100)
    plain = model.generate(**generation(cache, seed))
    with integration.enable(model):
        ours = model.generate(**generation(cache, seed))
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_generation_with_the_same_selection(name: str, cache: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are exactly 0 tie, and torch.topk selects any of them: transformers gets the ids of ours."""
    model, recorded = make_model(name, seed), list[Tensor]()
    select = integration.layers.select_keys

    def select_and_record(*args: Any) -> Tensor:
        recorded.append(select(*args))
        return recorded[-1]

    monkeypatch.setattr(integration.layers, "select_keys", select_and_record)
    with integration.enable(model):
        ours = model.generate(**generation(cache, seed))
    replay = iter(recorded)

    def next_ids(*args: Any, **kwargs: Any) -> Tensor:
        ids = next(replay)
        return torch.where(ids >= 0, ids, ids[..., :1].clamp(min=0))  # transformers has no padding

    for layer in model.model.layers:
        if layer.self_attn.indexer is not None:
            monkeypatch.setattr(layer.self_attn.indexer, "forward", next_ids)
    assert torch.equal(model.generate(**generation(cache, seed)), ours)


@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_chunks(name: str) -> None:
    model, ids = make_model(name), tokens(2, 40)
    with integration.enable(model), torch.no_grad():
        whole = model(ids).logits
        cache = transformers.DynamicCache(config=model.config)
        chunks = [model(part, past_key_values=cache).logits for part in ids.split([17, 1, 1, 21], dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_right_padded_prompts(name: str) -> None:
    model, ids = make_model(name, index_topk=100), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    arguments = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(**arguments)
    with integration.enable(model):
        assert torch.equal(model.generate(**arguments), plain)


def test_hooks_and_soft_masks() -> None:
    model, ids = make_model(initializer_range=0.3), tokens(1, 20)
    handle = model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *args: 1.5 * args[2])
    plain, ours = both(model, input_ids=ids)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-3, atol=1e-4)
    handle.remove()
    distance = torch.arange(20)[:, None] - torch.arange(20)
    soft = (-0.1 * distance).masked_fill(distance < 0, torch.finfo(torch.float32).min)[None, None]
    with pytest.warns(UserWarning, match="not one interval"):
        plain, ours = both(model, input_ids=ids, attention_mask=soft)
    torch.testing.assert_close(ours.logits, plain.logits, rtol=1e-3, atol=1e-4)


def test_compiled_for_other_lengths() -> None:
    """One graph for numbers of keys with as many bits."""
    torch._dynamo.reset()
    model, graphs = make_model(), []
    with integration.enable(model), torch.no_grad():
        compiled = torch.compile(model, dynamic=True, backend=lambda g, _: graphs.append(g) or g.forward)
        for seq, count in {33: 1, 40: 1, 63: 1, 64: 2, 70: 2}.items():
            ids = tokens(2, seq)
            expected = model(ids, use_cache=False).logits
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
            assert len(graphs) == count, seq


def test_compiled_models_refuse_masks_with_holes() -> None:
    torch._dynamo.reset()
    model, ids = make_model(), tokens(1, 20)
    mask = torch.ones_like(ids)
    mask[:, 7] = 0
    with integration.enable(model), torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager")
        with pytest.raises(RuntimeError, match="must be one interval"):
            compiled(ids, attention_mask=mask, use_cache=False)


def test_fp8_indexer_selects_similar_keys() -> None:
    model, ids = make_model(), tokens()
    with torch.no_grad():
        with integration.enable(model):
            expected = model(ids).logits
        with integration.enable(model, indexer="fp8"):
            ours = model(ids).logits
    assert torch.cosine_similarity(ours.flatten(), expected.flatten(), dim=0) > 0.98


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = (
            nn.Linear(*sizes, bias=False) for sizes in ((base.in_features, 3), (3, base.out_features))
        )

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def test_adapters() -> None:
    model, ids = make_model().train(), tokens()
    for layer in model.model.layers:
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    results = []
    for enabled in (False, True):
        handle = integration.enable(model) if enabled else None
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        if handle is not None:
            handle.disable()
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-6)


def test_autocast() -> None:
    model, ids = make_model(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        plain, ours = both(model, input_ids=ids)
    assert torch.cosine_similarity(ours.logits.flatten(), plain.logits.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("name", MODELS)
def test_compile(name: str) -> None:
    torch._dynamo.reset()
    model, ids = make_model(name), tokens()
    with integration.enable(model), torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_layers_that_do_not_fit() -> None:
    model, ids = make_model(index_n_heads=4), tokens()
    message = r"model\.layers\.0\.self_attn: index_n_heads must be one of \(8, 16, 32, 64\), got 4"
    with pytest.raises(ValueError, match=message):
        integration.enable(model)
    with torch.no_grad():
        plain = model(ids).logits
        with integration.enable(model, strict=False):
            assert torch.equal(model(ids).logits, plain)
    biased = make_model()
    projection = biased.model.layers[0].self_attn.kv_b_proj
    projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: kv_b_proj must have no bias, got one$"):
        integration.enable(biased)
    mixed = make_model()
    odd = copy.copy(mixed.config)
    odd.attention_dropout = 0.5
    mixed.model.layers[1].self_attn.config = odd
    plain, _ = both_but_one(mixed, ids)


def both_but_one(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Layers that fit run on the operators, with masks of transformers."""
    with torch.no_grad():
        plain = model(ids).logits
        with integration.enable(model, strict=False):
            ours = model(ids).logits
    assert not torch.equal(ours, plain)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    return plain, ours


def test_error_of_several_models() -> None:
    """Their layers have the same numbers, by which losses and recorded selections are kept."""
    policy_and_reference = nn.ModuleDict({"policy": make_model(), "reference": make_model()})
    with pytest.raises(ValueError, match="enable: ModuleDict contains several models: enable each of them"):
        integration.enable(policy_and_reference)  # type: ignore[arg-type]
    handles = [integration.enable(model) for model in policy_and_reference.values()]
    for handle in handles:
        handle.disable()


def test_errors() -> None:
    with pytest.raises(ValueError, match="enable: indexer must be 'bf16' or 'fp8', got 'int8'"):
        integration.enable(make_model(), indexer="int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="enable: deterministic must be True, False or None, got 'no'"):
        integration.enable(make_model(), deterministic="no")  # type: ignore[arg-type]
    model = make_model()
    with (
        integration.enable(model),
        pytest.raises(ValueError, match="enable: the model is enabled already"),
    ):
        integration.enable(model)
    with pytest.raises(ValueError, match=r"weights must be bfloat16 \(on the CPU also float32\), got float16"):
        integration.enable(make_model().half())
    both = "kv_lora_rank must be 512, got 256; index_n_heads must be one of"
    with pytest.raises(ValueError, match=both):
        integration.enable(make_model(kv_lora_rank=256, index_n_heads=4))
    with pytest.raises(ValueError, match="index_topk must be from 1 to 4096, got 0"):
        integration.enable(make_model(index_topk=0))
    with pytest.raises(ValueError, match="enable: Linear has no layer of DeepseekV32 or GlmMoeDsa"):
        integration.enable(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="enable: model must be a model of transformers, got str"):
        integration.enable("model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="enable: train_indexer must be a bool, got 'yes'"):
        integration.enable(make_model(), train_indexer="yes")  # type: ignore[arg-type]
    for coeff in (-1.0, float("nan"), float("inf"), "a"):
        with pytest.raises(
            ValueError, match=f"enable: loss_coeff must be a finite number of at least 0, got {coeff!r}"
        ):
            integration.enable(make_model(), loss_coeff=coeff)  # type: ignore[arg-type]


def test_handles() -> None:
    model = make_model()
    handle = integration.enable(model)
    assert repr(handle) == f"<Handle of {', '.join(n for n, _ in model.named_modules() if n.endswith('self_attn'))}>"
    with handle.record(), pytest.raises(RuntimeError, match=r"Handle\.record: selections are being recorded already"):
        handle.record().__enter__()
    with pytest.raises(TypeError, match=r"Handle\.replay: ids must be a dict of tensors by layer index, got NoneType"):
        handle.replay(None).__enter__()  # type: ignore[arg-type]
    handle.disable()
    assert repr(handle).endswith(", disabled>")
    for use in (handle.record, lambda: handle.replay({})):
        with pytest.raises(RuntimeError, match="the handle is disabled"):
            use().__enter__()


def test_models_that_do_not_fit() -> None:
    model = make_model(index_n_heads=4)
    with pytest.warns(UserWarning, match="enable: no layer fits, so nothing changes: index_n_heads must be one of"):
        handle = integration.enable(model, strict=False)
    assert repr(handle) == "<Handle of no layer>"
    with pytest.raises(RuntimeError, match=r"Handle\.record: no layer of the model is enabled"), handle.record():
        pass


@pytest.mark.parametrize("name", MODELS)
def test_register(name: str, tmp_path: Any) -> None:
    from transformers.monkey_patching import clear_patch_mapping

    model, ids = make_model(name), tokens()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        plain = model(ids).logits
    integration.register()
    try:
        ours = type(model).from_pretrained(tmp_path).eval()
        small = transformers.AutoModelForCausalLM.from_config(make_model(name, index_n_heads=4).config)
    finally:
        clear_patch_mapping()
    assert type(ours.model.layers[0].self_attn).__name__ == f"Dsa{name}Attention"
    assert type(small.model.layers[0].self_attn).__name__ == f"{name}Attention"
    with pytest.raises(ValueError, match=r"enable: the model was made after register\(\) and cannot be enabled"):
        integration.enable(ours)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, plain, rtol=1e-4, atol=1e-5)


def test_yarn_is_that_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import yarn_apply_mscale

    from dsa_ext.nn import Yarn

    parameters = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = transformers.DeepseekV32Config(rope_parameters=parameters, max_position_embeddings=163840)
    config.head_dim = 64
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config)
    yarn = Yarn(40.0, mscale=0.7)
    plain = 10_000.0 ** (-torch.arange(32) / 32)
    torch.testing.assert_close(yarn.slowed(plain, 10_000.0), frequencies)
    assert yarn.rotated_scale == pytest.approx(scale)
    assert yarn.sm_scale == pytest.approx(yarn_apply_mscale(parameters, 1.0))
