"""The kernels of the indexer's gradients against the reference in float64 on the same GPU, and their other promises."""

from collections.abc import Iterable

import pytest
import torch
from indexer_gpu_inputs import DEVICE, listed_keys, strided_weights
from streams import check_script, written_late
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing import tolerances
from dsa_ext.testing.inputs import (
    INT32_MAX,
    INT32_MIN,
    IndexerInputs,
    make_indexer_inputs,
    strided_copy,
    strided_rows,
)
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

pytestmark = pytest.mark.gpu

LISTED = torch.ops.dsa.indexer_scores_bwd.default
DENSE = torch.ops.dsa.indexer_logits_bwd.default
Gradients = tuple[Tensor, Tensor, Tensor]


def make_gpu(seq: int, s_kv: int, heads: int = 64, dim: int = 128) -> IndexerInputs:
    return make_indexer_inputs(seq, s_kv, heads, dim, dtype=torch.bfloat16, device=DEVICE)


def make_lists(seq: int, s_kv: int, slots: int, listed_again: bool = True) -> tuple[Tensor, Tensor]:
    """Ids and dscores. Every seventh query has only padding; a fifth of the other ids is padding, with NaN in dscores.

    Adjacent queries list many of the same keys; with `listed_again` a query lists some of them several times.
    """
    generator = torch.Generator(DEVICE).manual_seed(seq)
    if listed_again:
        ids = torch.randint(0, max(1, s_kv), (seq, slots), generator=generator, device=DEVICE, dtype=torch.int32)
    else:
        ids = torch.rand(seq, s_kv, generator=generator, device=DEVICE).topk(slots).indices.int()
    shared = torch.rand(seq, 1, generator=generator, device=DEVICE) < 0.3
    ids = torch.where(shared, ids.roll(1, 0), ids)
    bad = torch.tensor([INT32_MIN, -1, s_kv, INT32_MAX], dtype=torch.int32, device=DEVICE)
    choice = torch.randint(0, 20, ids.shape, generator=generator, device=DEVICE)
    ids = torch.where(choice < 4, bad[choice.clamp(max=3)], ids)
    ids[::7] = -1
    dscores = torch.randn(ids.shape, generator=generator, device=DEVICE)
    return ids, dscores.masked_fill((ids < 0) | (ids >= s_kv), torch.nan)


