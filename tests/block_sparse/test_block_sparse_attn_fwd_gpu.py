"""The kernel of block_sparse_attn_fwd against the reference in float64 on the same GPU, and its other promises."""

import pytest
import torch
from block_sparse_gpu_inputs import far_apart, make_gpu
from streams import check_replays
from torch import Tensor

import dsa_ext
from dsa_ext.reference.block_sparse import BLOCK, valid_keys
from dsa_ext.testing import tolerances
from dsa_ext.testing.block_inputs import BlockInputs

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.block_sparse_attn_fwd.default


def check(x: BlockInputs, sm_scale: float | None = None, sizes: bool = True) -> Tensor:
    lists = x.lists() if sizes else x.lists()[:2]
    out, lse = OP(x.q, x.k, x.v, *lists, sm_scale=sm_scale)
    assert out.dtype == torch.bfloat16
    assert out.stride() == torch.empty_like(x.q).stride()
    assert not out[lse == -torch.inf].any()
    args = vars(x) if sizes else vars(x) | {"kv_block_size": None}
    tolerances.check("block_sparse_attn_fwd", (out, lse), {**args, "sm_scale": sm_scale})
    again = OP(x.q, x.k, x.v, *lists, sm_scale=sm_scale)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    return out


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_q": 1, "n_kv": 1, "slots": 1},
        {"n_q": 63, "n_kv": 65, "slots": 2, "batch": 3},
        {"n_q": 64, "n_kv": 4000, "slots": 63, "heads": 12, "kv_heads": 12},  # lists are split
        {"n_q": 64, "n_kv": 30000, "slots": 460, "heads": 1, "kv_heads": 1},
        {"n_q": 700, "n_kv": 1000, "slots": 9, "heads": 3, "kv_heads": 1},
        {"n_q": 5000, "n_kv": 5000, "slots": 40, "batch": 2},  # whole lists for each CTA, and parts of others
        {"n_q": 6400, "n_kv": 6400, "slots": 20, "heads": 4, "kv_heads": 4},  # a small remainder is split
        {"n_q": 2048, "n_kv": 9000, "slots": 8, "heads": 12, "kv_heads": 3},
        {"n_q": 6300, "n_kv": 300, "slots": 1, "heads": 8, "kv_heads": 1},
    ],
)
def test_values(shape: dict[str, int], sizes: bool, dim: int) -> None:
    check(make_gpu(**shape, dim=dim), sizes=sizes)


@pytest.mark.parametrize("seed", range(6))
def test_many_rounds(seed: int) -> None:
    """A shared-memory ring with few slots wraps around many times, with blocks of every size."""
    check(make_gpu(n_q=12800, n_kv=3000, slots=7 + seed, heads=4, dim=128, seed=seed))


@pytest.mark.parametrize("sm_scale", [0.3, -0.05, 0.0])
def test_scale(sm_scale: float) -> None:
    check(make_gpu(n_q=300, n_kv=1000, slots=8), sm_scale)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("step", [60.0, -60.0, 600.0, -600.0])
def test_scores_that_grow_from_block_to_block(step: float, dim: int) -> None:
    """By 60 or 600 per block: the offset of the exponentials that the first block gives is far too low or too high.
    (fp32 resolves scores of some thousands well enough for the tolerance, scores of ten thousands no longer.)"""
    x = make_gpu(n_q=200, n_kv=640, slots=10, dim=dim)
    x.q2k_index.copy_(torch.arange(10, device="cuda"))
    x.q2k_num.fill_(10)
    x.q[..., 0], x.k[..., 0] = 8, 0
    ramp = torch.arange(10, device="cuda").repeat_interleave(BLOCK) * (step / 8 * dim**0.5)
    x.k[..., 0] = ramp.bfloat16()
    check(x)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_sum_that_vanishes_when_the_maximum_moves(dim: int) -> None:
    """Of three blocks with scores near 0, 25 and 90 only the second has values: their weight is exp(-65)."""
    x = make_gpu(n_q=200, n_kv=192, slots=3, dim=dim)
    x.q2k_index.copy_(torch.arange(3, device="cuda"))
    x.q2k_num.fill_(3)
    x.kv_block_size.fill_(BLOCK)
    x.q[..., 0], x.k[..., 0] = 8, 0
    x.k[..., 0] = (torch.tensor([0.0, 25.0, 90.0], device="cuda") / 8 * dim**0.5).repeat_interleave(BLOCK).bfloat16()
    x.v[:, :, :BLOCK] = x.v[:, :, 2 * BLOCK :] = 0
    assert check(x).abs().max() <= BLOCK * float(x.v.abs().max()) * 2.0**-86


