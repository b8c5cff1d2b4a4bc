"""SparseMLA on packed sequences, with other positions and RoPE, and with the selection of another layer."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsa_ext.nn import SparseMLA, Yarn, absorption, apply_rope, expanded, rotary

HIDDEN, HEADS, RANK = 48, 4, 32
LENGTHS = (5, 1, 0, 12)


def make_layer(**options: Any) -> SparseMLA:
    torch.manual_seed(0)
    indexer = {"heads": 16, "head_dim": 64, "precision": "bf16", **options.pop("indexer", {})}
    sizes = {"nope_dim": 32, "v_dim": 16, "topk": 4}
    return SparseMLA(HIDDEN, HEADS, q_lora_rank=RANK, dtype=torch.float64, indexer=indexer, **{**sizes, **options})


def make_input(batch: int = 1, seq: int = sum(LENGTHS)) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, seq, HIDDEN, generator=generator, dtype=torch.float64)


CU_SEQLENS = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
#: Those of sparse_mha.
COLUMNS = {"nope_dim": 128, "v_dim": 128}


def set_expanded_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(expanded, "expanded_rows", lambda seq, *_: min(seq, rows))


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize("max_seqlen", [None, 12, 15, 100])
def test_packed_sequences(phase: Any, max_seqlen: int | None) -> None:
    check_packed(make_layer(phase=phase), max_seqlen)


@pytest.mark.parametrize("max_seqlen", [None, 12, 15, 100])
@pytest.mark.parametrize("rows", [7, 15, 50])
@pytest.mark.parametrize("indexer_loss", ["forward", "deferred"])
def test_packed_sequences_in_the_expanded_form(
    indexer_loss: Any, rows: int, max_seqlen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the first rows, or all within windows, or all."""
    set_expanded_rows(monkeypatch, rows)
    monkeypatch.setattr(expanded, "_WINDOW_ROWS", 10)
    seen = []
    plain = absorption.ExpandedAttention
    monkeypatch.setattr(
        absorption, "ExpandedAttention", lambda h, *a, **o: seen.append((h.shape[1], o["window"])) or plain(h, *a, **o)
    )
    layer = make_layer(**COLUMNS, indexer_loss=indexer_loss)
    layer(make_input(), cu_seqlens=CU_SEQLENS, max_seqlen=max_seqlen)
    windows = rows == 15 and max_seqlen in (12, 15)
    assert seen == ([(9, max_seqlen)] * 2 if windows else [(min(rows, 18), None)])
    monkeypatch.setattr(absorption, "ExpandedAttention", plain)
    check_packed(layer, max_seqlen)


def check_packed(layer: SparseMLA, max_seqlen: int | None) -> None:
    x = make_input()
    out, loss, ids = layer(x, cu_seqlens=CU_SEQLENS, max_seqlen=max_seqlen)
    alone = [layer(part) for part in x.split(LENGTHS, dim=1) if part.shape[1]]
    torch.testing.assert_close(out, torch.cat([one.out for one in alone], dim=1))
    if loss is not None:
        sums = [one.indexer_loss * (one.out.shape[1] / x.shape[1]) for one in alone]
        parameters = list(layer.parameters())
        outs = torch.cat([one.out for one in alone], dim=1)
        expected = torch.autograd.grad(torch.stack(sums).sum() + outs.sin().sum(), parameters, allow_unused=True)
        got = torch.autograd.grad(loss + out.sin().sum(), parameters, allow_unused=True)
        torch.testing.assert_close(got, expected)
        if layer.indexer_loss == "forward":
            torch.testing.assert_close(loss, torch.stack(sums).sum())
    if ids is not None:
        first = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
        own = [torch.where(one.ids >= 0, one.ids + n, -1) for one, n in zip(alone, first[[0, 1, 3]], strict=True)]
        assert torch.equal(ids, torch.cat(own, dim=1))