def poisoned(inputs: IndexerInputs, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and weights; keys that no query lists, and queries that list no key, are NaN."""
    idle = ~((ids >= 0) & (ids < len(inputs.k))).any(1)
    return (
        inputs.q.masked_fill(idle[:, None, None], torch.nan),
        inputs.k.masked_fill(~listed_keys(ids, len(inputs.k))[:, None], torch.nan),
        inputs.weights.masked_fill(idle[:, None], torch.nan),
    )


def check_listed(got: Gradients, dscores: Tensor, leaves: Iterable[Tensor], ids: Tensor) -> None:
    args = dict(zip(("dscores", "q", "k", "weights", "indices"), (dscores, *leaves, ids), strict=True))
    tolerances.check("indexer_scores_bwd", got, args)
    named = (ids >= 0) & (ids < len(args["k"]))
    check_untouched(got, named.any(1), listed_keys(ids, len(args["k"])))


def check_dense(got: Gradients, dlogits: Tensor, leaves: Iterable[Tensor], ks: Tensor, ke: Tensor) -> None:
    names = ("dlogits", "q", "k", "weights", "starts", "ends")
    tolerances.check("indexer_logits_bwd", got, dict(zip(names, (dlogits, *leaves, ks, ke), strict=True)))
    visible = reference.indexer.inside(ks, ke, dlogits.shape[1])
    check_untouched(got, visible.any(1), visible.any(0))


def check_untouched(got: Gradients, queries: Tensor, keys: Tensor) -> None:
    """Exact zeros for queries that see no key, and for keys that no query sees."""
    assert all(gradient.isfinite().all() for gradient in got)
    assert not got[0][~queries].any()
    assert not got[1][~keys].any()
    assert not got[2][~queries].any()


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_lists(heads: int, dim: int, deterministic: bool) -> None:
    for seq, s_kv, slots in (
        (1, 1, 1),
        (3, 100, 63),
        (5, 70, 64),
        (40, 1000, 129),
        (301, 5000, 700),
        (200, 70000, 2048),
        (3000, 500, 3),  # groups of few tiles, many per CTA
    ):
        inputs = make_gpu(seq, s_kv, heads, dim)
        ids, dscores = make_lists(seq, s_kv, slots)
        leaves = poisoned(inputs, ids)
        got = LISTED(dscores, *leaves, ids, deterministic)
        check_listed(got, dscores, leaves, ids)


@pytest.mark.parametrize("heads", [8, 64])
def test_one_key_for_all(heads: int) -> None:
    """Every slot of every query lists the same key."""
    inputs = make_gpu(100, 300, heads)
    ids = torch.full((100, 200), 7, dtype=torch.int32, device=DEVICE)
    dscores = torch.randn(100, 200, device=DEVICE)
    leaves = (inputs.q, inputs.k, inputs.weights)
    check_listed(LISTED(dscores, *leaves, ids), dscores, leaves, ids)


def bounds(seq: int, s_kv: int) -> tuple[Tensor, Tensor]:
    """Bounds of all kinds: beyond the keys, empty, inverted."""
    generator = torch.Generator(DEVICE).manual_seed(seq)
    ks = torch.randint(-5, s_kv // 2 + 1, (seq,), generator=generator, device=DEVICE, dtype=torch.int32)
    ke = torch.randint(s_kv // 3, s_kv + 9, (seq,), generator=generator, device=DEVICE, dtype=torch.int32)
    ks[::7], ke[::7] = INT32_MAX, INT32_MIN
    ks[1::11], ke[1::11] = INT32_MIN, INT32_MAX
    return ks, ke


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_bounds(heads: int, dim: int, deterministic: bool) -> None:
    for seq, s_kv in ((1, 1), (3, 63), (40, 64), (130, 777), (301, 2000)):
        inputs = make_gpu(seq, s_kv, heads, dim)
        ks, ke = bounds(seq, s_kv)
        dlogits = torch.randn(seq, s_kv, device=DEVICE)
        visible = reference.indexer.inside(ks, ke, s_kv)
        q = inputs.q.masked_fill(~visible.any(1)[:, None, None], torch.nan)
        k = inputs.k.masked_fill(~visible.any(0)[:, None], torch.nan)
        leaves = (q, k, inputs.weights)
        got = DENSE(dlogits.masked_fill(~visible, torch.nan), *leaves, ks, ke, deterministic)
        check_dense(got, dlogits, leaves, ks, ke)


def test_views() -> None:
    """Expanded, strided and misaligned gradients too; deterministic, because otherwise dk is summed in any order."""
    inputs = make_gpu(60, 500, 32)
    ids, dscores = make_lists(60, 500, 200)
    views = strided_copy(inputs.q), strided_rows(inputs.k), strided_weights(inputs.weights)
    expected = LISTED(dscores, inputs.q, inputs.k, inputs.weights, ids, True)
    for upstream in (dscores, strided_rows(dscores), dscores.t().contiguous().t()):
        got = LISTED(upstream, *views, strided_rows(ids, -1), True)
        assert all(map(torch.equal, got, expected))
    ones = torch.ones(1, 1, device=DEVICE).expand(60, 200)
    got = LISTED(ones, *views, ids, True)
    assert all(map(torch.equal, got, LISTED(ones.contiguous(), *views, ids, True)))


@pytest.mark.parametrize("listed_again", [False, True])
def test_deterministic_calls_are_bitwise_equal(listed_again: bool) -> None:
    inputs = make_gpu(400, 5000)
    ids, dscores = make_lists(400, 5000, 2048, listed_again)
    leaves = (inputs.q, inputs.k, inputs.weights)
    first = LISTED(dscores, *leaves, ids, True)
    for _ in range(20):
        assert all(map(torch.equal, LISTED(dscores, *leaves, ids, True), first))
        # Without the flag only dk depends on the order of additions.
        dq, _, dweights = LISTED(dscores, *leaves, ids)
        assert torch.equal(dq, first[0])
        assert torch.equal(dweights, first[2])


@pytest.mark.parametrize("by", ["torch", "argument"])
def test_deterministic_gradients(by: str) -> None:
    inputs = make_gpu(200, 3000)
    ids, dscores = make_lists(200, 3000, 600)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.weights)]
    expected = LISTED(dscores, *leaves, ids, True)
    torch.use_deterministic_algorithms(by == "torch")
    try:
        scores = dsa_ext.indexer_scores(*leaves, ids, deterministic=by == "argument")
        got = torch.autograd.grad(scores, leaves, dscores)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, got, expected))


def test_several_launches() -> None:
    """More entries than one launch takes, in both modes."""
    seq, s_kv = 2200, 40_000
    inputs = make_gpu(seq, s_kv, 8, 64)
    ks = torch.zeros(seq, dtype=torch.int32, device=DEVICE)
    ke = torch.full_like(ks, s_kv)
    dlogits = torch.randn(seq, s_kv, device=DEVICE)
    leaves = (inputs.q, inputs.k, inputs.weights)
    plain, repeatable = DENSE(dlogits, *leaves, ks, ke), DENSE(dlogits, *leaves, ks, ke, True)
    for a, b in zip(plain, repeatable, strict=True):
        assert similarity_error(a, b) <= SIMILARITY
    rows = torch.arange(0, seq, 100, device=DEVICE)
    expected = reference.indexer_logits_bwd(
        dlogits[rows], inputs.q[rows].float(), inputs.k.float(), inputs.weights[rows], ks[rows], ke[rows]
    )
    assert similarity_error(plain[0][rows], expected[0]) <= SIMILARITY
    assert similarity_error(plain[2][rows], expected[2]) <= SIMILARITY
    parts = [
        DENSE(dlogits[part], inputs.q[part], inputs.k, inputs.weights[part], ks[part], ke[part])
        for part in (slice(0, 1000), slice(1000, None))
    ]
    assert similarity_error(plain[1], parts[0][1].float() + parts[1][1].float()) <= SIMILARITY


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 5, 0)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_tensors(sizes: tuple[int, int, int], deterministic: bool) -> None:
    seq, s_kv, slots = sizes
    inputs = make_gpu(seq, s_kv)
    leaves = (inputs.q, inputs.k, inputs.weights)
    ids = torch.zeros(seq, slots, dtype=torch.int32, device=DEVICE)
    expected = [torch.zeros_like(leaf) for leaf in leaves]
    got = LISTED(torch.randn(seq, slots, device=DEVICE), *leaves, ids, deterministic)
    assert all(map(torch.equal, got, expected))
    if slots > 0:
        got = DENSE(torch.randn(seq, s_kv, device=DEVICE), *leaves, inputs.ks, inputs.ke, deterministic)
        assert all(map(torch.equal, got, expected))


def test_side_stream() -> None:
    inputs = make_gpu(64, 1000)
    ids, dscores = make_lists(64, 1000, 200)
    expected = LISTED(dscores, inputs.q, inputs.k, inputs.weights, ids, True)
    got = written_late(inputs.q, lambda late: LISTED(dscores, late, inputs.k, inputs.weights, ids, True))
    assert all(map(torch.equal, got, expected))


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.inputs import make_indexer_inputs
i = make_indexer_inputs(70, 3000, 64, 128, dtype=torch.bfloat16, device="cuda")
ids = torch.randint(0, 3000, (70, 300), device="cuda", dtype=torch.int32)
g = torch.randn(70, 300, device="cuda")
torch.cuda.synchronize()
for deterministic in (False, True):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.dsa.indexer_scores_bwd(g, i.q, i.k, i.weights, ids, deterministic)
    i.q.mul_(0.5)
    for _ in range(3):
        graph.replay()
    for a, b in zip(captured, torch.ops.dsa.indexer_scores_bwd(g, i.q, i.k, i.weights, ids, True)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


def test_opcheck() -> None:
    inputs = make_gpu(5, 60, 16)
    ids, dscores = make_lists(5, 60, 20)
    leaves = (inputs.q, inputs.k, inputs.weights)
    torch.library.opcheck(LISTED, (dscores, *leaves, ids, True))
    torch.library.opcheck(DENSE, (torch.randn(5, 60, device=DEVICE), *leaves, inputs.ks, inputs.ke, True))