@pytest.mark.parametrize("dim", [64, 128])
def test_what_nobody_sees_may_be_nan(dim: int) -> None:
    x = make_gpu(n_q=300, n_kv=1000, slots=8, dim=dim)
    expected = check(x)
    seen = valid_keys(x.k, x.kv_block_size).flatten()[: x.k.shape[2]]
    x.k[:, :, ~seen], x.v[:, :, ~seen] = torch.nan, torch.nan
    assert torch.equal(check(x), expected)


def test_nan_that_is_seen_spreads_to_its_queries_only() -> None:
    x = make_gpu(n_q=300, n_kv=640, slots=3, heads=2, kv_heads=2, dim=128)
    x.q2k_index.fill_(1)
    x.q2k_num.fill_(1)
    x.kv_block_size.fill_(BLOCK)
    x.q2k_index[0, 0, 2] = 3
    x.k[0, 0, 3 * BLOCK + 5, 7] = torch.nan
    out, lse = OP(x.q, x.k, x.v, *x.lists())
    bad = torch.zeros(300, dtype=torch.bool, device="cuda")
    bad[2 * BLOCK : 3 * BLOCK] = True
    assert out[0, 0, bad].isnan().all()
    assert lse[0, 0, bad].isnan().all()
    assert not out[0, 0, ~bad].isnan().any()
    assert not out[0, 1].isnan().any()


@pytest.mark.parametrize("empty", ["batch", "heads", "n_q", "n_kv"])
def test_nothing(empty: str) -> None:
    sizes = {"batch": 2, "heads": 4, "n_q": 100, "n_kv": 200, empty: 0}
    x = make_gpu(**sizes, kv_heads=1 if empty == "heads" else 2)
    out, lse = OP(x.q, x.k, x.v, *x.lists())
    assert out.shape == x.q.shape
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_strided_inputs() -> None:
    x = make_gpu(batch=2, n_q=300, n_kv=500, slots=6, dim=128)
    expected = check(x)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k, x.v)]
    out = OP(*turned, *x.lists())[0]
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, expected)
    packed = torch.randn(2, 500, 3, 4, 128, device="cuda", dtype=torch.bfloat16)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    x = make_gpu(batch=2, n_q=500, n_kv=500, slots=6, dim=128, kv_heads=4)
    assert torch.equal(OP(*views, *x.lists())[0], OP(*(t.contiguous() for t in views), *x.lists())[0])
    wide = torch.zeros(*x.q2k_index.shape[:3], 11, device="cuda", dtype=torch.int32)
    wide[..., :6] = x.q2k_index
    number = x.q2k_num.transpose(1, 2).contiguous().transpose(1, 2)
    size = x.kv_block_size.repeat_interleave(3)[::3]
    assert torch.equal(OP(*views, wide[..., :6], number, size)[0], OP(*views, *x.lists())[0])


def test_far_apart() -> None:
    """Keys of the last head start more than 2^31 elements after the first."""
    x, k, v, index, number = far_apart()
    assert torch.equal(OP(x.q, k, v, index, number)[0], OP(x.q, x.k, x.v, torch.zeros_like(index), number)[0])


def test_graph_capture_at_first_call_and_side_stream() -> None:
    x = make_gpu(n_q=64, n_kv=4000, slots=50, dim=128)
    stream = torch.cuda.Stream()
    (expected,) = check_replays(stream, lambda: OP(x.q, x.k, x.v, *x.lists())[:1], lambda: (check(x),))
    with torch.cuda.stream(stream):
        aside = OP(x.q, x.k, x.v, *x.lists())[0]
    stream.synchronize()
    assert torch.equal(aside, expected)


def test_errors_and_compile() -> None:
    x = make_gpu(dim=128)
    with pytest.raises(RuntimeError, match="block_sparse_attn_fwd: q2k_num"):
        OP(x.q, x.k, x.v, x.q2k_index, x.q2k_num.long())
    with pytest.raises(RuntimeError, match="block_sparse_attn_fwd: q2k_index"):
        OP(x.q, x.k, x.v, x.q2k_index.cpu(), x.q2k_num)
    torch.library.opcheck(OP, (x.q, x.k, x.v, *x.lists()))
    compiled = torch.compile(lambda *args: dsa_ext.block_sparse_attn(*args), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x.q, x.k, x.v, *x.lists()), OP(x.q, x.k, x.v, *x.lists())[0])
