"""Times training steps of dsa_ext.nn.SparseMLA and of dense attention in PyTorch; writes its results file and plot.

Sizes are those of DeepSeek-V3.2: 128 heads, hidden_size 7168, q_lora_rank 1536, an indexer of 64 heads of 128 columns,
2048 keys per query; with 64 and 16 heads hidden_size is 4096 and 2048. The indexer is the same in all cases, so that
cases of one length have the same cost of selection. A step is the forward with the indexer's loss, and the gradients of
all parameters and of the input, in bf16. The time is the median of as many steps as fit in a second, at most ten.

The peer is dense_layer: the same parameters in multi-head form, without an indexer; of packed sequences, as a batch. A
query at a position below 2048 reads all its keys in both, so these rows are checked against each other in every case.

`glue` is the part of the layer's step that is not spent in its operators and in matmuls, each of which is timed within
the step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common import PEER_SIMILARITY, Case, drawing, grouped_bars, make_case, run, time_versus
from dsa_ext.nn import SparseMLA, apply_rope
from dsa_ext.testing.tolerances import similarity_error

OP = "sparse_mla_layer"
OPERATORS = ["act_quant", "indexer_topk", "sparse_mla_fwd", "attn_dist", "indexer_scores", "indexer_loss"]
OPERATORS += ["indexer_scores_bwd", "sparse_mla_bwd", "sparse_mha_fwd", "sparse_mha_bwd", "sparse_mha_dist"]
TOPK = 2048
HIDDEN_SIZE = {128: 7168, 64: 4096, 16: 2048}
MATMULS = [getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "addmm_", "baddbmm_")]
#: About 10 ms, in which the host gets ahead of the GPU, as it is between the layers of a model.
LEAD_CYCLES = 20_000_000
#: PyTorch's attention backends, the fastest first. Flash attention requires values as wide as keys. cuDNN does not, but
#: some versions support no heads of 192 columns.
BACKENDS = {"cuDNN": (SDPBackend.CUDNN_ATTENTION, False), "flash": (SDPBackend.FLASH_ATTENTION, True)}

Times = dict[str, float]


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    heads: int
    seq: int
    compiled: bool = False
    packed: int = 1  # sequences of equal length in the rows of x
    max_seqlen: bool = True  # whether the layer knows this length
    compare_to: str | None = None  # a case to divide this one's time by


def specs() -> Iterator[Spec]:
    for heads in HIDDEN_SIZE:
        for seq in (8192, 32768, 131072):
            yield Spec(f"{heads} heads", f"h{heads}_s{seq}", heads, seq)
    yield Spec("torch.compile", "h128_s8192_compiled", 128, 8192, compiled=True, compare_to="h128_s8192")
    for packed in (4, 8, 16):
        name = f"h128_s32768_packed{packed}"
        yield Spec("Packed sequences", name, 128, 32768, packed=packed)
        yield Spec("Packed sequences", f"{name}_unknown", 128, 32768, packed=packed, max_seqlen=False, compare_to=name)


def dense_layer(layer: SparseMLA, x: Tensor, *, pad_values: bool = False) -> Tensor:
    """What `layer` computes in its dense phase, in plain PyTorch: with keys and values per head, not absorbed.

    `pad_values` pads values with zeros to the columns of keys.
    """
    rope_dim, heads = layer.rope_dim, layer.heads
    positions = torch.arange(x.shape[1], device=x.device)

    def with_rope(nope: Tensor, rope: Tensor) -> Tensor:
        rotated = apply_rope(rope, positions, layer.rope_theta)
        return torch.cat([nope, rotated.expand(*nope.shape[:3], rope_dim)], dim=-1)

    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (heads, -1))
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([layer.kv_lora_rank, rope_dim], dim=-1)
    k_nope, v = (
        layer.kv_b_proj(layer.kv_a_layernorm(latent))
        .unflatten(-1, (heads, -1))
        .split([layer.nope_dim, layer.v_dim], dim=-1)
    )
    q, k = with_rope(*q.split([layer.nope_dim, rope_dim], dim=-1)), with_rope(k_nope, k_rope[:, :, None])
    if pad_values:
        v = functional.pad(v, (0, k.shape[-1] - layer.v_dim))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)[..., : layer.v_dim]
    result: Tensor = layer.o_proj(out.transpose(1, 2).flatten(2))
    return result


@dataclass(frozen=True)
class Step:
    """A training step: `forward` returns the layer's output, and a loss if it has one."""

    forward: Callable[[], tuple[Tensor, ...]]
    leaves: Sequence[Tensor]
    dout: Tensor

    def backward(self, results: tuple[Tensor, ...]) -> None:
        torch.autograd.grad(results, self.leaves, [self.dout, *[None] * (len(results) - 1)])

    def first_rows(self) -> Tensor:
        """Runs a whole step and returns the first TOPK rows of the output of the first sequence."""
        results = self.forward()
        self.backward(results)
        return results[0].detach()[0, :TOPK].clone()

    def times(self) -> Times:
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(LEAD_CYCLES)
        begin.record()
        results = self.forward()
        middle.record()
        self.backward(results)
        end.record()
        torch.cuda.synchronize()
        return {"forward": begin.elapsed_time(middle), "backward": middle.elapsed_time(end)}

    def operator_times(self) -> Times:
        torch.cuda._sleep(LEAD_CYCLES)
        with OperatorTimes() as operators:
            self.backward(self.forward())
        return operators.times()


