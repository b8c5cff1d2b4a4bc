"""The hooks of Megatron-core: their contract, without Megatron, against formulas in plain PyTorch."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from dsa_ext.integrations import megatron

SEQ, KEYS, HEADS, HI, DI, TOPK = 9, 12, 5, 8, 64, 4
SCALE = 0.05


def make(batch: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": normal(SEQ, batch, HI, DI),
        "k": normal(KEYS, batch, DI),
        "weights": normal(SEQ, batch, HI) * 0.1,
        "query": normal(SEQ, batch, HEADS, 576),
        "key": normal(KEYS, batch, 1, 576),
        "up_v": normal(HEADS, 7, 512) * 0.1,
        "starts": torch.tensor([0, 0, 0, 0, 4, 4, 4, 4, 7], dtype=torch.int32),
        "ends": torch.tensor([1, 2, 3, 4, 5, 6, 10, 4, 12], dtype=torch.int32),
    }


def indexer_of(a: dict[str, Tensor]) -> dict[str, Any]:
    names = ("q", "k", "weights", "starts", "ends")
    return {**{name: a[name] for name in names}, "index_topk": TOPK, "block_size": 8192}


def scores_of(a: dict[str, Tensor]) -> Tensor:
    """The indexer's scores [B, S, T], -inf outside of the bounds."""
    scores = torch.einsum("sbhd,tbd->bsht", a["q"], a["k"]).relu()
    scores = (scores * a["weights"].transpose(0, 1)[..., None]).sum(2)
    position = torch.arange(KEYS)
    visible = (position >= a["starts"][:, None]) & (position < a["ends"][:, None])
    return scores.masked_fill(~visible, -torch.inf)


def listed_mask(ids: Tensor) -> Tensor:
    """[B, S, T]: whether a key is selected."""
    mask = torch.zeros(*ids.shape[:2], KEYS + 1, dtype=torch.bool)
    return mask.scatter_(2, torch.where(ids >= 0, ids, KEYS).long(), True)[..., :KEYS]


