"""The kernels of sparse_mha_dist against the reference in float64 on the same GPU, and their other promises."""

import pytest
import torch
from sparse_mha_gpu_inputs import FORWARD, OPTIONS, SHAPES, Args, make
from sparse_mla_gpu_inputs import DEVICE, make_bounds
from streams import check_replays, written_late
from torch import Tensor

from dsa_ext.testing.inputs import spoil_indices
from dsa_ext.testing.tolerances import check

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.sparse_mha_dist.default


def with_lse(args: Args) -> Args:
    _, lse = FORWARD(**args)
    return {name: value for name, value in args.items() if name != "v"} | {"lse": lse}


def check_one(args: Args) -> Tensor:
    dist = OP(**args)
    check("sparse_mha_dist", dist, args)
    for _ in range(3):
        poison = torch.full((2**26,), torch.nan, device=DEVICE)
        del poison
        assert torch.equal(OP(**args), dist)
    return dist


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_values(shape: tuple[int, ...], options: Args) -> None:
    args = make(*shape, **options)
    args["indices"] = spoil_indices(args["indices"], shape[2])
    check_one(with_lse(args))


@pytest.mark.parametrize("shape", [(1, 65, 3000, 5, 500), (2, 700, 300, 2, 90)])
def test_bounds(shape: tuple[int, ...]) -> None:
    check_one(with_lse(make(*shape, **make_bounds(shape[2], *shape[:2]))))


@pytest.mark.parametrize("seq", [100, 1000, 2048, 2500])
def test_few_tiles(seq: int) -> None:
    """The heads of some tiles are divided among SMs."""
    dist = check_one(with_lse(make(1, seq, seq, 60, 700)))
    torch.testing.assert_close(dist.sum(-1)[:, 699:], torch.full_like(dist[:, 699:, 0], 60), rtol=1e-4, atol=0)


def test_repeated_ids_and_other_orders() -> None:
    args = with_lse(make(1, 300, 400, 3, 60, causal=False))
    ids = args["indices"]
    expected = OP(**args)
    got = check_one({**args, "indices": torch.cat([ids.flip(-1), ids], -1)})
    assert torch.equal(got, torch.cat([expected.flip(-1), expected], -1))


def test_any_lse() -> None:
    """One that counts more than the listed keys, and -inf."""
    args = with_lse(make(1, 300, 300, 5, 60))
    args["lse"] = args["lse"] + torch.linspace(0, 30, 5, device=DEVICE)
    args["lse"][:, 3::7, 1] = -torch.inf
    check_one(args)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_keys_that_no_query_lists(value: float) -> None:
    args = make(1, 300, 400, 3, 60, causal=False)
    args["indices"] = args["indices"] % 200
    args = with_lse(args)
    expected = OP(**args)
    for name in ("k", "k_rope"):
        spoiled = args[name].clone()
        spoiled[:, 200:] = value
        assert torch.equal(OP(**{**args, name: spoiled}), expected)


def test_streams_and_graphs() -> None:
    args = with_lse(make(1, 300, 300, 3, 100))
    expected = OP(**args)
    for name in ("q", "indices", "lse"):
        assert torch.equal(written_late(args[name], lambda t, name=name: OP(**args | {name: t})), expected)
    check_replays(torch.cuda.Stream(), lambda: (OP(**args),), lambda: (OP(**args),))