class OperatorTimes(TorchDispatchMode):
    """Times the public operators of torch.ops.dsa, PyTorch's attention and the matmuls that are called in its scope;
    all other work is glue."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_attention = func._opname.startswith("_scaled_dot_product")
        is_operator = func.namespace == "dsa" and not func._opname.startswith("_")
        if not is_operator and not is_attention and func not in MATMULS:
            return func(*args, **(kwargs or {}))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = func(*args, **(kwargs or {}))
        end.record()
        name = "matmul" if func in MATMULS else "attention" if is_attention else func._opname
        self._calls.append((name, begin, end))
        return result

    def times(self) -> Times:
        torch.cuda.synchronize()
        times: Times = {}
        for name, begin, end in self._calls:
            times[name] = times.get(name, 0.0) + begin.elapsed_time(end)
        return times


def total(times: Times) -> float:
    return sum(times.values())


def median(sample: Callable[[], Times]) -> Times:
    """The sample with the median total, of as many samples as fit in a second, at most ten."""
    samples: list[Times] = []
    while len(samples) < 10 and sum(map(total, samples)) < 1000:
        samples.append(sample())
    return sorted(samples, key=total)[len(samples) // 2]


@dataclass(frozen=True)
class Measured:
    rows: Tensor
    times: Times
    peak_mb: float  # in addition to what was allocated before the step

    def fields(self, prefix: str = "") -> dict[str, float]:
        times = {f"{prefix}{name}_ms": round(ms, 4) for name, ms in self.times.items()}
        return times | {f"{prefix}peak_mb": round(self.peak_mb, 1)}


def measure_step(step: Step) -> Measured:
    torch.cuda.empty_cache()
    rows = step.first_rows()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = median(step.times)
    return Measured(rows, times, (torch.cuda.max_memory_allocated() - before) / 1e6)


def dense_step(layer: SparseMLA, x: Tensor, dout: Tensor, pad_values: bool) -> Step:
    trained = [parameter for name, parameter in layer.named_parameters() if not name.startswith("indexer.")]
    return Step(lambda: (dense_layer(layer, x, pad_values=pad_values),), [x, *trained], dout)


def measure_dense(layer: SparseMLA, x: Tensor, dout: Tensor) -> tuple[str, Measured] | None:
    """The first backend that supports these heads, and its figures; None if the GPU runs out of memory."""
    refusals = []
    for name, (backend, pad_values) in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                return name, measure_step(dense_step(layer, x, dout, pad_values))
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            refusals.append(f"{name}: {error}")
    raise RuntimeError("; ".join(refusals))


def measure(spec: Spec, times: dict[str, float]) -> Case:
    torch.manual_seed(1)
    hidden_size = HIDDEN_SIZE[spec.heads]
    layer = SparseMLA(hidden_size, spec.heads, topk=TOPK, device="cuda", dtype=torch.bfloat16)
    x, dout = (torch.randn(1, spec.seq, hidden_size, device="cuda").bfloat16() for _ in range(2))
    leaves = [x.requires_grad_(), *layer.parameters()]

    length = spec.seq // spec.packed
    options: dict[str, Any] = {}
    if spec.packed > 1:
        options["cu_seqlens"] = torch.arange(0, spec.seq + 1, length, device="cuda", dtype=torch.int32)
        options["max_seqlen"] = length if spec.max_seqlen else None

    def step_of(module: Callable[..., Any]) -> Step:
        return Step(lambda: module(x, **options)[:2], leaves, dout)

    ours = measure_step(step_of(torch.compile(layer, fullgraph=True) if spec.compiled else layer))
    operators = median(step_of(layer).operator_times)
    batch = [t.detach().view(spec.packed, length, -1) for t in (x, dout)]
    dense = measure_dense(layer, batch[0].requires_grad_(), batch[1])
    ms = total(ours.times)
    others: dict[str, Any] = ours.fields()
    others["glue"] = round(ms / total(operators) - 1, 4)
    others["operators_ms"] = {name: round(value, 4) for name, value in operators.items()}
    others |= time_versus(ms, spec.compare_to, times)
    args = {"B": 1, "S": spec.seq, "H": spec.heads, "K": TOPK, "hidden_size": hidden_size}
    args |= {"Hi": layer.indexer.heads, "Di": layer.indexer.head_dim, "compiled": spec.compiled}
    args |= {"sequences": spec.packed, "max_seqlen": options.get("max_seqlen")}
    if dense is None:
        return make_case(spec.name, spec.group, args, ms, peer_failure="out of memory", **others)
    backend, theirs = dense
    shared = min(TOPK, length)
    error = similarity_error(ours.rows[:shared], theirs.rows[:shared])
    if not error <= PEER_SIMILARITY:
        raise AssertionError(f"SparseMLA is wrong: similarity {error}")
    peer = (f"dense, {backend}", round(total(theirs.times), 4))
    err = {"similarity": error}
    return make_case(spec.name, spec.group, args, ms, peer=peer, err=err, **others, **theirs.fields("peer_"))


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 15, len(HIDDEN_SIZE)) as axes:
        for axis, heads in zip(axes, HIDDEN_SIZE, strict=True):
            shown = [case for case in cases if case["group"] == f"{heads} heads"]
            series = {
                "SparseMLA": [case["ms"] for case in shown],
                "dense, PyTorch": [case["peer_value"] or 0 for case in shown],
            }
            grouped_bars(axis, [f"S = {case['args']['S'] // 1024}K" for case in shown], series)
            axis.set(title=f"training step of a layer, {heads} heads", ylabel="ms", yscale="log")
            axis.margins(y=0.15)
            axis.legend(loc="upper left", fontsize=8)


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, timer="CUDA events, median", operators=OPERATORS)