def attention_of(a: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Probabilities [B, H, S, T]."""
    scores = torch.einsum("sbhd,tbd->bhst", a["query"], a["key"][:, :, 0]) * SCALE
    return scores.masked_fill(~listed_mask(ids)[:, None], -torch.inf).softmax(-1).nan_to_num(0)


def loss_of(a: dict[str, Tensor], target: Tensor, visible: Tensor, valid: Tensor | None, per_token: bool) -> Tensor:
    """0.3 times the indexer's loss over the visible keys [B, S, T]."""
    target = target / target.sum(-1, keepdim=True).clamp(min=1e-10)
    log_p = scores_of(a).masked_fill(~visible, -torch.inf).log_softmax(-1)
    rows = (torch.xlogy(target, target) - target * log_p.masked_fill(target == 0, 0)).sum(-1)
    counts = torch.ones(rows.shape, dtype=torch.bool) if valid is None else valid
    return 0.3 * (rows * counts).sum() / (1 if per_token else counts.sum())


@pytest.mark.parametrize("batch", [1, 3])
def test_selection(batch: int) -> None:
    a = make(batch)
    result = megatron.run_fused_qk_topk(**indexer_of(a))
    assert result is not None
    ids, length = result
    assert length is None
    assert (ids.dtype, ids.shape) == (torch.int32, (batch, SEQ, TOPK))
    scores = scores_of(a)
    for b in range(batch):
        for s in range(SEQ):
            order = sorted(range(KEYS), key=lambda t, row=scores[b, s]: (-row[t], t))
            best = sorted(t for t in order[:TOPK] if scores[b, s, t] > -torch.inf)
            assert ids[b, s].tolist() == best + [-1] * (TOPK - len(best))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_loss(batch: int, per_token: bool, masked: bool) -> None:
    a = make(batch)
    valid = torch.arange(batch * SEQ).view(batch, SEQ) % 3 != 1 if masked else None
    leaves = [a[name].requires_grad_() for name in ("q", "k", "weights")]
    result = megatron.run_fused_qk_topk_with_loss(
        **indexer_of(a),
        query=a["query"],
        key=a["key"],
        softmax_scale=SCALE,
        loss_coeff=0.3,
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
        query_valid_rows=valid,
        calculate_per_token_loss=per_token,
        config=None,
    )
    assert result is not None
    ids, length, loss = result
    assert length is None
    target = attention_of(a, ids).sum(1)
    expected = loss_of(a, target, listed_mask(ids), valid, per_token)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


def whole_of(a: dict[str, Tensor], **changes: Any) -> dict[str, Any]:
    """Arguments of run_fused_dsa_attention."""
    tensors = {"query": a["query"], "key": a["key"], "up_v_weight": a["up_v"], "value": None}
    indexer = {"q_indexer": a["q"], "k_indexer": a["k"], "indexer_weights": a["weights"], "indexer_topk": TOPK}
    bounds = {"varlen_starts": a["starts"].long(), "varlen_ends": a["ends"].long(), "key_positions": None}
    loss = {"loss_coeff": 0.3, "sparse_loss": True, "calculate_per_token_loss": False, "query_valid_rows": None}
    options = {"softmax_scale": SCALE, "absorbed_mla": True, "use_relu": True, "pg_collection": None, "config": None}
    return {**tensors, **indexer, **bounds, **loss, **options, **changes}


@pytest.mark.parametrize("topk", [TOPK, KEYS])
@pytest.mark.parametrize("sparse_loss", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_selection_attention_and_loss_together(topk: int, sparse_loss: bool, per_token: bool, masked: bool) -> None:
    a = make(3)
    leaves = [a[name].requires_grad_() for name in ("query", "key", "up_v", "q", "k", "weights")]
    valid = torch.arange(3 * SEQ).view(3, SEQ) % 3 != 1 if masked else None
    options = {"sparse_loss": sparse_loss, "calculate_per_token_loss": per_token, "query_valid_rows": valid}
    result = megatron.run_fused_dsa_attention(**whole_of(a, indexer_topk=topk, **options))
    assert result is not None
    out, loss = result

    split = megatron.run_fused_qk_topk(**indexer_of(a) | {"index_topk": topk})
    assert split is not None
    ids = split[0]
    latent = torch.einsum("bhst,tbd->sbhd", attention_of(a, ids), a["key"][:, :, 0, :512])
    expected_out = torch.einsum("sbhc,hdc->sbhd", latent, a["up_v"]).flatten(2)
    torch.testing.assert_close(out, expected_out)

    listed = ids if sparse_loss else torch.arange(KEYS, dtype=torch.int32).expand(3, SEQ, KEYS)
    visible = listed_mask(listed) & (scores_of(a) > -torch.inf)
    attention = torch.einsum("sbhd,tbd->bhst", a["query"], a["key"][:, :, 0]).detach() * SCALE
    target = attention.masked_fill(~visible[:, None], -torch.inf).softmax(-1).nan_to_num(0).sum(1)
    expected_loss = loss_of(a, target, visible, valid, per_token)
    torch.testing.assert_close(loss, expected_loss)
    upstream = torch.randn(out.shape, dtype=torch.float64)
    got = torch.autograd.grad([out, loss], leaves, [upstream, torch.tensor(2.0, dtype=torch.float64)])
    expected = (expected_out * upstream).sum() + 2 * expected_loss
    torch.testing.assert_close(got, torch.autograd.grad(expected, leaves))


def test_an_empty_batch() -> None:
    a = {name: t if t.dim() == 1 or name == "up_v" else t[:, :0] for name, t in make(1).items()}
    out, loss = megatron.run_fused_dsa_attention(**whole_of(a, sparse_loss=False))  # type: ignore[misc]
    assert (out.shape, loss) == ((SEQ, 0, HEADS * 7), 0)


def test_no_loss() -> None:
    a = make(1)
    with_coeff = whole_of(a, loss_coeff=0.0)
    assert megatron.run_fused_dsa_attention(**with_coeff)[1] == 0  # type: ignore[index]
    with torch.no_grad():
        assert megatron.run_fused_dsa_attention(**whole_of(a))[1] == 0  # type: ignore[index]


HEADS_OF_RANKS = (2, HEADS - 2)


def of_one_rank(rank: int, folder: str) -> None:
    """Compares the losses of two ranks that divide the heads with those of all heads."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        group = torch.distributed.group.WORLD
        a = make(2)
        indexer = [a[name].requires_grad_() for name in ("q", "k", "weights")]
        own = slice(0, HEADS_OF_RANKS[0]) if rank == 0 else slice(HEADS_OF_RANKS[0], None)
        part = {"query": a["query"][:, :, own], "up_v_weight": a["up_v"][own]}
        for sparse_loss in (False, True):
            options: Any = {"sparse_loss": sparse_loss, "calculate_per_token_loss": True}
            _, expected = megatron.run_fused_dsa_attention(**whole_of(a, **options))  # type: ignore[misc]
            options |= {"pg_collection": SimpleNamespace(tp=group)}
            for at_once in (2**24, 3 * KEYS):  # in one run, and in runs of three queries
                megatron._DenseLossOfGroup._SCORES_AT_ONCE = at_once
                _, got = megatron.run_fused_dsa_attention(**whole_of(a, **part, **options))  # type: ignore[misc]
                torch.testing.assert_close(got, expected)
                gradients = [torch.autograd.grad(2 * loss, indexer, retain_graph=True) for loss in (got, expected)]
                torch.testing.assert_close(*gradients)
    finally:
        torch.distributed.destroy_process_group()


def test_tensor_parallel_ranks(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(of_one_rank, (str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_length", [False, True])
def test_attention(batch: int, with_length: bool) -> None:
    a = make(batch)
    result = megatron.run_fused_qk_topk(**indexer_of(a))
    assert result is not None
    ids = result[0]
    length = torch.arange(batch * SEQ).view(batch, SEQ) % 4 + 1 if with_length else None
    leaves = a["query"].requires_grad_(), a["key"].requires_grad_()
    out = megatron.run_fused_absorbed_sparse_attention(*leaves, ids, SCALE, 512, length)
    assert out is not None
    used = ids if length is None else torch.where(torch.arange(TOPK) < length[..., None], ids, -1)
    expected = torch.einsum("bhst,tbd->sbhd", attention_of(a, used), a["key"][:, :, 0, :512])
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(out.shape, dtype=torch.float64)
    got = torch.autograd.grad(out, leaves, upstream)
    torch.testing.assert_close(got, torch.autograd.grad(expected, leaves, upstream))


SMALLEST, LARGEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def test_numbers_beyond_int32() -> None:
    """int64 ids, lengths and bounds mean what they say: none of them wraps to a small number."""
    a = make(1)
    far = indexer_of(a) | {"starts": torch.full((SEQ,), SMALLEST), "ends": torch.full((SEQ,), LARGEST)}
    near = indexer_of(a) | {"starts": torch.zeros(SEQ).int(), "ends": torch.full((SEQ,), KEYS).int()}
    got, expected = (megatron.run_fused_qk_topk(**arguments) for arguments in (far, near))
    assert torch.equal(got[0], expected[0])  # type: ignore[index]
    beyond = near | {"starts": torch.full((SEQ,), 2**32)}
    assert (megatron.run_fused_qk_topk(**beyond)[0] == -1).all()  # type: ignore[index]

    run = megatron.run_fused_absorbed_sparse_attention
    ids = torch.tensor([1, SMALLEST, 2**32, 3]).expand(1, SEQ, TOPK)
    padded = torch.tensor([1, -1, -1, 3], dtype=torch.int32).expand(1, SEQ, TOPK)
    for given, meant in ((None, None), (2**32, None), (SMALLEST, 0), (1, 1)):
        lengths = [None if n is None else torch.full((1, SEQ), n) for n in (given, meant)]
        results = [run(a["query"], a["key"], i, SCALE, 512, n) for i, n in zip((ids, padded), lengths, strict=True)]
        assert torch.equal(*results)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["q", "weights", "query"])
@pytest.mark.parametrize("kind", ["split", "selected", "all", "all of a group"])
def test_rows_that_do_not_count_may_hold_nan(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss and its gradients are those of any other content of these rows."""
    valid = torch.arange(2 * SEQ).view(2, SEQ) % 3 != 1
    group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    results = []
    for poison in (0.5, torch.nan):
        a = make(2)
        a[name][~valid.T] = poison
        leaves = [a[leaf].requires_grad_() for leaf in ("q", "k", "weights")]
        main: Any = {"query": a["query"], "key": a["key"], "softmax_scale": SCALE, "loss_coeff": 0.3}
        main |= {"query_valid_rows": valid, "pg_collection": SimpleNamespace(tp=group if "group" in kind else None)}
        if kind == "split":
            loss = megatron.run_fused_qk_topk_with_loss(**indexer_of(a), **main)[2]  # type: ignore[index]
        else:
            _, loss = megatron.run_fused_dsa_attention(**whole_of(a, **main, sparse_loss=kind == "selected"))  # type: ignore[misc]
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    assert results[0][0] > 0
    assert all(gradient.isfinite().all() for gradient in results[1])
    torch.testing.assert_close(results[1], results[0])


def test_calls_that_are_declined() -> None:
    a = make(1)
    indexer = indexer_of(a)
    packed = {"cp_size": 2, "single_packed_thd_sequence": True, "local_packed_cp_query_len": KEYS}
    for changes in ({"use_relu": False}, {"q": a["q"][:, :, :4]}, {"k": a["k"].half()}, packed):
        assert megatron.run_fused_qk_topk(**indexer | changes) is None
    for changes in (packed | {"local_packed_cp_query_len": SEQ}, {"index_topk": 5000}):
        assert megatron.run_fused_qk_topk(**indexer | changes) is not None
    half = {name: a[name].bfloat16() for name in ("q", "k")}
    main: Any = {"query": a["query"], "key": a["key"], "softmax_scale": SCALE, "loss_coeff": 1.0, "pg_collection": None}
    for changes in ({"starts": None}, {"ends": None}, {"q": a["q"][:, 0]}, half):  # the last with weights in float64
        assert megatron.run_fused_qk_topk(**indexer | changes) is None
        assert megatron.run_fused_qk_topk_with_loss(**indexer | changes, **main) is None
    assert megatron.run_fused_qk_topk(**indexer | half | {"weights": a["weights"].float()}) is not None
    assert megatron.run_fused_qk_topk(**indexer | {"weights": a["weights"].float()}) is not None
    ids = torch.zeros(1, SEQ, TOPK, dtype=torch.int32)
    run = megatron.run_fused_absorbed_sparse_attention
    assert run(a["query"], a["key"].expand(-1, -1, HEADS, -1), ids, SCALE, 512) is None
    assert run(a["query"][..., :192], a["key"][..., :192], ids, SCALE, 512) is None
    assert run(a["query"], a["key"], ids, SCALE, 128) is None
    assert run(a["query"], a["key"], ids[..., :0], SCALE, 512) is None
    whole = megatron.run_fused_dsa_attention
    declined = [{"absorbed_mla": False}, {"value": a["key"]}, {"up_v_weight": None}, {"use_relu": False}]
    declined += [{"varlen_starts": None}, {"varlen_ends": None}, {"key_positions": a["starts"]}]
    assert all(whole(**whole_of(a, **changes)) is None for changes in declined)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    utils: Any = ModuleType("megatron.core.utils")
    utils._VALID_DSA_KERNEL_BACKENDS = ("none", "tilelang")
    kernels: Any = ModuleType("dsa_kernels")
    kernels._BACKEND_MODULE_NAME_BY_BACKEND = {}
    variant: Any = ModuleType("variant")
    variant.dsa_kernels = kernels
    core: Any = ModuleType("megatron.core")
    core.utils = utils
    config: Any = ModuleType("transformer_config")

    @dataclass
    class TransformerConfig:
        dsa_kernel_backend: Literal["none", "tilelang"] = "none"

    config.TransformerConfig = TransformerConfig
    names = {
        "megatron.core.transformer.transformer_config": config,
        "megatron": ModuleType("megatron"),
        "megatron.core": core,
        "megatron.core.utils": utils,
        "megatron.core.transformer": ModuleType("megatron.core.transformer"),
        "megatron.core.transformer.experimental_attention_variant": variant,
    }
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    for _ in range(2):
        megatron.register()
    assert utils._VALID_DSA_KERNEL_BACKENDS == ("none", "tilelang", "dsa_ext")
    choices = TransformerConfig.__dataclass_fields__["dsa_kernel_backend"].type
    assert get_args(choices) == ("none", "tilelang", "dsa_ext")
    assert kernels._BACKEND_MODULE_NAME_BY_BACKEND == {"dsa_ext": "dsa_ext.integrations.megatron"}

    del utils._VALID_DSA_KERNEL_BACKENDS
    with pytest.raises(RuntimeError, match=r"register: Megatron must be like its commit .*_VALID_DSA_KERNEL_BACKENDS"):
        megatron.register()
