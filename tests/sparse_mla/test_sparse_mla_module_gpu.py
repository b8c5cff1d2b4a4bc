"""SparseMLA and its LightningIndexer on a GPU in bf16, against themselves in float64 on the CPU."""

import copy
import gc
from typing import Any

import pytest
import torch
from streams import written_late
from torch import Tensor

from dsa_ext.nn import LightningIndexer, SparseMLA, absorbed, expanded, sparse_mla

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
HIDDEN, Q_LORA_RANK, SEQ = 256, 192, 200
#: Largest |a - b| / |b| between bf16 and float64 over a whole tensor, for results and for gradients. In the indexer,
#: products that are nearly 0 may have the other sign before its relu; if one in 500 does, the error is 0.045.
OUTPUT, GRADIENT, INDEXER_GRADIENT = 0.01, 0.02, 0.1
all_phases = pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])


def make_layer(heads: int = 16, index_heads: int = 8, index_dim: int = 64, **options: Any) -> SparseMLA:
    torch.manual_seed(0)
    indexer = {"heads": index_heads, "head_dim": index_dim, **options.pop("indexer", {})}
    sizes: dict[str, Any] = {"q_lora_rank": Q_LORA_RANK, "topk": SEQ, **options}
    layer = SparseMLA(HIDDEN, heads, **sizes, indexer=indexer, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():  # both prefer some keys
        layer.q_b_proj.weight *= 4
        layer.indexer.weights_proj.weight *= 4
    return layer


def make_input(batch: int = 2, seq: int = SEQ, columns: int = HIDDEN) -> Tensor:
    return torch.randn(batch, seq, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)


def exact(module: Any) -> Any:
    """A copy in float64 on the CPU."""
    return copy.deepcopy(module).to("cpu", torch.float64)


def step(layer: SparseMLA, x: Tensor, run: Any = None) -> dict[str, Tensor]:
    """Results of a training step, by name: outputs, and gradients of the parameters and of x. `run` replaces
    the layer's forward."""
    x = x.detach().requires_grad_()
    out, loss, ids = (layer if run is None else run)(x)
    learns = {n: p for n, p in layer.named_parameters() if layer.phase != "dense" or not n.startswith("indexer.")}
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    results = [out] if loss is None else [out, loss]
    gradients = torch.autograd.grad(results, [x, *learns.values()], [dout, None][: len(results)])
    made = dict(zip(["x", *learns], gradients, strict=True))
    made |= {name: t for name, t in (("out", out), ("indexer_loss", loss), ("ids", ids)) if t is not None}
    return {name: t.detach() for name, t in made.items()}


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    a, b = (t.detach().double().cpu() for t in (a, b))
    return float((a - b).norm() / b.norm())


def check(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    if "ids" in got:
        assert torch.equal(got.pop("ids").cpu(), expected.pop("ids").cpu())
    errors = {name: difference(tensor, expected[name]) for name, tensor in got.items()}
    limits = {name: INDEXER_GRADIENT if name.startswith("indexer.") else GRADIENT for name in errors}
    limits |= {"out": OUTPUT, "indexer_loss": OUTPUT}
    assert not {name: error for name, error in errors.items() if not error <= limits[name]}


@all_phases
@pytest.mark.parametrize("sizes", [(16, 8, 64), (128, 64, 128)], ids=str)
def test_step(phase: Any, sizes: tuple[int, int, int]) -> None:
    """In the sparse phase every visible key is selected: each row has fewer than topk."""
    layer = make_layer(*sizes, phase=phase, topk=SEQ + 40)
    x = make_input()
    check(step(layer, x), step(exact(layer), x.double().cpu()))


@pytest.mark.parametrize("phase", ["warmup", "sparse"])
@pytest.mark.parametrize("queries", [30, SEQ, SEQ + 30])
def test_step_in_parts(phase: Any, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed queries are made for so many queries at a time."""
    layer = make_layer(phase=phase, topk=SEQ + 40)
    x = make_input()
    expected = step(exact(layer), x.double().cpu())
    monkeypatch.setattr(absorbed, "_BYTES", queries * layer.heads * 576 * 2)
    check(step(layer, x), expected)


@pytest.mark.parametrize(("sizes", "precision"), [((16, 8, 64), "bf16"), ((128, 64, 128), "fp8")], ids=str)
def test_step_with_the_same_selection(sizes: tuple[int, int, int], precision: str) -> None:
    """float64 would select slightly different keys, so that it gets the selection of the bf16 layer."""
    layer = make_layer(*sizes, topk=100, indexer={"precision": precision})
    x = make_input()
    got, expected = step(layer, x), exact(layer)
    expected.indexer.select = lambda *_: got["ids"].cpu()
    check(dict(got), step(expected, x.double().cpu()))


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("hadamard", [False, True])
def test_indexer(heads: int, dim: int, hadamard: bool) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"heads": heads, "head_dim": dim, "hadamard": hadamard}
    indexer = LightningIndexer(HIDDEN, Q_LORA_RANK, **sizes, device=DEVICE, dtype=torch.bfloat16)
    x, q_latent = make_input(), make_input(columns=Q_LORA_RANK)
    got, expected = indexer(x, q_latent), exact(indexer)(x.double().cpu(), q_latent.double().cpu())
    for a, b in zip(got, expected, strict=True):
        assert difference(a, b) <= OUTPUT

    ids, best = indexer.select(got, 64).cpu(), exact(indexer).select(expected, 64)
    assert torch.equal((ids >= 0).sum(-1), torch.arange(1, SEQ + 1).clamp(max=64).expand(2, SEQ))
    chosen, wanted = (torch.zeros(2, SEQ, SEQ + 1).scatter(2, t.where(t >= 0, SEQ).long(), 1) for t in (ids, best))
    assert (chosen * wanted)[..., :SEQ].sum() >= 0.95 * wanted[..., :SEQ].sum()

    seen = ids >= 0
    scores, exact_scores = indexer.scores(got, ids.to(DEVICE)).cpu(), exact(indexer).scores(expected, ids)
    assert torch.equal(scores == -torch.inf, ~seen)
    assert difference(scores[seen], exact_scores[seen]) <= OUTPUT
    logits = indexer.logits(got).cpu()
    assert torch.equal(logits == -torch.inf, torch.ones(2, SEQ, SEQ, dtype=torch.bool).triu(1))
    assert difference(logits.gather(2, ids.clamp(min=0).long())[seen], scores[seen]) <= 1e-5


@all_phases
def test_what_a_token_depends_on(phase: Any) -> None:
    """Only on itself and the tokens before it in its own sequence: other sequences may be NaN, and later tokens too
    unless the keys of heads are expanded, where they may have any finite values."""
    layer, x = make_layer(128, 64, 128, phase=phase, topk=64), make_input()
    poisoned = x.clone()
    poisoned[0] = torch.nan
    poisoned[1, 150:] = 1e4 * poisoned[1, 150:].flip(0) if phase != "warmup" else torch.nan
    for got, expected in zip(layer(poisoned)[::2], layer(x)[::2], strict=True):
        assert got is expected is None or torch.equal(got[1, :150], expected[1, :150])


def test_attention_to_all() -> None:
    layer, x = make_layer(128), make_input()
    attention, expected = layer.attention_to_all(x), exact(layer).attention_to_all(x.double().cpu())
    assert difference(attention, expected) <= OUTPUT
    assert (attention.triu(1) == 0).all()
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, SEQ, device=DEVICE), rtol=1e-3, atol=0)


@all_phases
def test_without_gradients(phase: Any) -> None:
    layer, x = make_layer(128, 64, 128, phase=phase, topk=64), make_input()
    expected = layer(x)
    with torch.no_grad():
        result = layer(x)
    assert result.indexer_loss is None
    assert torch.equal(result.out, expected.out)
    assert phase != "sparse" or torch.equal(result.ids, expected.ids)


@pytest.mark.parametrize("seq", [1024, 1500])
def test_memory_of_the_first_queries(seq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their attention keeps values of 128 columns instead of 512, and needs no more than that to listed keys."""
    layer, x = make_layer(128, topk=1024), make_input(1, seq)
    kept, peaks = [], []
    for dense in (False, True):
        if not dense:
            monkeypatch.setattr(sparse_mla, "absorbed_attention", without_expanded_rows)
        step(layer, x)
        gc.collect()  # what earlier tests have left must not be freed in between
        out, loss, _ = layer(x)
        held = torch.cuda.memory_allocated()
        del out, loss
        before = torch.cuda.memory_allocated()
        kept.append(held - before)
        torch.cuda.reset_peak_memory_stats()
        out, loss, _ = layer(x)
        torch.autograd.grad([out, loss], list(layer.parameters()), [torch.ones_like(out), torch.ones_like(loss)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out, loss
        monkeypatch.undo()
    assert kept[1] <= kept[0] - 1024 * 128 * (512 - 128) * 2
    assert peaks[1] <= peaks[0]


def without_expanded_rows(*args: Any, expanded: Any, **options: Any) -> Any:
    return absorbed.absorbed_attention(*args, **options)


@pytest.mark.parametrize("max_seqlen", [None, 700, 10_000])
@pytest.mark.parametrize("indexer_loss", ["forward", "deferred"])
def test_packed_sequences(indexer_loss: Any, max_seqlen: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the expanded form, its first rows or all in windows, like in the absorbed form, which deterministic algorithms
    select; and in a graph that is replayed for other sequences."""
    layer = make_layer(128, 64, 128, topk=100, indexer_loss=indexer_loss)
    x = make_input(1, 1200)
    lengths = [300, 1, 0, 699, 200], [2, 700, 128, 128, 242]
    cu_seqlens = [torch.tensor([0, *n]).cumsum(0).int().to(DEVICE) for n in lengths]
    monkeypatch.setattr(expanded, "expanded_rows", lambda seq, *_: min(seq, 700))
    monkeypatch.setattr(expanded, "_WINDOW_ROWS", 500)

    def results(places: Tensor) -> dict[str, Tensor]:
        return step(layer, x, lambda x: layer(x, cu_seqlens=places, max_seqlen=max_seqlen))

    got = results(cu_seqlens[0])
    torch.use_deterministic_algorithms(True)
    try:
        expected = results(cu_seqlens[0])
    finally:
        torch.use_deterministic_algorithms(False)
    check(dict(got), expected)
    assert not torch.equal(got["out"], expected["out"])
    other = results(cu_seqlens[1])["out"]
    places, graph = cu_seqlens[0].clone(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        layer(x, cu_seqlens=places, max_seqlen=max_seqlen)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = layer(x, cu_seqlens=places, max_seqlen=max_seqlen).out
        for wanted, source in ((other, 1), (got["out"], 0)):
            places.copy_(cu_seqlens[source])
            graph.replay()
            check({"out": out}, {"out": wanted})


@all_phases
def test_compile(phase: Any) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(128, 64, 128, phase=phase), make_input()
    check(step(layer, x, torch.compile(layer, fullgraph=True)), step(layer, x))


@all_phases
def test_nothing_waits_for_the_gpu(phase: Any) -> None:
    layer, x = make_layer(phase=phase, topk=64), make_input()
    step(layer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, loss, _ = layer(x)
        total = out.float().square().mean() if loss is None else out.float().square().mean() + loss
        total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_side_stream() -> None:
    """Inputs that are written late on a side stream: a kernel on any other stream would read zeros."""
    layer, x = make_layer(topk=64), make_input()
    expected = step(layer, x)
    got = written_late(x, lambda late: step(layer, late))
    assert torch.equal(got["out"], expected["out"])
    check(got, expected)
