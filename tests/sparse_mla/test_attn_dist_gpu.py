"""The kernel of attn_dist against the reference in float64 on the same GPU, and its other promises."""

import itertools
import math
from typing import Any

import pytest
import torch
from sparse_mla_gpu_inputs import DEVICE, Case, make_case, make_gpu, make_grid, run_cases
from streams import check_script, written_late
from torch import Tensor

import dsa_ext
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN
from dsa_ext.testing.tolerances import check_dist

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.attn_dist.default


def lse_of(q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> Tensor:
    lse: Tensor = torch.ops.dsa.sparse_mla_fwd(q, kv, indices, **options)[1]
    return lse


def check(q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, **options: Any) -> Tensor:
    dist: Tensor = OP(q, kv, indices, lse, **options)
    assert dist.is_contiguous()
    check_dist(dist, q, kv, indices, lse, **options)
    return dist


AXES: dict[str, list[Any]] = {
    "d_qk": [576, 512],
    "groups_and_heads": [
        *((1, heads) for heads in (1, 2, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128)),
        *((2, heads) for heads in (2, 34, 128, 256)),
        *((4, heads) for heads in (4, 260, 512)),
    ],
    "topk": [1, 5, 63, 64, 65, 128, 129, 1000],
    "seq": [1, 2, 33, 257, 300],
    "s_kv": [0, 1, 5, 1000, 8192],
    "batch": [1, 2],
    "position": [(False, 0, 1), (True, 0, 1), (True, 900, 1), (True, 3, 64)],
    "lengths": [False, True],
    "bounds": [False, True],
    "sm_scale": [None, 0.05, -0.04, 0.0],
    "spoiled": [False, True],
    "kind": [{}, {"normalize": True}, {"per_head_block": True}],
}


def run_case(case: Case) -> None:
    inputs, options = make_case(case)
    lse = lse_of(inputs.q, inputs.kv, inputs.indices, **options)
    check(inputs.q, inputs.kv, inputs.indices, lse, **options, **case["kind"])


@pytest.mark.parametrize("part", range(6))
def test_grid(part: int) -> None:
    """In every case, unselected rows contain NaN and Inf."""
    run_cases(make_grid(AXES, samples=120)[part::6], run_case)


@pytest.mark.parametrize("value", [INT32_MIN, -1, 64, INT32_MAX])
@pytest.mark.parametrize("normalize", [False, True])
def test_padding_alone(value: int, normalize: bool) -> None:
    inputs = make_gpu(s_kv=64, heads=128)
    indices = torch.full_like(inputs.indices, value)
    lse = torch.zeros(1, 8, 128, device=DEVICE)
    assert (OP(inputs.q, torch.full_like(inputs.kv, math.nan), indices, lse, normalize=normalize) == 0).all()


def test_one_valid_id_anywhere() -> None:
    inputs = make_gpu(seq=200, s_kv=64, heads=128, topk=200)
    indices = torch.full_like(inputs.indices, -1)
    diagonal = torch.arange(200, device=DEVICE)
    indices[0, diagonal, 0, diagonal] = (diagonal % 64).int()
    lse = lse_of(inputs.q, inputs.kv, indices, causal=False)
    dist = check(inputs.q, inputs.kv, indices, lse, causal=False)
    assert torch.equal(dist[0, :, 0] > 0, torch.eye(200, dtype=torch.bool, device=DEVICE))


def test_any_lse() -> None:
    """Larger denominators, heads without one, strides; a NaN reaches only its own query."""
    inputs = make_gpu(seq=40, s_kv=500, heads=96, topk=130)
    lse = lse_of(inputs.q, inputs.kv, inputs.indices, causal=False) + 1
    lse[:, 3, ::2] = -math.inf
    lse[:, 4] = -math.inf
    lse[:, 5, 7] = math.inf
    expected = check(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    assert (expected[:, 4] == 0).all()
    views = torch.stack([lse, lse], -1).permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)[..., 1]
    assert torch.equal(check(inputs.q, inputs.kv, inputs.indices, views, causal=False), expected)
    lse[:, 6, 1] = math.nan
    dist = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    assert dist[:, 6].isnan().all()
    dist[:, 6] = expected[:, 6]
    assert torch.equal(dist, expected)


def test_large_scores() -> None:
    inputs = make_gpu(seq=33, s_kv=1000, heads=128, topk=300)
    q, kv, options = inputs.q * 4, inputs.kv * 4, {"causal": False, "sm_scale": 1.0}
    lse = lse_of(q, kv, inputs.indices, **options)
    check(q, kv, inputs.indices, lse, **options, normalize=True)


def test_views() -> None:
    big = make_gpu(batch=2, seq=70, s_kv=300, heads=72, topk=100, d_qk=640)
    q, kv, indices = (
        big.q.transpose(0, 1)[:, :, 8:, 64:].transpose(0, 1),
        big.kv[:, ::3, :, :576],
        big.indices[..., 3:70],
    )
    lse = lse_of(q, kv, indices, causal=False)
    check(q, kv, indices, lse, causal=False)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("normalize", [False, True])
def test_repeats_are_bitwise_equal(heads: int, normalize: bool) -> None:
    inputs = make_gpu(seq=300, s_kv=3000, heads=heads, topk=1000)
    lse = lse_of(inputs.q, inputs.kv, inputs.indices, causal=False)
    first = OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False, normalize=normalize)
    for _ in range(25):
        assert torch.equal(OP(inputs.q, inputs.kv, inputs.indices, lse, causal=False, normalize=normalize), first)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_query_does_not_depend_on_its_company(normalize: bool) -> None:
    """Nor on whether several CTAs share its keys: with 400 queries and 132 SMs, the last four are divided."""
    inputs = make_gpu(seq=400, s_kv=1000, heads=128, topk=300)
    lengths = torch.randint(0, 301, (1, 400), dtype=torch.int32, device=DEVICE)
    lse = lse_of(inputs.q, inputs.kv, inputs.indices, causal=False, topk_length=lengths)

    def dist(first: int, end: int) -> Tensor:
        q, ids, lse_of_run, lengths_of_run = (t[:, first:end] for t in (inputs.q, inputs.indices, lse, lengths))
        options = {"causal": False, "topk_length": lengths_of_run, "normalize": normalize}
        result: Tensor = OP(q, inputs.kv, ids, lse_of_run, **options)
        return result

    whole = dist(0, 400)
    for ends in ((0, 200, 400), (0, 1, 3, 68, 400)):
        assert torch.equal(whole, torch.cat([dist(*run) for run in itertools.pairwise(ends)], dim=1))


