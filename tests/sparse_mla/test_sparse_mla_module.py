"""SparseMLA and its LightningIndexer on the CPU: against plain attention; phases, gradients, compile, learning."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dsa_ext.nn import LightningIndexer, SparseMLA, SparseMLAOutput, apply_rope

HIDDEN, HEADS, TOPK = 48, 4, 5
SIZES: dict[str, Any] = {"q_lora_rank": 32, "nope_dim": 16, "v_dim": 24, "topk": TOPK}


def make_layer(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> SparseMLA:
    torch.manual_seed(seed)
    indexer = {"heads": 8, "head_dim": 64, "precision": "bf16", **changes.pop("indexer", {})}
    return SparseMLA(HIDDEN, HEADS, **{**SIZES, **changes}, indexer=indexer, dtype=dtype)


def make_input(batch: int = 2, seq: int = 9, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, seq, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=dtype)


def total(result: SparseMLAOutput) -> Tensor:
    return result.out.sum() + (0 if result.indexer_loss is None else result.indexer_loss)


def plain_attention(layer: SparseMLA, x: Tensor) -> tuple[Tensor, Tensor]:
    """Multi-head attention with keys and values per head, without absorption; and its distribution [B, H, S, S]."""
    batch, seq, _ = x.shape
    positions = torch.arange(seq)
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))).unflatten(-1, (HEADS, -1))
    latent, k_rope = layer.kv_a_proj_with_mqa(x).split([512, 64], dim=-1)
    keys_and_values = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (HEADS, -1))
    k_nope, v = keys_and_values.split([SIZES["nope_dim"], SIZES["v_dim"]], dim=-1)
    q = torch.cat([q[..., :-64], apply_rope(q[..., -64:], positions)], -1)
    k_rope = apply_rope(k_rope, positions)[:, :, None].expand(batch, seq, HEADS, 64)
    k = torch.cat([k_nope, k_rope], -1)
    out = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    return layer.o_proj(out.transpose(1, 2).flatten(2)), scores.masked_fill(later, -torch.inf).softmax(-1)


def plain_logits(layer: SparseMLA, x: Tensor) -> Tensor:
    """The indexer's scores of all keys [B, S, S], from its formula."""
    indexer = layer.indexer
    positions = torch.arange(x.shape[1])
    q_latent = layer.q_a_layernorm(layer.q_a_proj(x))
    q = indexer.wq_b(q_latent).unflatten(-1, (8, 64))
    k = indexer.k_norm(indexer.wk(x))
    scores = torch.einsum("bshd,btd->bsht", apply_rope(q, positions), apply_rope(k, positions)).relu()
    logits = (scores * indexer.weights_proj(x)[..., None]).sum(2) * (8 * 64) ** -0.5
    return logits.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -torch.inf)


@pytest.mark.parametrize("phase", ["dense", "warmup"])
def test_dense_attention(phase: Any) -> None:
    layer, x = make_layer(phase=phase), make_input()
    torch.testing.assert_close(layer(x).out, plain_attention(layer, x)[0])


def test_all_keys_selected() -> None:
    layer, x = make_layer(topk=9), make_input()
    result = layer(x)
    torch.testing.assert_close(result.out, plain_attention(layer, x)[0])
    rows = torch.arange(9, dtype=torch.int32).expand(2, 9, 9)
    assert torch.equal(result.ids, rows.masked_fill(rows > rows.mT, -1))


def test_the_best_keys_are_selected() -> None:
    layer, x = make_layer(), make_input()
    best = plain_logits(layer, x).topk(TOPK, dim=-1)
    expected = best.indices.masked_fill(best.values == -torch.inf, 99).sort(-1).values
    assert torch.equal(layer(x).ids, expected.masked_fill(expected == 99, -1).int())