@pytest.mark.parametrize("rows", [7, 15])
def test_sequences_longer_than_max_seqlen(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries see so many keys up to their own, in both forms."""
    set_expanded_rows(monkeypatch, rows)
    layer, x = make_layer(**COLUMNS, topk=8), make_input()
    got = layer(x, cu_seqlens=CU_SEQLENS, max_seqlen=3)
    row = torch.arange(18)
    assert ((got.ids > row[:, None] - 3) | (got.ids == -1)).all()
    torch.use_deterministic_algorithms(True)
    try:
        expected = layer(x, cu_seqlens=CU_SEQLENS, max_seqlen=3)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(got.out, layer(x, cu_seqlens=CU_SEQLENS).out)


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": CU_SEQLENS}, {"cu_seqlens": CU_SEQLENS, "max_seqlen": 12}])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_the_expanded_form(dynamic: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    set_expanded_rows(monkeypatch, 12)
    monkeypatch.setattr(expanded, "_WINDOW_ROWS", 10)
    layer, x = make_layer(**COLUMNS), make_input()
    torch._dynamo.reset()
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(str(graph.code).count("dsa.sparse_mha_fwd"))
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)

    def results(run: Any) -> list[Tensor]:
        result = run(x, **options)
        loss = result.out.sin().sum() + result.indexer_loss
        return [result.out, result.indexer_loss, *torch.autograd.grad(loss, list(layer.parameters()))]

    torch.testing.assert_close(results(compiled), results(layer), rtol=1e-4, atol=1e-5)
    assert calls == [2 if "max_seqlen" in options else 1]


@pytest.mark.parametrize("options", [{}, COLUMNS])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [7, 40])
def test_compiled_for_other_lengths(
    limit: int, packed: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for sequences with queries in both forms, and for those with all in the expanded form, of any
    length."""
    set_expanded_rows(monkeypatch, limit)
    layer = make_layer(**options)
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=lambda g, _: graphs.append(g) or g.forward)
    for seq in (18, 19, 23, 40):
        given = {"cu_seqlens": torch.tensor([0, 5, seq], dtype=torch.int32)} if packed else {}
        x = make_input(2 - packed, seq)
        torch.testing.assert_close(compiled(x, **given).out, layer(x, **given).out, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


def test_compiled_for_other_max_seqlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/nn.md: again when it becomes dynamic, and where it is beyond the limit of the expanded form."""
    set_expanded_rows(monkeypatch, 12)
    layer, x = make_layer(**COLUMNS), make_input()
    torch._dynamo.reset()
    graphs = []
    compiled = torch.compile(layer, fullgraph=True, backend=lambda g, _: graphs.append(g) or g.forward)
    for max_seqlen, count in {12: 1, 7: 2, 9: 2, 5: 2, 15: 3, 18: 3, 8: 3, 16: 3}.items():
        given = {"cu_seqlens": CU_SEQLENS, "max_seqlen": max_seqlen}
        torch.testing.assert_close(compiled(x, **given).out, layer(x, **given).out, rtol=1e-4, atol=1e-5)
        assert len(graphs) == count, max_seqlen


def test_tables_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer rotates by the same angles."""
    calls, tables_of = [], rotary._tables_of
    monkeypatch.setattr(rotary, "_tables_of", lambda *a: calls.append(a[2:4]) or tables_of(*a))
    layer, x = make_layer(), make_input()
    layer(x).out.sum().backward()
    assert calls == [(layer.rope_theta, layer.rope_dim)]


def test_compiled_with_an_indexer_that_is_checkpointed() -> None:
    layer, x = make_layer(), make_input()
    expected = layer(x)
    forward = layer.indexer.forward
    layer.indexer.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)
    torch._dynamo.reset()
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close((got.out, got.indexer_loss), (expected.out, expected.indexer_loss))


def test_compiled_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are worked on apart, as in eager calls."""
    monkeypatch.setattr(expanded, "MOST_PAIRS", 2 * 18 * 18)
    layer, x = make_layer(**COLUMNS, topk=1), make_input(5)
    torch._dynamo.reset()
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.append(str(graph.code).count("dsa.sparse_mha_dist"))
        return graph.forward

    got, wanted = torch.compile(layer, fullgraph=True, backend=backend)(x), layer(x)
    torch.testing.assert_close((got.out, got.indexer_loss), (wanted.out, wanted.indexer_loss), rtol=1e-4, atol=1e-5)
    assert calls == [3]


@pytest.mark.parametrize("places", [(3, 9, 18), (0, 9, 30), (0, 12, 4, 18), (-5, 7, 18), (0, 0), (18, 18), (40, 50)])
@pytest.mark.parametrize("max_seqlen", [None, 4, 7])
def test_cu_seqlens_are_not_checked(places: tuple[int, ...], max_seqlen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms take any numbers, as the same sequences."""
    set_expanded_rows(monkeypatch, 7)
    layer, x = make_layer(**COLUMNS), make_input()
    given = {"cu_seqlens": torch.tensor(places, dtype=torch.int32), "max_seqlen": max_seqlen}
    got = layer(x, **given)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(got, layer(x, **given))
    finally:
        torch.use_deterministic_algorithms(False)


