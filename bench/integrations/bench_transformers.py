"""Times training steps of a slice of DeepSeek-V3.2 in Hugging Face transformers, on the operators and as it is; writes
its results file and plot.

The slice has four layers with the sizes of DeepSeek-V3.2, but four experts, in bf16. A step is the forward from token
ids to the loss, and the gradients of all parameters. The time is the median of as many steps as fit in three seconds,
at most ten. The peers are the implementations of transformers; their losses must equal ours up to rounding. The memory
includes weights and gradients.

The cases `..._small` have experts of 512 columns instead of 2048, so that attention is most of the step.

The case `layer` is one attention layer with a learning indexer, beside dsa_ext.nn.SparseMLA on the same input.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bench.common import Case, drawing, grouped_bars, make_case, run, time_versus
from dsa_ext.integrations.transformers import enable
from dsa_ext.nn import SparseMLA

OP = "transformers"
OPERATORS = ["indexer_topk", "sparse_mla_fwd", "attn_dist", "indexer_scores", "indexer_loss"]
OPERATORS += ["indexer_scores_bwd", "sparse_mla_bwd", "sparse_mha_fwd", "sparse_mha_bwd", "sparse_mha_dist"]
VOCABULARY = 1024
STEPS, SMALL_STEPS, LAYER = "Training step", "Training step, small experts", "One attention layer"
EXPERT_COLUMNS, SMALL_EXPERT_COLUMNS = 2048, 512
#: transformers' implementations, and the shortest length at which one ran out of memory, by the size of the experts:
#: longer ones are not tried.
IMPLEMENTATIONS = ("sdpa", "eager")
EXHAUSTED: dict[tuple[str, int], int] = {}
#: Losses are means over thousands of tokens of about ln(VOCABULARY), rounded to bf16 at other places.
LOSS_TOLERANCE = 0.02


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    seq: int
    expert_columns: int = EXPERT_COLUMNS
    train_indexer: bool = False
    compare_to: str | None = None  # a case to divide this one's time by


def specs() -> Iterator[Spec]:
    for seq in (4096, 8192, 16384, 32768, 65536):
        yield Spec(STEPS, f"s{seq}", seq)
    yield Spec("With a learning indexer", "s8192_learning", 8192, train_indexer=True, compare_to="s8192")
    yield Spec(LAYER, "layer", 8192, train_indexer=True)
    for seq in (4096, 8192, 16384, 32768):
        yield Spec(SMALL_STEPS, f"s{seq}_small", seq, SMALL_EXPERT_COLUMNS)


@dataclass(frozen=True)
class Measured:
    loss: float
    ms: float
    peak_mb: float


def make_model(**sizes: int) -> Any:
    """The slice; `sizes` replace those of DeepSeek-V3.2, which are the defaults of its config."""
    torch.manual_seed(0)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    layers = {"num_hidden_layers": 4, "mlp_layer_types": ["sparse"] * 4}
    config = transformers.DeepseekV32Config(vocab_size=VOCABULARY, use_cache=False, **experts, **layers | sizes)
    return transformers.DeepseekV32ForCausalLM(config).train()


@lru_cache(maxsize=1)
def model(expert_columns: int) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return make_model(moe_intermediate_size=expert_columns)
    finally:
        torch.set_default_dtype(before)


def step(module: Any, ids: Tensor) -> Tensor:
    module.zero_grad(set_to_none=True)
    loss: Tensor = module(ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def layer_step(layer: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, dout: Tensor) -> Tensor:
    """Of a layer that returns its output and the indexer's loss."""
    out, loss = layer(x)
    torch.autograd.backward([out, loss], [dout, torch.ones_like(loss)])
    return loss.detach()


