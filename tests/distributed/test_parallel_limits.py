"""What a parallel SparseMLA refuses, and the modes in which it runs; with gloo on the CPU."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import gloo_rank, run_on_ranks
from parallel_layers import BATCH, HIDDEN, make_layer, normal, one_rank
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from dsa_ext.distributed import collectives, parallelize
from dsa_ext.distributed.shares import _kept_shares_of, shares_of
from dsa_ext.nn import SparseMLA, Yarn
from dsa_ext.nn.projections import is_plain

READ = ("q_b_proj", "kv_b_proj", "o_proj")


class Adapter(nn.Linear):
    """A projection that computes something else, as those of adapters do."""


def hook(*_: Any) -> None: ...


def use_adapter(projection: nn.Linear) -> None:
    projection.__class__ = Adapter


def use_forward(projection: nn.Linear) -> None:
    projection.forward = lambda x: x  # type: ignore[method-assign]


def use_bias(projection: nn.Linear) -> None:
    projection.bias = nn.Parameter(torch.zeros(projection.out_features, dtype=torch.float64))


class OtherTensor(Tensor):
    """A weight that products read in another way, as quantized ones are."""


def use_other_weight(projection: nn.Linear) -> None:
    projection.weight = nn.Parameter(projection.weight.detach().as_subclass(OtherTensor))  # type: ignore[arg-type]


#: Changes of a projection, and what the error says of it.
CHANGES: dict[Callable[[nn.Linear], Any], str] = {
    use_adapter: r"[\w.]*test_parallel_limits\.Adapter",
    use_other_weight: r"one whose weight is a [\w.]*test_parallel_limits\.OtherTensor",
    use_bias: "one with a bias",
    use_forward: "one whose forward is replaced",
    lambda projection: projection.register_forward_pre_hook(hook): "one with a forward pre-hook",
    lambda projection: projection.register_forward_hook(hook): "one with a forward hook",
    lambda projection: projection.register_full_backward_pre_hook(hook): "one with a backward pre-hook",
    lambda projection: projection.register_full_backward_hook(hook): "one with a backward hook",
}


@pytest.mark.parametrize("change", CHANGES, ids=CHANGES.values())
def test_changed_projections_are_refused(change: Callable[[nn.Linear], Any]) -> None:
    """By `parallelize`, which leaves the layer as it is, and by the layer if they change afterwards."""

    def call(mesh: Any) -> None:
        x = normal(BATCH, 12, HIDDEN)
        for name in READ:
            expected = f"{name} must be nn.Linear without bias, adapters and hooks, got {CHANGES[change]}$"
            layer = make_layer()
            change(getattr(layer, name))
            assert not is_plain(getattr(layer, name))
            with pytest.raises(ValueError, match=f"^parallelize: {expected}"):
                parallelize(layer, mesh, tensor="tp")
            assert type(layer) is SparseMLA
            layer = parallelize(make_layer(), mesh, tensor="tp")
            change(getattr(layer, name))
            for run in (layer, layer.attention_to_all):
                with pytest.raises(ValueError, match=f"^ParallelSparseMLA: {expected}"):
                    run(x)

    one_rank(call)


def with_divided_weights(rank: int, folder: str) -> None:
    """DTensors are no change, nor are hooks of all modules; others are found with them too."""
    with gloo_rank(rank, 2, folder):
        layer = parallelize(make_layer(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), tensor="tp")
        x = normal(BATCH, 12, HIDDEN)
        expected = layer(x).out
        with FlopCounterMode(display=False):
            assert nn.modules.module._has_any_global_hook()
            torch.testing.assert_close(layer(x).out, expected)
        for name in READ:
            handle = getattr(layer, name).register_forward_hook(hook)
            with pytest.raises(ValueError, match=f"ParallelSparseMLA: {name} must be .*, got one with a forward hook$"):
                layer(x)
            handle.remove()
        torch.testing.assert_close(layer(x).out, expected)


def test_divided_weights_are_no_change(tmp_path: Path) -> None:
    run_on_ranks(with_divided_weights, (str(tmp_path),), 2)


def whole_weight(x: Tensor, group: Any) -> Tensor:
    pending = collectives.whole_weight(x, 1, group)
    pending.start()
    return pending.result()


def differentiate_twice(rank: int, ranks: int, folder: str) -> None:
    """Where a second derivative would pass through a collective, autograd raises an error."""
    with gloo_rank(rank, ranks, folder):
        group, shares = dist.group.WORLD, shares_of(4, ranks, "contiguous", torch.device("cpu"))
        own = shares.sizes[rank]
        calls: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
            (lambda x: collectives.shared([x], group)[0], normal(3, 4)),
            (lambda x: whole_weight(x, group), normal(3, 4)),
            (lambda x: collectives.all_rows(x, shares, group).result(), normal(2, own, 3)),
            (lambda x: collectives.own_rows(x, shares, group), normal(2, 4, 3)),
            (lambda x: collectives.rows_of_all(x, shares, group), normal(2, own, 3)),
        ]
        for call, x in calls:
            x.requires_grad_()
            (gradient,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
            with pytest.raises(RuntimeError, match="differentiate twice"):
                gradient.sum().backward()
        # The gradient of a sum over ranks is that of each, so its second derivative passes through no collective.
        x = normal(3, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(collectives.summed(x, group).pow(3).sum(), x, create_graph=True)
        gradient.sum().backward()
        torch.testing.assert_close(x.grad, 6 * ranks * x.detach())


@pytest.mark.parametrize("ranks", [1, 2])
def test_second_derivatives_are_refused(ranks: int, tmp_path: Path) -> None:
    run_on_ranks(differentiate_twice, (ranks, str(tmp_path)), ranks)


def changed(change: Callable[[SparseMLA], Any]) -> SparseMLA:
    layer = make_layer()
    change(layer)
    return layer


def other_scale(layer: SparseMLA) -> None:
    layer.sm_scale = 0.5


#: Layers unlike make_layer(), and what the error says of them.
OTHERS: list[tuple[Callable[[], SparseMLA], str]] = [
    (partial(make_layer, topk=6), "topk 6, "),
    (partial(make_layer, phase="dense"), "phase 'dense', "),
    (partial(make_layer, rope="interleaved"), "rope 'interleaved', "),
    (partial(make_layer, rope_theta=20_000.0, indexer={"rope_theta": 10_000.0}), "rope_theta 20000.0, "),
    (partial(make_layer, yarn=Yarn(4.0), indexer={"yarn": None}), "yarn Yarn(factor=4.0, "),
    (partial(changed, other_scale), "sm_scale 0.5, "),
    (partial(make_layer, nope_dim=24, v_dim=16), "nope_dim 24, v_dim 16, "),  # equal parameters
    (partial(make_layer, indexer={"heads": 8, "head_dim": 128}), "indexer.heads 8, indexer.head_dim 128, "),
    (partial(make_layer, indexer={"rope_dim": 32}), "indexer.rope_dim 32, "),
    (partial(make_layer, indexer={"rope": "interleaved"}), "indexer.rope 'interleaved', "),
    (partial(make_layer, indexer={"rope_theta": 20_000.0}), "indexer.rope_theta 20000.0, "),
    (partial(make_layer, indexer={"yarn": Yarn(4.0)}), "indexer.yarn Yarn(factor=4.0, "),
    (partial(make_layer, indexer={"hadamard": True}), "indexer.hadamard True, "),
    (partial(make_layer, indexer={"precision": "fp8"}), "indexer.precision 'fp8', "),
    (partial(changed, lambda layer: layer.o_proj.requires_grad_(False)), "o_proj.weight float64 [48, 288] frozen"),
    (partial(changed, lambda layer: layer.o_proj.register_forward_hook(hook)), "got one with a forward hook"),
]  # fmt: skip


def with_another_layer(rank: int, folder: str) -> None:
    """All ranks raise the error, also those whose groups have no other layer, and all layers stay as they are."""
    with gloo_rank(rank, 4, folder):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        for make, says in OTHERS:
            layer = make() if rank == 0 else make_layer()
            with pytest.raises(
                ValueError, match=r"^parallelize: the layers of the ranks differ; on this rank: "
            ) as error:
                parallelize(layer, mesh, tensor="tp", context="cp")
            assert (says in str(error.value)) == (rank == 0), says
            assert type(layer) is SparseMLA
        with pytest.raises(ValueError, match=r"the layers of the ranks differ; .*, order '(zigzag|contiguous)', "):
            parallelize(make_layer(), mesh, context="cp", order="zigzag" if rank < 2 else "contiguous")
        parallelize(make_layer(), mesh, tensor="tp", context="cp")


def test_ranks_with_different_layers(tmp_path: Path) -> None:
    run_on_ranks(with_another_layer, (str(tmp_path),), 4)


def step(layer: SparseMLA, x: Tensor) -> Tensor:
    out, loss, _ = layer(x.requires_grad_())
    assert loss is not None
    (out.sum() + loss).backward()
    return out


def test_fake_tensors() -> None:
    """A layer runs under FakeTensorMode, and nothing of it is left for later calls, nor the other way round."""

    def call(mesh: Any) -> None:
        x = normal(BATCH, 12, HIDDEN)
        expected = make_layer()(x).out
        layer = parallelize(make_layer(), mesh, tensor="tp")
        for _ in range(2):
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                assert isinstance(layer(x).out, FakeTensor)
            with FakeTensorMode():
                fake = parallelize(make_layer(), mesh, tensor="tp")
                assert isinstance(step(fake, torch.empty(BATCH, 12, HIDDEN, dtype=torch.float64)), FakeTensor)
            torch.testing.assert_close(layer(x).out, expected)

    _kept_shares_of.cache_clear()
    one_rank(call)


@contextmanager
def fake_ranks() -> Iterator[DeviceMesh]:
    """The mesh of one of 2 x 2 ranks without the others: what it receives is undefined."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    finally:
        dist.destroy_process_group()