def test_positions() -> None:
    """Only differences of positions matter, and only within a sequence."""
    layer, x = make_layer(), make_input(2, 9)
    expected = layer(x).out
    shifts = torch.tensor([[100], [7]])
    torch.testing.assert_close(layer(x, positions=torch.arange(9) + shifts).out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x, positions=torch.arange(9) + 100).out, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(layer(x, positions=3 * torch.arange(9)).out, expected, rtol=1e-2)


def test_the_selection_of_another_layer() -> None:
    layer, x = make_layer(), make_input(2, 9)
    out, loss, ids = layer(x)
    again = layer(x, ids=ids)
    torch.testing.assert_close(again.out, out)  # in another form: that the first queries list all keys is not known
    assert torch.equal(again.ids, ids)
    assert loss is not None
    assert again.indexer_loss is None
    layer.phase = "dense"
    with pytest.raises(ValueError, match="ids must be None except in the phase 'sparse', got them in 'dense'"):
        layer(x, ids=ids)


def test_interleaved_rope() -> None:
    """The same as half-split RoPE of permuted weights."""

    def half_split(rows: Tensor) -> Tensor:
        return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)

    plain, x = make_layer(), make_input(2, 9)
    layer = make_layer(rope="interleaved", indexer={"rope": "interleaved"})
    with torch.no_grad():
        state = {name: value.clone() for name, value in layer.state_dict().items()}
        heads = state["q_b_proj.weight"].view(HEADS, -1, RANK)
        heads[:, -64:] = half_split(heads[:, -64:])
        state["kv_a_proj_with_mqa.weight"][-64:] = half_split(state["kv_a_proj_with_mqa.weight"][-64:])
        index_heads = state["indexer.wq_b.weight"].view(16, 64, RANK)
        index_heads[:] = half_split(index_heads)
        for name in ("indexer.wk.weight", "indexer.k_norm.weight", "indexer.k_norm.bias"):
            rows = state[name] if state[name].dim() == 2 else state[name][:, None]
            state[name] = half_split(rows).view_as(state[name])
    plain.load_state_dict(state)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = layer(leaf), plain(other)
    assert torch.equal(got.ids, expected.ids)
    torch.testing.assert_close((got.out, got.indexer_loss), (expected.out, expected.indexer_loss))
    torch.testing.assert_close(torch.autograd.grad(got.out.sum(), leaf), torch.autograd.grad(expected.out.sum(), other))


@pytest.mark.parametrize("columns", [None, 4])
def test_gradients_of_interleaved_rope(columns: int | None) -> None:
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, torch.arange(3), columns=columns, layout="interleaved"), x)


def test_yarn() -> None:
    """Fast pairs keep their angles, slow ones turn `factor` times slower."""
    x, yarn = torch.ones(1, 3, 64, dtype=torch.float64), Yarn(40.0)
    positions = torch.tensor([0, 17, 40 * 17])
    plain, slowed = (apply_rope(x, positions, yarn=y) for y in (None, yarn))
    torch.testing.assert_close(slowed[..., :8], plain[..., :8])
    torch.testing.assert_close(slowed[:, 2, 31], plain[:, 1, 31], rtol=1e-4, atol=1e-4)
    assert yarn.rotated_scale == 1
    assert Yarn(1.0).sm_scale == 1
    layer = make_layer(yarn=yarn)
    assert layer.sm_scale == pytest.approx(96**-0.5 * 1.8739, rel=1e-4)
    assert layer.indexer.yarn is yarn


