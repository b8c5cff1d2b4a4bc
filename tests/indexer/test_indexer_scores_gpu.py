"""The kernel of indexer_scores against the reference in float64 on the same GPU, and its other promises."""

import itertools
from typing import Any

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
    make_inputs,
    strided_copy,
    strided_rows,
)
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.indexer_scores.default


def make_gpu(seq: int, s_kv: int, heads: int = 64, dim: int = 128) -> IndexerInputs:
    return make_indexer_inputs(seq, s_kv, heads, dim, dtype=torch.bfloat16, device=DEVICE)


def make_indices(seq: int, s_kv: int, slots: int, spoiled: bool = True) -> Tensor:
    """Random ids; if spoiled, a fifth of them is padding, and the first query has only padding."""
    generator = torch.Generator(DEVICE).manual_seed(seq)
    indices = torch.randint(0, max(1, s_kv), (seq, slots), generator=generator, device=DEVICE, dtype=torch.int32)
    if s_kv == 0:
        return indices
    if spoiled:
        bad = torch.tensor([INT32_MIN, -1, s_kv, INT32_MAX], dtype=torch.int32, device=DEVICE)
        choice = torch.randint(0, 20, indices.shape, generator=generator, device=DEVICE)
        indices = torch.where(choice < 4, bad[choice.clamp(max=3)], indices)
        indices[:1] = -1
    return indices


def poisoned(k: Tensor, indices: Tensor) -> Tensor:
    """A copy in which every key that no query lists is NaN."""
    return k.masked_fill(~listed_keys(indices, len(k))[:, None], torch.nan)


def check(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    scores: Tensor = OP(q, k, weights, indices)
    tolerances.check("indexer_scores", scores, {"q": q, "k": k, "weights": weights, "indices": indices})
    return scores


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("dim", [64, 128])
def test_values(heads: int, dim: int) -> None:
    """Keys that no query lists are NaN."""
    for seq, s_kv, slots in (
        (1, 1, 1),
        (3, 100, 63),
        (5, 70, 64),
        (40, 1000, 129),
        (300, 5000, 700),
        (200, 9000, 2048),
        (900, 500, 64),  # queries of a single tile, many per CTA
        (900, 500, 3),
    ):
        inputs = make_gpu(seq, s_kv, heads, dim)
        indices = make_indices(seq, s_kv, slots)
        check(inputs.q, poisoned(inputs.k, indices), inputs.weights, indices)


def test_they_are_the_logits() -> None:
    """The same products are summed; bitwise equality is not required."""
    inputs = make_gpu(50, 3000)
    indices = make_indices(50, 3000, 500, spoiled=False)
    starts, ends = torch.zeros_like(inputs.ks), torch.full_like(inputs.ke, 3000)
    logits = dsa_ext.indexer_logits(inputs.q, inputs.k, inputs.weights, starts, ends)
    scores = check(inputs.q, inputs.k, inputs.weights, indices)
    assert similarity_error(scores, logits.gather(1, indices.long())) <= 1e-12


def test_views() -> None:
    inputs = make_gpu(60, 500, 32)
    indices = make_indices(60, 500, 200)
    expected = check(inputs.q, inputs.k, inputs.weights, indices)
    views = strided_copy(inputs.q), strided_rows(inputs.k), strided_weights(inputs.weights), strided_rows(indices, -1)
    assert torch.equal(OP(*views), expected)
    assert torch.equal(OP(inputs.q[::7], inputs.k, inputs.weights[::7], indices[::7]), expected[::7])


def test_repeats_are_bitwise_equal() -> None:
    inputs = make_gpu(300, 5000)
    indices = make_indices(300, 5000, 2048)
    first = OP(inputs.q, inputs.k, inputs.weights, indices)
    for _ in range(25):
        assert torch.equal(OP(inputs.q, inputs.k, inputs.weights, indices), first)


@pytest.mark.parametrize("heads", [8, 64])
def test_a_query_does_not_depend_on_its_company(heads: int) -> None:
    """Nor on whether several CTAs share its keys: with 400 queries and 132 SMs, the last four are divided."""
    inputs = make_gpu(400, 5000, heads)
    indices = make_indices(400, 5000, 2047)
    whole = OP(inputs.q, inputs.k, inputs.weights, indices)
    for ends in ((0, 200, 400), (0, 1, 3, 68, 400)):
        parts = [
            OP(inputs.q[first:end], inputs.k, inputs.weights[first:end], indices[first:end])
            for first, end in itertools.pairwise(ends)
        ]
        assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 5, 0)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int]) -> None:
    seq, s_kv, slots = sizes
    inputs = make_gpu(seq, s_kv)
    scores = OP(inputs.q, inputs.k, inputs.weights, make_indices(seq, s_kv, slots))
    assert scores.shape == (seq, slots)
    assert s_kv > 0 or (scores == -torch.inf).all()


def test_gradients() -> None:
    inputs = make_gpu(30, 400, 32)
    indices = make_indices(30, 400, 100)
    upstream = torch.randn(30, 100, device=DEVICE)
    leaves = [t.requires_grad_() for t in (inputs.q, inputs.k, inputs.weights)]
    got = torch.autograd.grad(dsa_ext.indexer_scores(*leaves, indices), leaves, upstream)
    double = [t.detach().double() for t in leaves]
    for a, b in zip(got, reference.indexer_scores_bwd(upstream.double(), *double, indices), strict=True):
        assert similarity_error(a, b) <= SIMILARITY


def test_side_stream() -> None:
    inputs = make_gpu(64, 1000)
    indices = make_indices(64, 1000, 200)
    expected = OP(inputs.q, inputs.k, inputs.weights, indices)
    scores = written_late(inputs.q, lambda late: OP(late, inputs.k, inputs.weights, indices))
    assert torch.equal(scores, expected)


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.inputs import make_indexer_inputs
i = make_indexer_inputs(70, 3000, 64, 128, dtype=torch.bfloat16, device="cuda")
ids = torch.randint(0, 3000, (70, 300), device="cuda", dtype=torch.int32)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = torch.ops.dsa.indexer_scores(i.q, i.k, i.weights, ids)
i.q.mul_(0.5)
for _ in range(3):
    graph.replay()
assert torch.equal(captured, torch.ops.dsa.indexer_scores(i.q, i.k, i.weights, ids))
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


def test_opcheck() -> None:
    inputs = make_gpu(5, 60, 16)
    torch.library.opcheck(OP, (inputs.q.requires_grad_(), inputs.k, inputs.weights, make_indices(5, 60, 20)))


def test_a_training_step() -> None:
    """Select, attend, score the selected keys, compute the loss: every gradient of the indexer is finite, and not 0."""
    seq, s_kv, slots = 200, 2000, 512
    index, main = make_gpu(seq, s_kv), make_inputs(1, seq, s_kv, 128, 1, slots, 576, device=DEVICE)
    leaves = [t.requires_grad_() for t in (index.q, index.k, index.weights)]
    with torch.no_grad():
        ids, _ = dsa_ext.indexer_topk(*leaves, index.ks, index.ke, slots)
        listed: dict[str, Any] = {"q_start": s_kv - seq}
        _, lse = dsa_ext.sparse_mla(main.q, main.kv, ids[None, :, None], return_lse=True, **listed)
        p = dsa_ext.attn_dist(main.q, main.kv, ids[None, :, None], lse, **listed)[0, :, 0]
    scores = dsa_ext.indexer_scores(*leaves, ids)
    dsa_ext.indexer_loss(scores, p).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert leaf.grad.abs().sum() > 0