def test_fake_tensors_of_several_ranks() -> None:
    """As estimates of memory are made."""
    with fake_ranks() as mesh, FakeTensorMode():
        layer = parallelize(make_layer(), mesh, tensor="tp", context="cp")
        out = step(layer, torch.empty(BATCH, 12, HIDDEN, dtype=torch.float64))
        assert isinstance(out, FakeTensor)
        assert out.shape == (BATCH, 12, HIDDEN)


def test_compile() -> None:
    """Compiled code, too, takes divided weights, and refuses projections that were changed before it was compiled:
    Dynamo does not guard hooks."""
    with fake_ranks() as mesh:
        layer = parallelize(make_layer(), mesh, tensor="tp", context="cp")
        compiled, x = torch.compile(layer, backend="aot_eager"), normal(BATCH, 12, HIDDEN)
        assert step(compiled, x).shape == x.shape
        torch._dynamo.reset()
        layer.o_proj.register_forward_hook(hook)
        with pytest.raises(ValueError, match=r"ParallelSparseMLA: o_proj must be .*, got one with a forward hook$"):
            compiled(x)
        torch._dynamo.reset()


def test_shares_under_other_modes() -> None:
    """What a first call keeps is the same under any mode, and it counts no operators."""
    shares = (17, 3, "zigzag", torch.device("cpu"))
    _kept_shares_of.cache_clear()
    with torch.device("meta"), FlopCounterMode(display=False), torch.inference_mode():
        first = shares_of(*shares)  # type: ignore[arg-type]
    assert shares_of(*shares) is first  # type: ignore[arg-type]
    assert first.row_of_place.device.type == "cpu"
    assert not first.row_of_place.is_inference()