def test_errors() -> None:
    layer, x = make_layer(), make_input(2, 9)
    with pytest.raises(ValueError, match=r"cu_seqlens must be int32 .* got int32 \[2\] with x float64 \[2, 9, 48\]"):
        layer(x, cu_seqlens=torch.tensor([0, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"cu_seqlens must be int32 .* got int64 \[2\]"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="cu_seqlens must be on the device of x, cpu, got meta"):
        layer(make_input(), cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match=r"cu_seqlens must be int32 .* got list"):
        layer(x[:1], cu_seqlens=[0, 9])
    with pytest.raises(ValueError, match="max_seqlen must be None without cu_seqlens, got 5"):
        layer(x, max_seqlen=5)
    for wrong in (0, 2.0, True, torch.tensor(3)):
        with pytest.raises(ValueError, match="max_seqlen must be a positive int, got"):
            layer(x[:1], cu_seqlens=torch.tensor([0, 9], dtype=torch.int32), max_seqlen=wrong)
    expected = r"SparseMLA: positions must be int32 or int64 \[S=9\] or \[B=2, S\] on the device of x, cpu, got"
    bad: list[tuple[Any, str]] = [
        (torch.arange(8), r"int64 \[8\] on cpu"),
        (torch.arange(9, device="meta"), r"int64 \[9\] on meta"),
        (torch.ones(9, dtype=torch.bool), r"bool \[9\] on cpu"),
        (torch.arange(9, dtype=torch.uint8), r"uint8 \[9\] on cpu"),
        (torch.arange(9.0), r"float32 \[9\] on cpu"),
        (list(range(9)), "list"),
    ]
    for positions, got in bad:
        with pytest.raises(ValueError, match=f"{expected} {got}$"):
            layer(x, positions=positions)
    assert torch.equal(layer(x, positions=torch.arange(9).int()).out, layer(x).out)
    for options in ({"yarn": 40.0}, {"indexer": {"yarn": 40.0}}):
        with pytest.raises(TypeError, match="yarn must be a Yarn or None, got float"):
            make_layer(**options)
    with pytest.raises(ValueError, match=r"Yarn: factor must be at least 1, got 0\.5"):
        Yarn(0.5)
    for wrong in ({"original_positions": 0}, {"beta_fast": 0.0}, {"beta_slow": -1.0}):
        with pytest.raises(ValueError, match=f"Yarn: {next(iter(wrong))} must be positive, got"):
            Yarn(40.0, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Yarn: mscale must be a finite number, got nan"):
        Yarn(40.0, mscale=float("nan"))
    with pytest.raises(ValueError, match="Yarn: factor must be a finite number, got '40'"):
        Yarn("40")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="SparseMLA: indexer must be a dict of arguments, got list"):
        SparseMLA(HIDDEN, HEADS, indexer=[16])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"apply_rope: x must be floating-point \[B, S, ..., D\], got None"):
        apply_rope(None, torch.arange(9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="apply_rope: columns must be even, from 0 to D=48, got 'a'"):
        apply_rope(x, torch.arange(9), columns="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Yarn: beta_fast must be at least beta_slow=1\.0, got 0\.5"):
        Yarn(40.0, beta_fast=0.5)
    with pytest.raises(ValueError, match=r"SparseMLA: the base .* must be greater than 1 with yarn, got 1\.0"):
        make_layer(yarn=Yarn(40.0), rope_theta=1.0)
    for ids in (torch.zeros(2, 8, 4).int(), torch.zeros(2, 9, 4), torch.zeros(2, 9, 0).int(), [[0]]):
        with pytest.raises(ValueError, match=r"SparseMLA: ids must be int32 \[B=2, S=9, K\], got"):
            layer(x, ids=ids)
    for options in ({"rope": "pairs"}, {"indexer": {"rope": "pairs"}}):
        with pytest.raises(ValueError, match="rope must be 'half' or 'interleaved', got 'pairs'"):
            make_layer(**options)


def test_errors_of_listed_scores() -> None:
    layer, x = make_layer(), make_input(2, 6)
    tensors = layer.indexer(x, layer.q_a_proj(x))
    for ids in (torch.zeros(1, 6, 7, dtype=torch.int32), torch.zeros(2, 6, dtype=torch.int32), [[0]]):
        with pytest.raises(ValueError, match=r"LightningIndexer: ids must be int32 \[B=2, S=6, K\], got"):
            layer.indexer.scores(tensors, ids)  # type: ignore[arg-type]