def measure_step(call: Callable[[], Tensor]) -> Measured | None:
    """None if the GPU runs out of memory."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    try:
        loss = call().item()
        while len(times) < 10 and sum(times) < 3000:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    except torch.OutOfMemoryError:
        return None
    return Measured(loss, sorted(times)[len(times) // 2], torch.cuda.max_memory_allocated() / 1e6)


def measure(spec: Spec, times: dict[str, float]) -> Case:
    if spec.group == LAYER:
        return measure_layer(spec)
    ids = torch.randint(VOCABULARY, (1, spec.seq), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    causal = model(spec.expert_columns)
    with enable(causal, train_indexer=spec.train_indexer, loss_coeff=0.0 if spec.train_indexer else 1.0):
        ours = measure_step(lambda: step(causal, ids))
    if ours is None:
        raise RuntimeError(f"out of memory at {spec.seq} tokens")
    measured: dict[str, Measured] = {}
    for name in () if spec.train_indexer else IMPLEMENTATIONS:
        causal.set_attn_implementation(name)
        exhausted = EXHAUSTED.get((name, spec.expert_columns), spec.seq + 1)
        peer = measure_step(lambda: step(causal, ids)) if spec.seq < exhausted else None
        if peer is None:
            EXHAUSTED[name, spec.expert_columns] = min(spec.seq, exhausted)
        elif abs(peer.loss - ours.loss) <= LOSS_TOLERANCE:
            measured[name] = peer
        else:
            raise AssertionError(f"the loss is {ours.loss}, that of {name} is {peer.loss}")
    causal.zero_grad(set_to_none=True)
    args = {"B": 1, "S": spec.seq, "layers": 4, "train_indexer": spec.train_indexer}
    args["expert_columns"] = spec.expert_columns
    others: dict[str, Any] = {"loss": round(ours.loss, 4), "peak_mb": round(ours.peak_mb, 1)}
    others |= time_versus(ours.ms, spec.compare_to, times)
    if not measured:
        failure = {} if spec.train_indexer else {"peer_failure": "out of memory"}
        return make_case(spec.name, spec.group, args, ours.ms, **failure, **others)
    fastest = min(measured, key=lambda name: measured[name].ms)
    others["peers_ms"] = {name: round(peer.ms, 4) for name, peer in measured.items()}
    others["peers_peak_mb"] = {name: round(peer.peak_mb, 1) for name, peer in measured.items()}
    others["peer_peak_mb"] = others["peers_peak_mb"][fastest]
    return make_case(spec.name, spec.group, args, ours.ms, peer=(fastest, others["peers_ms"][fastest]), **others)


def layers(causal: Any) -> tuple[Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """An attention layer of `causal`, a model that is enabled with a learning indexer, and SparseMLA with the same
    weights: each as a function of the layer's input that returns its output and the indexer's loss."""
    base = causal.model
    attention, c = base.layers[0].self_attn, causal.config
    weight = attention.o_proj.weight
    indexer = {"heads": c.index_n_heads, "head_dim": c.index_head_dim, "precision": "bf16"}
    sizes = {"nope_dim": c.qk_nope_head_dim, "v_dim": c.v_head_dim, "q_lora_rank": c.q_lora_rank, "topk": c.index_topk}
    theta = c.rope_parameters["rope_theta"]
    own = SparseMLA(
        c.hidden_size, c.num_attention_heads, **sizes, rope_theta=theta, rope="interleaved", indexer=indexer,
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    own.load_state_dict(attention.state_dict())

    def integrated(x: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.arange(x.shape[1], device=x.device)
        out, _ = attention(x, position_embeddings=base.rotary_emb(x, row[None]), attention_mask=None)
        return out, attention._dsa_options.losses[0]

    return integrated, lambda x: own(x)[:2]


def measure_layer(spec: Spec) -> Case:
    causal = model(spec.expert_columns)
    with enable(causal, train_indexer=True):
        integrated, own = layers(causal)
        x, dout = (torch.randn(1, spec.seq, causal.config.hidden_size, device="cuda").bfloat16() for _ in range(2))
        x.requires_grad_()
        measured = [measure_step(lambda layer=layer: layer_step(layer, x, dout)) for layer in (integrated, own)]  # type: ignore[misc]
    causal.zero_grad(set_to_none=True)
    ours, reference = measured
    assert ours is not None
    assert reference is not None
    if not abs(ours.loss - reference.loss) <= 1e-2 * reference.loss:
        raise AssertionError(f"the loss of the indexer is {ours.loss}, that of SparseMLA is {reference.loss}")
    args = {"B": 1, "S": spec.seq, "layers": 1, "train_indexer": True}
    versus = {"SparseMLA": round(ours.ms / reference.ms, 3)}
    return make_case(spec.name, spec.group, args, ours.ms, time_vs=versus)


def plot(cases: list[Case], path: Path) -> None:
    shown = [case for case in cases if case["group"] == STEPS]
    labels = [f"{case['args']['S'] // 1024}K tokens" for case in shown]
    with drawing(path, 9) as axis:
        series = {"dsa_ext": [case["ms"] for case in shown]}
        series |= {name: [case.get("peers_ms", {}).get(name, 0) for case in shown] for name in IMPLEMENTATIONS}
        grouped_bars(axis, labels, series)
        axis.set(title="training step of four layers of DeepSeek-V3.2 in transformers", ylabel="ms", yscale="log")
        axis.margins(y=0.15)
        axis.legend(loc="upper left", fontsize=8)


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, timer="CUDA events, median", operators=OPERATORS)