def test_side_stream() -> None:
    """Inputs that are written late on a side stream: a kernel on any other stream would read zeros."""
    inputs = make_gpu(seq=64, s_kv=1000, heads=128, topk=128)
    lse = lse_of(inputs.q, inputs.kv, inputs.indices)
    expected = OP(inputs.q, inputs.kv, inputs.indices, lse)
    dist = written_late(inputs.q, lambda late: OP(late, inputs.kv, inputs.indices, lse))
    assert torch.equal(dist, expected)


GRAPH_SCRIPT = """
import torch, dsa_ext
from dsa_ext.testing.inputs import make_inputs
inputs = [make_inputs(seq=seq, s_kv=4000, heads=heads, topk=500, device="cuda") for seq, heads in ((300, 128), (7, 16))]
lse = [torch.full(i.q.shape[:3], 6.0, device="cuda") for i in inputs]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = [torch.ops.dsa.attn_dist(i.q, i.kv, i.indices, l, normalize=True) for i, l in zip(inputs, lse)]
for i in inputs:
    i.q.mul_(0.5)
for _ in range(3):
    graph.replay()
for i, l, dist in zip(inputs, lse, captured):
    assert torch.equal(dist, torch.ops.dsa.attn_dist(i.q, i.kv, i.indices, l, normalize=True))
print("captured")
"""


def test_cuda_graph_at_the_first_call() -> None:
    check_script(GRAPH_SCRIPT)


def test_opcheck() -> None:
    inputs = make_gpu(seq=4, s_kv=50, heads=16, topk=20)
    lse = torch.zeros(1, 4, 16, device=DEVICE)
    for options in ({}, {"normalize": True, "sm_scale": 0.1}, {"per_head_block": True}):
        torch.library.opcheck(OP, (inputs.q, inputs.kv, inputs.indices, lse), options)


@pytest.mark.gpu_memory(6)
def test_more_than_2_to_the_31_query_elements() -> None:
    seq, heads = 30000, 128
    q = torch.randn(1, seq, heads, 576, dtype=torch.bfloat16, device=DEVICE)
    assert q.numel() > 2**31
    kv = make_gpu(s_kv=500).kv
    indices = torch.randint(0, 500, (1, seq, 1, 64), dtype=torch.int32, device=DEVICE)
    lse = torch.full((1, seq, heads), 5.0, device=DEVICE)
    dist = OP(q, kv, indices, lse, causal=False)
    for run in (slice(4), slice(seq // 2, seq // 2 + 4), slice(seq - 4, seq)):
        check_dist(dist[:, run], q[:, run], kv, indices[:, run], lse[:, run], causal=False)


@pytest.mark.parametrize("sizes", [(0, 2, 8), (1, 0, 8), (1, 2, 0), (1, 2, 8)], ids=str)
def test_empty_tensors(sizes: tuple[int, int, int]) -> None:
    batch, seq, heads = sizes
    inputs = make_gpu(batch=batch, seq=seq, heads=heads, s_kv=0, topk=3)
    lse = torch.zeros(batch, seq, heads, device=DEVICE)
    for options in ({}, {"normalize": True}, {"per_head_block": True}):
        dist = OP(inputs.q, inputs.kv, inputs.indices, lse, **options)
        assert dist.shape[-4:] == (batch, seq, 1, 3)
        assert (dist == 0).all()


def test_errors_on_the_device() -> None:
    inputs = make_gpu()
    lse = torch.zeros(1, 8, 16, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"dsa::attn_dist: lse must be on the device of q, cuda:0, got cpu"):
        OP(inputs.q, inputs.kv, inputs.indices, lse.cpu())
    with pytest.raises(RuntimeError, match=r"dsa::attn_dist: indices must be on the device of q, cuda:0, got cpu"):
        dsa_ext.attn_dist(inputs.q, inputs.kv, inputs.indices.cpu(), lse)