@pytest.mark.parametrize("phase", ["warmup", "sparse"])
def test_loss(phase: Any) -> None:
    """KL divergence from the mean of the heads' distributions, over all keys or over the selected ones."""
    layer, x = make_layer(phase=phase), make_input()
    result = layer(x)
    logits, attention = plain_logits(layer, x), plain_attention(layer, x)[1]
    if phase == "sparse":
        listed = torch.zeros(2, 9, 10, dtype=torch.bool).scatter(2, result.ids.where(result.ids >= 0, 9).long(), True)
        logits = logits.masked_fill(~listed[..., :9], -torch.inf)
        attention = attention * listed[:, None, :, :9]
        attention = attention / attention.sum(-1, keepdim=True)
    target, log_q = attention.mean(1), logits.log_softmax(-1).masked_fill(logits == -torch.inf, 0)
    expected = (torch.xlogy(target, target) - target * log_q).sum(-1).mean()
    torch.testing.assert_close(result.indexer_loss, expected)


@pytest.mark.parametrize("phase", ["warmup", "sparse"])
def test_each_loss_trains_its_own_part(phase: Any) -> None:
    layer, x = make_layer(phase=phase), make_input().requires_grad_()
    result = layer(x)
    result.indexer_loss.backward()
    assert x.grad is None
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == name.startswith("indexer."), name
    layer.zero_grad()
    layer(x).out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is None) == name.startswith("indexer."), name


@pytest.mark.parametrize("checkpointed", [False, True])
def test_deferred_loss(checkpointed: bool) -> None:
    """The same gradients, and the same value once the backward has run."""
    results = []
    for where in ("forward", "deferred"):
        layer, x = make_layer(indexer_loss=where), make_input().requires_grad_()
        out, loss, _ = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        assert (loss == 0) == (where == "deferred")
        (out.square().sum() + 0.3 * loss).backward()
        results.append([loss, x.grad, *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("options", [{"phase": "warmup"}, {}, {"indexer_loss": "deferred"}], ids=str)
def test_reentrant_checkpointing(options: dict[str, Any]) -> None:
    """Its first forward pass returns no loss, whose gradient would be 1 then."""
    layer, x = make_layer(**options), make_input().requires_grad_()
    with pytest.raises(RuntimeError, match=r"SparseMLA: reentrant checkpointing .* use_reentrant=False"):
        checkpoint(layer, x, use_reentrant=True)[0].sum().backward()
    layer.indexer.requires_grad_(False)
    checkpoint(layer, x, use_reentrant=True)[0].sum().backward()


def test_a_deferred_loss_in_compiled_code() -> None:
    """Is computed in the forward."""
    layer, x = make_layer(indexer_loss="deferred"), make_input()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x).indexer_loss, make_layer()(x).indexer_loss)


@pytest.mark.parametrize("trained", ["attention", "indexer", "nothing"])
def test_a_deferred_loss_of_which_only_one_side_learns(trained: str) -> None:
    """Is computed in the forward, and frozen parts get no gradients."""
    results = []
    for where in ("forward", "deferred"):
        layer, x = make_layer(indexer_loss=where), make_input()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name.startswith("indexer.") == (trained == "indexer") and trained != "nothing")
        out, loss, _ = layer(x)
        assert out.requires_grad == (trained == "attention")
        results.append([loss, *([] if trained == "nothing" else torch.autograd.grad(
            out.sum() + loss, [parameter for parameter in layer.parameters() if parameter.requires_grad]
        ))])  # fmt: skip
        assert loss > 0
    torch.testing.assert_close(*results)


def test_a_deferred_loss_that_is_changed_in_place() -> None:
    out, loss, _ = make_layer(indexer_loss="deferred")(make_input())
    loss *= 0.3
    with pytest.raises(RuntimeError, match="indexer_loss was changed in place"):
        (out.sum() + loss).backward()


@pytest.mark.parametrize("where", ["forward", "deferred"])
@pytest.mark.parametrize("used", ["out", "loss"])
def test_what_one_result_alone_trains(where: str, used: str) -> None:
    """Parameters of the other have no gradient, not one of zeros: an optimizer skips them."""
    layer, x = make_layer(indexer_loss=where), make_input()
    out, loss, _ = layer(x)
    (out.sum() if used == "out" else loss).backward()
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == (name.startswith("indexer.") == (used == "loss")), name


