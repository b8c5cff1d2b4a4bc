"""SparseMLA on several ranks, with gloo on the CPU, against one rank."""

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from gloo_ranks import gloo_rank, run_on_ranks
from parallel_layers import BATCH, HIDDEN, make_layer, normal, one_rank
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dsa_ext.distributed import collectives, parallelize
from dsa_ext.distributed.shares import _kept_shares_of, shares_of
from dsa_ext.nn import SparseMLA


def compare(layer: SparseMLA, parallel: Any, cp: Any, seq: int, phase: Any, packed: bool) -> None:
    """One step of both layers: outputs, losses, selections and all gradients."""
    layer.phase = parallel.phase = phase
    x, dout = normal(BATCH, seq, HIDDEN), normal(BATCH, seq, HIDDEN).flip(0)
    options: dict[str, Any] = {}
    if packed:
        x, dout = x[:1], dout[:1]
        options["cu_seqlens"] = torch.tensor([0, seq // 3, seq // 3, seq], dtype=torch.int32)
    x.requires_grad_()
    expected = layer(x, **options)
    total = (expected.out * dout).sum() + (0 if expected.indexer_loss is None else 3 * expected.indexer_loss)
    layer.zero_grad()
    total.backward()
    assert x.grad is not None

    held = parallel.rows_of_rank(seq)
    own = x.detach()[:, held].requires_grad_()
    got = parallel(own, seq_len=seq, **options)
    torch.testing.assert_close(got.out, expected.out[:, held])
    assert (got.indexer_loss is None) == (expected.indexer_loss is None)
    total = (got.out * dout[:, held]).sum()
    if expected.indexer_loss is not None:
        torch.testing.assert_close(got.indexer_loss, expected.indexer_loss)
        total = total + 3 * got.indexer_loss
    if phase == "sparse":
        ranks = 1 if parallel._tp is None else dist.get_world_size(parallel._tp)
        rank = 0 if parallel._tp is None else dist.get_rank(parallel._tp)
        first = parallel._first_rows(seq) if cp is None else 0
        queries = held[shares_of(len(held), ranks, "zigzag", torch.device("cpu"), first).rows(rank)]
        assert torch.equal(got.ids, expected.ids[:, queries])
    parallel.zero_grad()
    total.backward()
    torch.testing.assert_close(own.grad, x.grad[:, held])
    for (name, p), q in zip(layer.named_parameters(), parallel.parameters(), strict=True):
        gradient = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad
        assert (p.grad is None) == (gradient is None), name
        if gradient is not None:
            if cp is not None:
                gradient = gradient.clone()
                dist.all_reduce(gradient, group=cp)
            torch.testing.assert_close(gradient, p.grad, msg=name)


def run(rank: int, tensor: int, context: int, order: Any, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with gloo_rank(rank, tensor * context, folder):
        mesh = init_device_mesh("cpu", (context, tensor), mesh_dim_names=("cp", "tp"))
        layer = make_layer()
        parallel = parallelize(make_layer(), mesh, tensor="tp", context="cp", order=order)
        cp = mesh["cp"].get_group() if context > 1 else None
        inputs = (
            (24, False),
            (17, True),
            (3, False),
        )  # rows, and whether they are packed sequences; some ranks have none
        for phase, (seq, packed) in itertools.product(("sparse", "warmup", "dense"), inputs):
            compare(layer, parallel, cp, seq, phase, packed)
        x = normal(BATCH, 24, HIDDEN)
        assert torch.equal(parallel.select(x), layer.select(x))
        torch.testing.assert_close(parallel.attention_to_all(x), layer.attention_to_all(x))


@pytest.mark.parametrize(
    ("tensor", "context", "order"),
    [
        (1, 1, "zigzag"), (2, 1, "zigzag"), (3, 1, "zigzag"), (4, 1, "zigzag"), (1, 2, "zigzag"), (1, 3, "contiguous"),
        (1, 4, "zigzag"), (2, 2, "zigzag"), (2, 2, "contiguous"),
    ],
)  # fmt: skip
def test_like_one_rank(tensor: int, context: int, order: str, tmp_path: Path) -> None:
    run_on_ranks(run, (tensor, context, order, str(tmp_path)), tensor * context)


def run_expanded(rank: int, ranks: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with gloo_rank(rank, ranks, folder):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        sizes = {"nope_dim": 128, "v_dim": 128, "topk": 1}
        parallel = parallelize(make_layer(**sizes), mesh, tensor="tp")
        assert parallel._first_rows(30) == (12 if ranks <= 2 else 0)
        for seq, packed in ((24, False), (13, False), (9, False), (1, False), (17, True)):
            compare(make_layer(**sizes), parallel, None, seq, "sparse", packed)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_first_queries(ranks: int, tmp_path: Path) -> None:
    """With the heads of DeepSeek-V3.2 they run in the expanded form on up to two ranks, an equal share on each."""
    run_on_ranks(run_expanded, (ranks, str(tmp_path)), ranks)


def record_order(rank: int, tensor: int, context: int, folder: str) -> None:
    """Collectives begin before what does not need them, and are waited for afterwards; in the backward pass too."""
    with gloo_rank(rank, tensor * context, folder):
        mesh = init_device_mesh("cpu", (context, tensor), mesh_dim_names=("cp", "tp"))
        parallel = parallelize(make_layer(), mesh, tensor="tp", context="cp")
        events: list[str] = []

        def recorded(event: str, call: Any) -> Any:
            def wrapped(*args: Any) -> Any:
                events.append(event)
                return call(*args)

            return wrapped

        with pytest.MonkeyPatch.context() as patch:
            names = {"_Gather": "rows", "_GatherWeight": "weight", "_ReduceScatter": "rows", "_ScatterWeight": "weight"}
            for kind, name in names.items():
                for call in ("start", "finish"):
                    of_kind = getattr(collectives, kind)
                    patch.setattr(of_kind, call, recorded(f"{call} {name}", getattr(of_kind, call)))
            patch.setattr(parallel.indexer, "select", recorded("select", parallel.indexer.select))
            patch.setattr(collectives, "_reduce", recorded("reduce", collectives._reduce))
            out, loss, _ = parallel(normal(1, 8, HIDDEN)[:, : 8 // context], seq_len=8)
            forward = events[:]
            events.clear()
            (out.sum() + loss).backward()
        rows, weights = ["start rows", "finish rows"], 3 * (tensor > 1)
        # The selection waits for the indexer's keys only, except that with both dimensions keys are gathered twice.
        before = [*rows, "start rows", "start rows"] if tensor > 1 and context > 1 else ["start rows"] * 2
        before += ["start weight"] * weights
        before += ["finish rows", "start rows"] if tensor > 1 and context > 1 else []
        assert forward[: len(before)] == before
        assert forward[len(before) :] == [
            "finish rows", "select", *["finish weight"] * weights, "finish rows", *rows * (tensor > 1),
        ]  # fmt: skip
        # Gradients of latent keys and of weights are sent while those of the projections are computed; weights last.
        assert events[: 1 + weights] == ["start rows", *["start weight"] * weights]
        if tensor > 1:
            assert "finish weight" not in events[: events.index("finish rows") + 1]
            assert events.count("reduce") == 1
            assert events.index("reduce") > len(events) - 8


@pytest.mark.parametrize(("tensor", "context"), [(2, 1), (1, 2), (2, 2)])
def test_collectives_run_beside_the_indexer(tensor: int, context: int, tmp_path: Path) -> None:
    run_on_ranks(record_order, (tensor, context, str(tmp_path)), tensor * context)


class LowRank(nn.Module):
    """A projection with an adapter, which learns in its place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        like = base.weight
        self.down = nn.Parameter(torch.linspace(-1, 1, 2 * base.in_features, dtype=like.dtype).view(2, -1))
        self.up = nn.Parameter(torch.linspace(-1, 1, 2 * base.out_features, dtype=like.dtype).view(-1, 2) / 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return result


def with_adapters(rank: int, folder: str) -> None:
    """Of projections that are called, in the layer and in its indexer; the hooks of these modules run."""
    with gloo_rank(rank, 2, folder):
        layers = [make_layer(), make_layer()]
        calls = []
        for layer in layers:
            for parent, name in ((layer, "q_a_proj"), (layer, "kv_a_proj_with_mqa"), (layer.indexer, "wk")):
                setattr(parent, name, LowRank(getattr(parent, name)))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallel = parallelize(layers[1], mesh, tensor="tp")
        for module in (parallel.q_a_proj, parallel.indexer):
            module.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
        compare(layers[0], parallel, None, 17, "sparse", False)
        assert calls == ["LowRank", "LightningIndexer"]


def test_adapters(tmp_path: Path) -> None:
    run_on_ranks(with_adapters, (str(tmp_path),), 2)


def save_or_load(rank: int, ranks: int, save: bool, folder: str) -> None:
    with gloo_rank(rank, ranks, folder):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        layer = make_layer()
        if not save:
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.zero_()
        parallel = parallelize(layer, mesh, tensor="tp")
        state = parallel.state_dict()
        if save:
            checkpoint.save(state, checkpoint_id=f"{folder}/state", no_dist=False)
        else:
            checkpoint.load(state, checkpoint_id=f"{folder}/state")
            parallel.load_state_dict(state)
            x = normal(BATCH, 17, HIDDEN)
            torch.testing.assert_close(parallel(x).out, make_layer()(x).out)


def test_checkpoints_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_on_ranks(save_or_load, (2, True, str(tmp_path)), 2)
    for ranks in (1, 3):
        run_on_ranks(save_or_load, (ranks, False, str(tmp_path)), ranks)


def train_sharded(rank: int, way: str, checkpointed: bool, folder: str) -> None:
    """Two steps with parameters sharded over data-parallel ranks, each of which is a group along `way`; with context
    parallelism over both dimensions."""
    with gloo_rank(rank, 4, folder):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", way))
        plain, layer = make_layer(), parallelize(make_layer(), mesh, **{way: way})
        parallel = fully_shard(layer, mesh=mesh["dp"] if way == "tensor" else mesh["dp", way]._flatten("both"))
        rows, factor = layer.rows_of_rank(12), 1 if way == "tensor" else 2
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (plain, parallel)]
        x = normal(2, 12, HIDDEN)
        for _ in range(2):
            out, loss, _ = plain(x)
            (out.square().mean() + loss).backward()
            own = x[mesh["dp"].get_local_rank()][None, rows]
            if checkpointed:
                own.requires_grad_()
                out, loss, _ = torch.utils.checkpoint.checkpoint(parallel, own, use_reentrant=False)
            else:
                out, loss, _ = parallel(own)
            (factor * (out.square().sum() / x[0].numel() + loss)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, p), q in zip(plain.named_parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p, msg=name)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("way", ["tensor", "context"])
def test_fully_shard(way: str, checkpointed: bool, tmp_path: Path) -> None:
    run_on_ranks(train_sharded, (way, checkpointed, str(tmp_path)), 4)


class Doubled(SparseMLA):
    """A layer that computes something else."""


def test_errors() -> None:
    with pytest.raises(
        ValueError, match=r"parallelize: tensor must be a dimension of the mesh, one of \('tp',\), got 'x'"
    ):
        one_rank(lambda mesh: parallelize(make_layer(), mesh, tensor="x"))
    with pytest.raises(ValueError, match="parallelize: order must be 'zigzag' or 'contiguous', got 'random'"):
        one_rank(lambda mesh: parallelize(make_layer(), mesh, tensor="tp", order="random"))  # type: ignore[arg-type]
    message = r"ParallelSparseMLA: x must be \[B, 6, hidden_size\], the rows_of_rank\(6\) of this rank, got float64 \["
    with pytest.raises(ValueError, match=message):
        one_rank(lambda mesh: parallelize(make_layer(), mesh, tensor="tp")(normal(2, 5, HIDDEN), seq_len=6))
    one = r"tensor or context must be a dimension of the mesh, one of \('tp',\), got None"
    for names, expected in (
        ({}, one),
        ({"tensor": "tp", "context": "tp"}, "tensor and context must be two dimensions, got 'tp' for both"),
    ):
        message = f"parallelize: {expected}"
        with pytest.raises(ValueError, match=message):
            one_rank(lambda mesh, names=names: parallelize(make_layer(), mesh, **names))
    with pytest.raises(ValueError, match="parallelize: the layer is parallel already"):
        one_rank(lambda mesh: parallelize(parallelize(make_layer(), mesh, tensor="tp"), mesh, tensor="tp"))
    with pytest.raises(ValueError, match=r"parallelize: indexer_loss must be 'forward', .* got 'deferred'"):
        one_rank(lambda mesh: parallelize(make_layer(indexer_loss="deferred"), mesh, tensor="tp"))
    changed = make_layer()
    changed.forward = lambda x: x  # type: ignore[assignment, method-assign]
    for layer, got in ((Doubled(4, 2), "Doubled"), (changed, "one whose forward is replaced")):
        with pytest.raises(TypeError, match=f"parallelize: layer must be a SparseMLA itself, got {got}"):
            one_rank(lambda mesh, layer=layer: parallelize(layer, mesh, tensor="tp"))
    with pytest.raises(TypeError, match="parallelize: layer must be a SparseMLA itself, got Linear"):
        one_rank(lambda mesh: parallelize(torch.nn.Linear(2, 2), mesh, tensor="tp"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ParallelSparseMLA: a parallel layer takes no cache"):
        one_rank(lambda mesh: parallelize(make_layer(), mesh, tensor="tp").make_cache(1, 8, 2, 64))
    with pytest.raises(TypeError, match="parallelize: mesh must be a DeviceMesh, got str"):
        parallelize(make_layer(), "tp", tensor="tp")  # type: ignore[arg-type]


def in_other_modes(rank: int, folder: str) -> None:
    """The ids of other queries are refused; what is cached under inference_mode serves training; copies of a layer."""
    with gloo_rank(rank, 2, folder):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plain, layer = make_layer(), parallelize(make_layer(), mesh, tensor="tp")
        _kept_shares_of.cache_clear()
        x = normal(BATCH, 24, HIDDEN)
        with torch.inference_mode():
            expected = layer(x)
            everything = layer.select(x)
        layer.rows_of_rank(24).zero_()
        x = x[:, layer.rows_of_rank(24)].requires_grad_()
        for module in (layer, copy.deepcopy(layer)):
            got = module(x)
            torch.testing.assert_close(got.out, expected.out)
            (got.out.sum() + got.indexer_loss).backward()
        torch.testing.assert_close(layer(x, ids=expected.ids.clone()).out, expected.out)
        with pytest.raises(ValueError, match=r"SparseMLA: ids must be int32 \[B=2, S=12, K\]"):
            layer(x, ids=everything)
        # The output is a tensor of its own, as that of one rank.
        out = layer(x[:, :7]).out
        assert out.is_contiguous()
        out += x[:, :7]
        out.sum().backward()
        with pytest.raises(ValueError, match="heads must be a multiple of 2 ranks, got 3"):
            parallelize(SparseMLA(HIDDEN, 3, indexer={"heads": 8, "head_dim": 64}), mesh, tensor="tp")
        # The warm-up as DeepSeek does it: only the indexer learns.
        for frozen in (plain, layer):
            frozen.requires_grad_(False)
            frozen.indexer.requires_grad_(True)
            frozen.phase = "warmup"
            frozen.zero_grad()
            frozen(x.detach()).indexer_loss.backward()
        for p, q in zip(plain.parameters(), layer.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad)
        with pytest.raises(ValueError, match="ids must be None except in the phase 'sparse'"):
            layer(x, ids=expected.ids.clone())


def under_autocast(rank: int, folder: str) -> None:
    """Weights in fp32, products in bf16: outputs and gradients like those of one rank, within the rounding of bf16."""
    with gloo_rank(rank, 2, folder):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plain, layer = make_layer().float(), parallelize(make_layer().float(), mesh, tensor="tp")
        x, results = normal(BATCH, 24, HIDDEN).float(), []
        for module in (plain, layer):
            with torch.autocast("cpu", torch.bfloat16):
                out, loss, _ = module(x)
            (out.float().square().sum() + loss).backward()
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            results.append([out, loss, *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)])
        assert len(results[0]) == 14
        for expected, got in zip(*results, strict=True):
            assert got.dtype == expected.dtype
            assert (got - expected).float().norm() <= 0.03 * expected.float().norm()


def test_autocast(tmp_path: Path) -> None:
    run_on_ranks(under_autocast, (str(tmp_path),), 2)


def test_modes_copies_and_ids(tmp_path: Path) -> None:
    run_on_ranks(in_other_modes, (str(tmp_path),), 2)


@pytest.mark.parametrize("phase", ["sparse", "warmup", "dense"])
@pytest.mark.parametrize(("batch", "seq"), [(0, 9), (2, 0)])
def test_empty_inputs(phase: Any, batch: int, seq: int) -> None:
    def call(mesh: Any) -> None:
        layer = parallelize(make_layer(phase=phase), mesh, tensor="tp")
        x = normal(batch, seq, HIDDEN).requires_grad_()
        out, loss, _ = layer(x)
        assert out.shape == x.shape
        (out.sum() + (0 if loss is None else loss)).backward()
        assert x.grad is not None
        assert loss is None or loss == 0

    one_rank(call)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_shares(order: Any) -> None:
    for seq, ranks, first in itertools.product((0, 1, 5, 24, 31), (1, 2, 3, 4), (0, 3, 12, 40)):
        shares = shares_of(seq, ranks, order, torch.device("cpu"), first)
        rows = [shares.rows(rank) for rank in range(ranks)]
        assert shares.firsts == tuple(int((own < first).sum()) for own in rows)
        assert torch.equal(torch.cat(rows).sort().values, torch.arange(seq))
        assert torch.equal(shares.row_of_place[shares.place_of_row], torch.arange(seq))
        assert max(shares.sizes) - min(shares.sizes) <= (2 if first == 0 else 4)
        padded = torch.full((ranks, shares.largest), -1)
        for rank, own in enumerate(rows):
            assert torch.equal(own, own.sort().values)
            padded[rank, : len(own)] = own
        if seq:
            assert torch.equal(padded.flatten()[shares.padded_place_of_row], torch.arange(seq))
        if order == "zigzag" and seq == 24 and first == 0:
            work = [int((own + 1).sum()) for own in rows]
            assert max(work) - min(work) <= seq / ranks