def test_layers_are_not_pickled() -> None:
    def call(mesh: Any) -> None:
        layer = parallelize(make_layer(), mesh, tensor="tp")
        message = r"ParallelSparseMLA: a parallel layer cannot be pickled .* state_dict\(\) with torch\.distributed"
        for save in (pickle.dumps, lambda layer: torch.save(layer, io.BytesIO())):
            with pytest.raises(TypeError, match=message):
                save(layer)
        x = normal(BATCH, 12, HIDDEN)
        torch.testing.assert_close(copy.deepcopy(layer)(x).out, layer(x).out)

    one_rank(call)


@pytest.mark.parametrize(
    ("seq_len", "kind", "says"),
    [
        (12.0, TypeError, "must be an int, got 12.0"),
        ("12", TypeError, "must be an int, got '12'"),
        (-1, ValueError, "must be at least 0, got -1"),
    ],
)
def test_seq_len(seq_len: Any, kind: type[Exception], says: str) -> None:
    def call(mesh: Any) -> None:
        layer = parallelize(make_layer(), mesh, tensor="tp")
        for run in (lambda: layer(normal(BATCH, 12, HIDDEN), seq_len=seq_len), lambda: layer.rows_of_rank(seq_len)):
            with pytest.raises(kind, match=f"^ParallelSparseMLA: seq_len {says}$"):
                run()

    one_rank(call)
