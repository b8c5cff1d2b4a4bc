"""Small models of transformers with the attention sizes that the operators take."""

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.23")

from dsa_ext.integrations import transformers as integration  # noqa: E402

MODELS = ["DeepseekV32", "GlmMoeDsa"]
VOCABULARY = 100


def make_model(name: str = "DeepseekV32", seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 8,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    if name == "GlmMoeDsa":
        sizes["indexer_types"] = ["full", "shared", "full", "shared"]
    config = getattr(transformers, f"{name}Config")(**sizes | changes)
    config._attn_implementation = "sdpa"
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def tokens(batch: int = 2, seq: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, seq), generator=torch.Generator().manual_seed(seed))


def both(model: Any, **inputs: Any) -> tuple[Any, Any]:
    """The outputs of the model as it is, and on the operators."""
    with torch.no_grad():
        plain = model(**inputs)
        with integration.enable(model):
            return plain, model(**inputs)
