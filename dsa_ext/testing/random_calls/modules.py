"""Random training steps of the modules of dsa_ext.nn in bf16, compared with the same module in float64 on the CPU.

bf16 and float64 may select different keys, so the float64 copy is given the selection of the bf16 module.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsa_ext.nn import BlockSizes, BlockSparseAttention, FP8Linear, HyperConnection, LightningIndexer, Phase, SparseMLA
from dsa_ext.ops.fp8 import _LIBRARY_IS_THERE
from dsa_ext.reference.block_sparse import BLOCK
from dsa_ext.testing.random_calls.call import Args, Call, Results, deterministic_algorithms
from dsa_ext.testing.random_calls.draw import Draw
from dsa_ext.testing.tolerances.limits import wide

_BF16 = torch.bfloat16
#: Largest error of a tensor (as a norm): _LIMIT times the tensor's norm, plus _AS_REFERENCE times the error of the same
#: module in bf16 on the CPU, since a gradient whose terms cancel consists of rounding errors.
_LIMIT, _AS_REFERENCE = 0.05, 6
#: A tensor of few numbers, such as the gradient of one head's gate bias, may have a small error by chance: of two
#: independent normal errors of one number, the first is more than 6 times the second in 10 % of all cases. So what
#: exceeds its limit is judged by the root mean square of the errors of _RUNS runs, which one number exceeds 6 times in
#: 0.03 % (Student's t). Their inputs differ by _NEARBY of each element, several units in the last place of bf16:
#: everything is rounded anew. The same holds for errors of few terms, such as those whose relu is near 0.
_RUNS, _NEARBY = 8, 2.0**-5
#: A gradient whose norm is less than _VANISHING times the largest one is a sum of terms that cancel completely, such as
#: that of scores with one key per row. bf16 rounding may leave _LEFT times the largest norm of it.
_VANISHING, _LEFT = 1e-9, 2.0**-9
#: A loss is a sum of fp32 terms of order 1, which cancel completely where a query sees one key.
_LEFT_OF_LOSS = 2.0**-20

Named = dict[str, Tensor]
#: A training step of a module: results and gradients by name, given x and the upstream gradient. The last argument is
#: the selection to use instead of the module's own, or None.
Step = Callable[[Any, Args, Results | None], Named]


def _call(target: str, draw: Draw, layer: nn.Module, args: Args, step: Step, selected: tuple[str, ...] = ()) -> Call:
    """`selected`: names of the results that are the module's selection."""
    deterministic, autocast = draw.chance(0.5), draw.chance(0.3)
    # Under autocast, parameters and input may be fp32: the same numbers, stored with more bits.
    in_fp32 = autocast and not isinstance(layer, FP8Linear) and draw.chance(0.5)
    runs = copy.deepcopy(layer).float() if in_fp32 else layer
    names: list[str] = []
    draw.notes.append("deterministic" * deterministic + " autocast" * autocast + " of fp32" * in_fp32)

    def surroundings() -> AbstractContextManager[Any]:
        return torch.autocast(draw.device.type, _BF16) if autocast else nullcontext()

    def run(a: Args) -> Results:
        with deterministic_algorithms(deterministic), surroundings(), _without_onednn():
            made = step(runs, {**a, "x": a["x"].float()} if in_fp32 else a, None)
        names[:] = made
        return tuple(t.detach() for t in made.values())

    def judge(results: Results, a: Args) -> None:
        got = dict(zip(names, results, strict=True))
        selection = tuple(got.pop(name).cpu() for name in selected) or None
        reference = copy.deepcopy(layer).cpu()
        exactly = reference if isinstance(layer, FP8Linear) else copy.deepcopy(reference).double()
        host = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in a.items()}

        def run_on_cpu(inputs: Args) -> tuple[Named, dict[str, float]]:
            """The results in float64, and the errors of those in bf16."""
            with _without_onednn():
                plain = step(reference, inputs, selection)
            exact = step(exactly, wide(inputs), selection)
            return exact, {name: _error(name, plain[name], exact[name]) for name in got}

        exact, off = run_on_cpu(host)
        gradient_names = {"x", *(name for name, _ in reference.named_parameters())}
        largest = max((float(t.norm()) for name, t in exact.items() if name in gradient_names), default=0.0)

        def beyond(off: dict[str, float]) -> list[str]:
            found = []
            for name, tensor in got.items():
                error, norm = _error(name, tensor, exact[name]), _norm(exact[name])
                limit = _limit(name, norm, off[name], largest if name in gradient_names else 0.0)
                if not error <= limit:
                    found.append(f"{name} differs by {error:.3g}, limit {limit:.3g}, of {norm:.3g}")
            return found

        if beyond(off):
            runs = [off, *(run_on_cpu(_nearby(host, seed))[1] for seed in range(1, _RUNS))]
            off = {n: max(one, (sum(run[n] ** 2 for run in runs) / len(runs)) ** 0.5) for n, one in off.items()}
            if found := beyond(off):
                raise AssertionError("; ".join(found))

    # The gradient of the keys, if summed in no fixed order, reaches all parameters.
    count = 99 if not deterministic else 0
    return Call(target, args, run, judge, tuple(range(1 + len(selected), count)), draw.notes, same_way=True)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Disables oneDNN: its bf16 matmuls end the process on virtual machines without some of the CPU's instructions."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _nearby(inputs: Args, seed: int) -> Args:
    """The inputs with each column scaled by about 1: rows that are equal stay equal."""
    generator = torch.Generator().manual_seed(seed)

    def scaled(x: Tensor) -> Tensor:
        return x * (1 + _NEARBY * torch.randn(x.shape[-1], generator=generator)).to(x.dtype)

    return {name: scaled(value) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _norm(exact: Tensor) -> float:
    return float(exact.detach()[exact.isfinite()].double().norm())


def _error(name: str, got: Tensor, exact: Tensor) -> float:
    got, exact = got.detach().double().cpu(), exact.detach().double()
    finite = exact.isfinite()
    if got.shape != exact.shape or not torch.equal(got.isfinite(), finite):
        raise AssertionError(f"{name} is not finite where it should be, or of another shape: {list(got.shape)}")
    return float((got - exact)[finite].norm())


def _limit(name: str, norm: float, off: float, largest: float) -> float:
    """`off`: the error of the module in bf16 on the CPU. `largest`: the largest norm of all gradients; 0 if the tensor
    is no gradient."""
    limit = _LIMIT * norm + _AS_REFERENCE * off + (_LEFT * largest if norm < _VANISHING * largest else 0)
    return limit + (_LEFT_OF_LOSS if name == "indexer_loss" else 0)


def _gradients(
    results: list[Tensor], upstream: list[Tensor | None], x: Tensor, parameters: Mapping[str, Tensor]
) -> Named:
    grads = torch.autograd.grad(results, [x, *parameters.values()], upstream)
    return dict(zip(["x", *parameters], grads, strict=True))


def _linear_scale(layer: nn.Module, draw: Draw) -> None:
    """Initializes the module's linear and norm layers again, from the call's seed."""
    torch.manual_seed(draw.random.randrange(2**31))
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()


def _tokens(draw: Draw, batch: int, seq: int, hidden: int) -> Tensor:
    return draw.view(draw.normal(batch, seq, hidden).to(_BF16), "free")


def sparse_mla(draw: Draw) -> Call:
    hidden, rank = 64 * draw.size(3), 64 * draw.size(3)
    batch, seq = draw.choice((1, 1, 2)), draw.size(64)
    indexer: dict[str, Any] = {
        "heads": draw.choice((8, 16, 64)),
        "head_dim": draw.choice((64, 128)),
        "hadamard": draw.chance(0.3),
    }
    indexer["precision"] = draw.choice(("fp8", "bf16"))
    sizes: dict[str, Any] = {"nope_dim": 16 * draw.size(4), "v_dim": 16 * draw.size(4), "topk": draw.size(80)}
    if draw.chance(0.4):  # what sparse_mha takes
        sizes |= {"nope_dim": 128, "v_dim": 128}
    if draw.chance(0.4):  # so that some queries are in the absorbed form
        sizes["topk"] = draw.size(3)
    phase: Phase = draw.choice(("dense", "warmup", "sparse", "sparse"))
    heads = draw.size(16)
    layer = SparseMLA(
        hidden, heads, q_lora_rank=rank, **sizes, indexer=indexer, phase=phase, device=draw.device, dtype=_BF16
    )
    _linear_scale(layer, draw)
    draw.notes.append(f"{phase}, {heads} heads, {sizes}, {indexer}")
    dout = draw.normal(batch, seq, hidden).to(_BF16)

    def step(module: SparseMLA, a: Args, selection: Results | None) -> Named:
        if selection is not None:
            module.indexer.select = lambda *_: selection[0]  # type: ignore[method-assign]
        x = a["x"].detach().requires_grad_()
        out, loss, ids = module(x, cu_seqlens=a.get("cu_seqlens"), max_seqlen=a.get("max_seqlen"))
        learns = {n: p for n, p in module.named_parameters() if phase != "dense" or not n.startswith("indexer.")}
        made = {"ids": ids} if ids is not None else {}
        made |= {"out": out} if loss is None else {"out": out, "indexer_loss": loss}
        results = [out] if loss is None else [out, loss]
        return made | _gradients(results, [a["dout"].to(out.dtype), None][: len(results)], x, learns)

    args: Args = {"x": _tokens(draw, batch, seq, hidden), "dout": dout}
    if batch == 1 and draw.chance(0.6):
        places = sorted(draw.random.randint(0, seq) for _ in range(draw.size(6)))
        args["cu_seqlens"] = torch.tensor([0, *places, seq], dtype=torch.int32, device=draw.device)
        args["max_seqlen"] = draw.choice((None, int(args["cu_seqlens"].diff().max()), draw.size(100)))
    return _call("nn.SparseMLA", draw, layer, args, step, ("ids",) if phase == "sparse" else ())


def lightning_indexer(draw: Draw) -> Call:
    hidden, rank, batch, seq = 64 * draw.size(4), 64 * draw.size(3), draw.choice((1, 2)), draw.size(100)
    options: dict[str, Any] = {"heads": draw.choice((8, 16, 32, 64)), "head_dim": draw.choice((64, 128))}
    options |= {"hadamard": draw.chance(0.3), "precision": draw.choice(("fp8", "bf16"))}
    layer = LightningIndexer(hidden, rank, **options, device=draw.device, dtype=_BF16)
    _linear_scale(layer, draw)
    topk, listed = draw.size(128), draw.chance(0.6)
    draw.notes.append(f"{options}, topk {topk}, {'scores' if listed else 'logits'}")
    upstream = draw.normal(batch, seq, topk if listed else seq)

    def step(module: LightningIndexer, a: Args, selection: Results | None) -> Named:
        x = a["x"].detach().requires_grad_()
        tensors = module(x, a["q_latent"])
        ids = module.select(tensors, topk) if selection is None else selection[0]
        scores = module.scores(tensors, ids) if listed else module.logits(tensors)
        made = {"ids": ids, "scores": scores}
        return made | _gradients([scores], [a["upstream"].to(scores.dtype)], x, dict(module.named_parameters()))

    q_latent = _tokens(draw, batch, seq, rank)
    args = {"x": _tokens(draw, batch, seq, hidden), "q_latent": q_latent, "upstream": upstream}
    return _call("nn.LightningIndexer", draw, layer, args, step, ("ids",))


def block_sparse_attention(draw: Draw) -> Call:
    hidden, kv_heads, dim = 64 * draw.size(2), draw.choice((1, 2, 3)), draw.choice((64, 128))
    batch, heads, count = draw.choice((1, 2)), kv_heads * draw.choice((1, 2)), draw.size(4)
    mode: Literal["gini_tau", "top_tau", "topk"] = draw.choice(("gini_tau", "top_tau", "topk"))
    topk = draw.size(8) if mode == "topk" else None
    layer = BlockSparseAttention(
        hidden, heads, kv_heads=kv_heads, head_dim=dim, mode=mode, topk=topk, device=draw.device, dtype=_BF16
    )
    _linear_scale(layer, draw)
    seq = count * BLOCK - (draw.random.randrange(BLOCK) if draw.chance(0.5) else 0)
    blocks = None
    valid = torch.ones(seq, dtype=torch.bool, device=draw.device)
    if seq == count * BLOCK and draw.chance(0.5):
        numbers = [draw.random.randrange(BLOCK + 1) for _ in range(count - 1)] + [draw.size(BLOCK)]
        blocks = BlockSizes(numbers, draw.device), BlockSizes(numbers)
        valid = torch.arange(BLOCK, device=draw.device) < blocks[0].sizes[:, None]
        valid = valid.flatten()
    draw.notes.append(f"{heads} heads of {kv_heads}, {mode}, {'sizes' if blocks else 'all valid'}")
    x = draw.normal(batch, seq, hidden).masked_fill(~valid[:, None], torch.nan).to(_BF16)
    dout = draw.normal(batch, seq, hidden).masked_fill(~valid[:, None], 0).to(_BF16)

    def step(module: BlockSparseAttention, a: Args, selection: Results | None) -> Named:
        kept: list[Results] = [] if selection is None else [selection]

        def select(scores: Tensor) -> Results:
            if selection is None:
                kept.append(BlockSparseAttention.select(module, scores))
            return kept[0]

        module.select = select  # type: ignore[assignment, method-assign]
        x = a["x"].detach().requires_grad_()
        out = module(x, None if blocks is None else blocks[x.device.type == "cpu"])
        del module.select
        made = dict(zip(("index", "number"), kept[0], strict=True))
        made["out"] = out.masked_fill(~valid.to(out.device)[:, None], 0)
        return made | _gradients([out], [a["dout"].to(out.dtype)], x, dict(module.named_parameters()))

    args = {"x": draw.view(x, "free", repeat=False), "dout": dout}
    return _call("nn.BlockSparseAttention", draw, layer, args, step, ("index", "number"))


def hyper_connection(draw: Draw) -> Call:
    columns, streams = 128 * draw.size(8), draw.choice((2, 4))
    batch, seq = draw.choice((1, 2)), draw.size(100)
    inner = nn.Linear(columns, columns, device=draw.device, dtype=_BF16)
    layer = HyperConnection(inner, columns, streams, iterations=draw.choice((20, 1, 5)), device=draw.device)
    _linear_scale(layer, draw)
    with torch.no_grad():
        for parameter in (layer.alpha, layer.bias, layer.gamma):
            parameter.add_(0.3 * draw.normal(*parameter.shape))
    dout = draw.normal(batch, seq, streams, columns).to(_BF16)

    def step(module: HyperConnection, a: Args, _: Results | None) -> Named:
        x = a["x"].detach().requires_grad_()
        out = module(x)
        return {"out": out} | _gradients([out], [a["dout"].to(out.dtype)], x, dict(module.named_parameters()))

    x = draw.view(draw.normal(batch, seq, streams, columns).to(_BF16), "free")
    return _call("nn.HyperConnection", draw, layer, {"x": x, "dout": dout}, step)


def fp8_linear(draw: Draw) -> Call:
    columns, width, rows = 128 * draw.size(16), draw.size(600), draw.size(64 if draw.chance(0.7) else 300)
    if draw.device.type == "cuda" and not _LIBRARY_IS_THERE:
        rows = min(rows, 64)
    linear = nn.Linear(columns, width, bias=draw.chance(0.5), device=draw.device, dtype=_BF16)
    _linear_scale(linear, draw)
    layer = FP8Linear(linear, round_scale=draw.chance(0.5))

    def step(module: FP8Linear, a: Args, _: Results | None) -> Named:
        x = a["x"]
        with torch.no_grad():
            return {"out": module(x.float() if x.dtype == torch.float64 else x)}

    x = draw.view(draw.normal(1, rows, columns).to(draw.choice((_BF16, torch.float32))), "free")
    return _call("nn.FP8Linear", draw, layer, {"x": x}, step)


CALLS = {
    "nn.SparseMLA": sparse_mla,
    "nn.LightningIndexer": lightning_indexer,
    "nn.BlockSparseAttention": block_sparse_attention,
    "nn.HyperConnection": hyper_connection,
    "nn.FP8Linear": fp8_linear,
}
