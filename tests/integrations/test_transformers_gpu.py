"""transformers' models in bf16 on a GPU, with and without the operators, against eager attention in fp32 on a CPU.

Where both are compared every query selects all its keys, so that no selection depends on rounding; where gradients are,
every token goes to all experts too. The error of
transformers' own bf16 model is the measure: absorbed attention rounds as often, at other places.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import MODELS, integration, make_model, tokens

pytestmark = pytest.mark.gpu
#: How much larger than the error of transformers' bf16 model ours may be.
FACTOR = 2


def make_models(name: str, seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """A bf16 model on the GPU, and one with the same weights in fp32 on the CPU."""
    ours = make_model(name, seed, **{"index_topk": 256} | changes).bfloat16()
    reference = copy.deepcopy(ours).float()
    reference.set_attn_implementation("eager")
    return ours.cuda(), reference


def distance(a: Tensor, b: Tensor) -> float:
    """Relative to the norm of b."""
    return float((a.cpu().float() - b).norm() / b.norm())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("columns", [32, 128])
def test_logits_and_gradients(name: str, checkpointing: bool, columns: int) -> None:
    """Heads of 128 columns, of keys without RoPE and of values, are those that sparse_mha takes."""
    sizes = {"qk_nope_head_dim": columns, "v_head_dim": columns}
    model, reference = make_models(name, num_experts_per_tok=4, **sizes)
    ids = tokens(2, 150)
    results: list[dict[str, Tensor]] = []
    for causal, enabled in ((reference, False), (model, False), (model, True)):
        causal.train()
        handle = integration.enable(causal) if enabled else None
        if checkpointing:
            causal.activation_checkpointing_enable()
        causal.zero_grad()
        inputs = ids.to(causal.device)
        out = causal(inputs, labels=inputs, use_cache=False)
        out.loss.backward()
        named = {n: p.grad.clone() for n, p in causal.named_parameters() if p.grad is not None}
        results.append({"logits": out.logits.detach(), "loss": out.loss.detach().view(1)} | named)
        if handle is not None:
            handle.disable()
    expected, theirs, ours = results
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        assert distance(ours[key], value) <= FACTOR * distance(theirs[key], value) + 3e-3, key


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("cache", "seed"), [("dynamic", 0), ("dynamic", 1), ("dynamic", 2), ("static", 0)])
def test_greedy_tokens(name: str, cache: str, seed: int) -> None:
    """Each of 64 tokens is the reference's best after the same tokens, or as good up to the rounding of bf16. With a
    static cache `generate` compiles the model, which takes most of the time."""
    model, reference = make_models(name, seed)
    prompt = tokens(2, 20, seed).cuda()
    options = {"max_new_tokens": 64, "do_sample": False, "cache_implementation": cache if cache == "static" else None}
    with integration.enable(model):
        generated = model.generate(prompt, **options)
    with torch.no_grad():
        logits = reference(generated.cpu()[:, :-1]).logits[:, 19:]
        rounding = (model(generated[:, :-1]).logits[:, 19:].cpu().float() - logits).abs().amax(-1)
    chosen = logits.gather(-1, generated.cpu()[:, 20:, None])[..., 0]
    assert generated.shape == (2, 84)
    assert (logits.amax(-1) - chosen <= 2 * FACTOR * rounding.max()).all()
    assert (logits.argmax(-1) == generated.cpu()[:, 20:]).float().mean() > 0.8


@pytest.mark.parametrize("name", MODELS)
def test_prefill_in_chunks_and_decode(name: str) -> None:
    """Selections of fewer keys than there are: they depend on the cached indexer keys of earlier chunks."""
    model, _ = make_models(name, index_topk=16)
    ids = tokens(2, 80).cuda()
    with torch.no_grad(), integration.enable(model):
        whole = model(ids).logits
        cache, parts = None, []
        for part in ids.split([33, 30, 1, 1, 15], dim=1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1).float(), whole.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_autocast_and_compile(name: str) -> None:
    """Weights in fp32 under autocast, eager and compiled, beside the model in bf16."""
    model, reference = make_models(name)
    ids = tokens(2, 96).cuda()
    with torch.no_grad():
        expected = reference(ids.cpu()).logits
        theirs = distance(model(ids).logits, expected)
        single = copy.deepcopy(reference).cuda()
        single.set_attn_implementation("sdpa")
        with integration.enable(single), torch.autocast("cuda", torch.bfloat16):
            eager = single(ids).logits
            compiled = torch.compile(single)(ids).logits
    for logits in (eager, compiled):
        assert distance(logits, expected) <= FACTOR * theirs + 3e-3


def test_the_indexer_learns() -> None:
    model, _ = make_models("DeepseekV32", index_topk=32)
    ids = tokens(2, 128).cuda()
    model.train()
    losses = []
    with integration.enable(model, train_indexer=True, loss_coeff=1.0) as handle:
        weights = [p for n, p in model.named_parameters() if ".indexer." in n]
        optimizer = torch.optim.Adam(weights, 3e-3)
        for _ in range(30):
            optimizer.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
            losses.append(handle.indexer_loss().item())
            optimizer.step()
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