def test_errors_of_indexer_loss() -> None:
    with pytest.raises(ValueError, match="indexer_loss must be 'forward' or 'deferred', got 'later'"):
        make_layer(indexer_loss="later")


def test_no_loss_without_gradients() -> None:
    layer, x = make_layer(), make_input()
    with torch.no_grad():
        assert layer(x).indexer_loss is None
    layer.phase = "dense"
    assert layer(x).indexer_loss is None


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
def test_sequences_do_not_mix(phase: Any) -> None:
    layer, x = make_layer(phase=phase), make_input(batch=3)
    together, one = layer(x), layer(x[1:2])
    torch.testing.assert_close(together.out[1:2], one.out)
    if phase == "sparse":
        assert torch.equal(together.ids[1:2], one.ids)


def test_later_tokens_have_no_effect() -> None:
    layer, x = make_layer(), make_input()
    torch.testing.assert_close(layer(x).out[:, :6], layer(x[:, :6]).out)


def test_names_of_parameters() -> None:
    expected_shapes = {
        "q_a_proj.weight": (32, HIDDEN),
        "q_a_layernorm.weight": (32,),
        "q_b_proj.weight": (HEADS * (16 + 64), 32),
        "kv_a_proj_with_mqa.weight": (512 + 64, HIDDEN),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (HEADS * (16 + 24), 512),
        "o_proj.weight": (HIDDEN, HEADS * 24),
        "indexer.wq_b.weight": (8 * 64, 32),
        "indexer.wk.weight": (64, HIDDEN),
        "indexer.k_norm.weight": (64,),
        "indexer.k_norm.bias": (64,),
        "indexer.weights_proj.weight": (8, HIDDEN),
    }
    layer = make_layer(indexer={"hadamard": True})
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == expected_shapes


def test_hadamard_leaves_scores_as_they_are() -> None:
    x, (plain, rotated) = make_input(), (make_layer(indexer={"hadamard": h}) for h in (False, True))
    tensors = [layer.indexer(x, layer.q_a_proj(x)) for layer in (plain, rotated)]
    assert not torch.allclose(tensors[0].q, tensors[1].q)
    torch.testing.assert_close(plain.indexer.logits(tensors[0]), rotated.indexer.logits(tensors[1]))


def test_scores_of_the_selected_keys_are_their_logits() -> None:
    layer, x = make_layer(), make_input()
    tensors = layer.indexer(x, layer.q_a_proj(x))
    ids = layer.indexer.select(tensors, TOPK)
    logits = layer.indexer.logits(tensors).gather(2, ids.clamp(min=0).long()).masked_fill(ids < 0, -torch.inf)
    torch.testing.assert_close(layer.indexer.scores(tensors, ids), logits)


@pytest.mark.parametrize("batch", [1, 2])
def test_keys_up_to_the_own_one_are_the_default_of_select(batch: int) -> None:
    layer, x = make_layer(), make_input(batch)
    tensors = layer.indexer(x, layer.q_a_proj(x))
    tensors.q[:, 5] = torch.nan  # its query selects its own key
    ends = torch.arange(1, x.shape[1] + 1, dtype=torch.int32).expand(x.shape[:2])
    expected = layer.indexer.select(tensors, TOPK, (torch.full_like(ends, -3), ends))
    ids = layer.indexer.select(tensors, TOPK)
    assert torch.equal(ids, expected)
    assert (ids[:, 5, 0] == 5).all()


def test_ids_that_are_no_keys_have_no_score() -> None:
    """Sequences are packed: the id S of one is not the first key of the next."""
    layer, x = make_layer(), make_input(seq=6)
    tensors = layer.indexer(x, layer.q_a_proj(x))
    scores = layer.indexer.scores(tensors, torch.tensor([-1, 0, 5, 6, 7, 11, 12], dtype=torch.int32).expand(2, 6, 7))
    assert torch.equal(scores.isfinite(), torch.tensor([0, 1, 1, 0, 0, 0, 0]).bool().expand(2, 6, 7))


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize(("batch", "seq"), [(2, 0), (0, 9), (0, 0)])
def test_empty_inputs(batch: int, seq: int, phase: Any) -> None:
    layer, x = make_layer(torch.float32, phase=phase), make_input(batch, seq, torch.float32)
    result = layer(x)
    assert result.out.shape == x.shape
    assert result.indexer_loss is None if phase == "dense" else result.indexer_loss == 0
    total(result).backward()
    for name, parameter in layer.named_parameters():
        if phase != "dense" or not name.startswith("indexer."):
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
    assert layer.attention_to_all(x).shape == (batch, seq, seq)
    logits = layer.indexer.logits(layer.indexer(x, layer.q_a_proj(x)))
    assert logits.shape == (batch, seq, seq)
    assert logits.requires_grad


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
@pytest.mark.parametrize(("batch", "seq"), [(2, 0), (0, 9)])
def test_empty_inputs_without_data(batch: int, seq: int, phase: Any) -> None:
    """On a meta device and compiled, with keys in fp8."""
    torch._dynamo.reset()
    layer = make_layer(torch.bfloat16, phase=phase, indexer={"precision": "fp8"})
    x = make_input(batch, seq, torch.bfloat16)
    total(torch.compile(layer, fullgraph=True, backend="aot_eager")(x)).backward()
    assert layer.to("meta")(x.to("meta")).out.shape == x.shape


@pytest.mark.parametrize("hadamard", [False, True])
def test_fp8_selects_nearly_the_same(hadamard: bool) -> None:
    x = make_input(batch=1, seq=300, dtype=torch.float32)
    selected = []
    for precision in ("bf16", "fp8"):
        layer = make_layer(torch.float32, indexer={"precision": precision, "hadamard": hadamard}, topk=50)
        ids = layer.indexer.select(layer.indexer(x, layer.q_a_proj(x)), 50)[0, 100:]
        selected.append(torch.zeros(200, 300, dtype=torch.bool).scatter(1, ids.long(), True))
    shared = (selected[0] & selected[1]).sum() / (200 * 50)
    assert 0.9 < shared < 1


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
def test_compile(phase: Any) -> None:
    torch._dynamo.reset()
    layer, x = make_layer(torch.float32, phase=phase), make_input(dtype=torch.float32)

    def losses(module: Any) -> tuple[Tensor, ...]:
        result = module(x)
        loss = result.out.square().mean()
        loss = loss if result.indexer_loss is None else loss + result.indexer_loss
        used = [p for name, p in layer.named_parameters() if phase != "dense" or not name.startswith("indexer.")]
        return loss, *torch.autograd.grad(loss, used)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(losses(compiled), losses(layer), rtol=1e-4, atol=1e-5)


def test_the_indexer_learns() -> None:
    """Warm-up, then the sparse phase: the loss falls, and the selected keys get more of the attention."""
    layer, x = make_layer(torch.float32, phase="warmup", topk=16), make_input(batch=2, seq=128, dtype=torch.float32)
    with torch.no_grad():
        layer.q_b_proj.weight *= 12  # attention that prefers some keys
        attention = plain_attention(layer, x)[1].mean(1)

    def recall() -> float:
        """Share of the attention that selected keys get, for queries that see many more."""
        ids = layer.indexer.select(layer.indexer(x, layer.q_a_layernorm(layer.q_a_proj(x))), 16)[:, 64:]
        return float(attention[:, 64:].gather(2, ids.long()).sum(-1).mean())

    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=3e-3)
    before, losses = recall(), []
    for step in range(120):
        layer.phase = "warmup" if step < 60 else "sparse"
        loss = layer(x).indexer_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[59] < 0.8 * losses[0]
    assert recall() > before + 0.05


def test_errors() -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match="phase must be 'dense', 'warmup' or 'sparse', got 'decode'"):
        layer.phase = "decode"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="precision must be 'fp8' or 'bf16', got 'fp4'"):
        LightningIndexer(8, 8, precision="fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head_dim must be a power of 2 with hadamard, got 96"):
        LightningIndexer(8, 8, head_dim=96, hadamard=True)
    for rope_dim in (31, 66, -2):
        with pytest.raises(ValueError, match=f"rope_dim must be an even int from 0 to head_dim=64, got {rope_dim}"):
            LightningIndexer(8, 8, head_dim=64, rope_dim=rope_dim)
    x = make_input()
    for call in (layer, layer.select, layer.attention_to_all):
        for bad, got in ((x[0], r"float64 \[9, 48\]"), (x[..., 1:], r"float64 \[2, 9, 47\]"), (None, "NoneType")):
            with pytest.raises(ValueError, match=rf"SparseMLA: x must be \[B, S, 48\], got {got}"):
                call(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": 5000}, "topk must be from 1 to 4096, got 5000"),
        ({"rope_dim": 32}, "SparseMLA: rope_dim must be 64, got 32"),
        ({"kv_lora_rank": 256}, "SparseMLA: kv_lora_rank must be 512, got 256"),
        ({"heads": 129}, "SparseMLA: heads must be an int from 1 to 128, got 129"),
        ({"heads": "4"}, "SparseMLA: heads must be an int from 1 to 128, got '4'"),
        ({"hidden_size": 0}, "SparseMLA: hidden_size must be a positive int, got 0"),
        ({"q_lora_rank": None}, "SparseMLA: q_lora_rank must be a positive int, got None"),
        ({"nope_dim": -1}, "SparseMLA: nope_dim must be a positive int, got -1"),
        ({"v_dim": 1.5}, "SparseMLA: v_dim must be a positive int, got 1.5"),
        ({"indexer": {"heads": 12}}, "q's heads must be 8, 16, 32 or 64, got 12"),
        ({"indexer": {"head_dim": 96}}, "q's head dimension must be 64 or 128, got 96"),
    ],
    ids=str,
)
def test_errors_of_sizes(options: dict[str, Any], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=re.escape(message)):
        SparseMLA(**{"hidden_size": 48, "heads": 4, "q_lora_rank": 32, **options})


def test_errors_of_rope() -> None:
    x, positions = torch.zeros(2, 6, 3, 8), torch.arange(6)
    for bad, got in ((x.long(), r"int64 \[2, 6, 3, 8\]"), (x[0, 0], r"float32 \[3, 8\]")):
        with pytest.raises(ValueError, match=rf"x must be floating-point \[B, S, ..., D\], got {got}"):
            apply_rope(bad, positions)
    for columns in (3, 10, -2):
        with pytest.raises(ValueError, match=f"columns must be even, from 0 to D=8, got {columns}"):
            apply_rope(x, positions, columns=columns)
    for other, got in ((positions[:1], r"int64 \[1\]"), (positions[None], r"int64 \[1, 6\]"), ([0] * 6, "list")):
        with pytest.raises(ValueError, match=rf"positions must be int32 or int64 \[S=6\] or \[B=2, S\] .*, got {got}"):
            apply_rope(x, other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="apply_rope: layout must be 'half' or 'interleaved', got 'pairs'"):
        apply_rope(x, positions, layout="pairs")  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ["warmup", "sparse"])
@pytest.mark.parametrize("bounds", [None, [0, 4, 9]], ids=["one sequence", "packed"])
def test_nan_stays_in_the_row_of_its_token(phase: Any, bounds: list[int] | None) -> None:
    layer, x = make_layer(), make_input(batch=1)
    layer.phase = phase
    options = {} if bounds is None else {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    expected = layer(x, **options).out
    x[0, -1] = torch.nan  # no other token sees it
    result = layer(x, **options)
    assert result.out[0, -1].isnan().all()
    torch.testing.assert_close(result.out[0, :-1], expected[0, :-1])
    assert result.indexer_loss is not None
    assert result.indexer_loss.isnan()


@pytest.mark.parametrize("name", ["q_a_proj", "indexer.wq_b", "indexer.wk"])
def test_nan_in_a_weight_reaches_the_loss(name: str) -> None:
    layer = make_layer()
    layer.phase = "sparse"
    with torch.no_grad():
        layer.get_submodule(name).weight[0, 0] = torch.nan
    result = layer(make_input())
    assert result.indexer_loss is not None
    assert result.indexer_loss.isnan()
    assert name != "q_a_proj" or result.out.isnan().any()
