"""The kernel of coarse_attn_fwd against the reference in float64 on the same GPU, and its other promises."""

import math
from typing import Any

import pytest
import torch
from streams import check_replays
from torch import Tensor

import dsa_ext
from dsa_ext.reference.block_sparse import BLOCK, blocks
from dsa_ext.testing import tolerances
from dsa_ext.testing.block_inputs import make_heads
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

pytestmark = pytest.mark.gpu

OP = torch.ops.dsa.coarse_attn_fwd.default


def make_gpu(**sizes: Any) -> list[Tensor]:
    return make_heads(dtype=torch.bfloat16, device="cuda", **sizes)


def check(heads: list[Tensor], sm_scale: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads
    results = out, _, scores = OP(q, k, v, sm_scale)
    assert out.dtype == torch.bfloat16
    assert out.stride() == torch.empty_like(q).stride()
    assert scores.is_contiguous()
    tolerances.check("coarse_attn_fwd", results, {"q": q, "k": k, "v": v, "sm_scale": sm_scale})
    for _ in range(3):
        torch.testing.assert_close(OP(q, k, v, sm_scale), results, rtol=0, atol=0)
    return results


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_q": 1, "n_kv": 1},
        {"n_q": 63, "n_kv": 12, "batch": 3},
        {"n_q": 64, "n_kv": 364, "heads": 12, "kv_heads": 12},
        {"n_q": 64, "n_kv": 2048, "heads": 12, "kv_heads": 12},
        {"n_q": 130, "n_kv": 5000, "heads": 3, "kv_heads": 1},
        {"n_q": 2200, "n_kv": 65, "heads": 12, "kv_heads": 3},  # three blocks at once, then the two remaining ones
        {"n_q": 5000, "n_kv": 128, "batch": 2},
        {"n_q": 23296, "n_kv": 364, "heads": 2, "kv_heads": 2},  # one remaining block
        {"n_q": 4000, "n_kv": 700, "heads": 8, "kv_heads": 1},
    ],
)
def test_values(shape: dict[str, int], dim: int) -> None:
    check(make_gpu(**shape, dim=dim))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("n_q", [64, 12800])
def test_every_number_of_tiles(n_q: int, dim: int) -> None:
    for tiles in range(1, 15):
        check(make_gpu(n_q=n_q, n_kv=tiles * BLOCK - tiles % 3, dim=dim, seed=tiles))


@pytest.mark.parametrize("sm_scale", [0.3, -0.05, 0.0])
def test_scale(sm_scale: float) -> None:
    check(make_gpu(n_q=300, n_kv=1000), sm_scale)


@pytest.mark.parametrize("n_q", [200, 9000])
@pytest.mark.parametrize("step", [60.0, -60.0, 600.0, -600.0])
def test_scores_that_grow_from_tile_to_tile(step: float, n_q: int) -> None:
    """By 60 or 600 per tile."""
    q, k, v = make_gpu(n_q=n_q, n_kv=600, dim=128)
    ramp = torch.arange(10, device="cuda").repeat_interleave(BLOCK)[:600] * (step / 8 * 128**0.5)
    q[..., 0], k[..., 0] = 8, ramp.bfloat16()
    check([q, k, v])


@pytest.mark.parametrize("n_q", [64, 9000])
@pytest.mark.parametrize("power", [9, 10, 18, 19, 20, 24])
def test_scores_sum_to_one_where_lse_is_large(power: int, n_q: int) -> None:
    """600 keys with equal scores of 2^power."""
    q, k, v = make_gpu(n_q=n_q, n_kv=600, dim=128)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 2.0 ** (power // 2), 2.0 ** (power - power // 2)
    _, lse, scores = check([q, k, v], 1.0)
    torch.testing.assert_close(scores, torch.full_like(scores, 1 / 600), rtol=1e-5, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, 2.0**power + math.log(600)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("n_kv", [2, 300])
@pytest.mark.parametrize("sm_scale", [1e-39, -1e-39])
def test_small_scale_of_scores_whose_differences_overflow(sm_scale: float, n_kv: int) -> None:
    q, k, v = make_gpu(heads=2, kv_heads=2, n_q=100, n_kv=n_kv, dim=64)
    q[:], k[:] = 0, 0
    q[..., 0], k[..., 0] = 2, 1e38
    k[..., 1::2, 0] = -1e38
    _, lse, scores = OP(q, k, v, sm_scale)
    expected = (q.double() @ k.double().mT)[:, :, :1] * sm_scale
    torch.testing.assert_close(lse.double(), expected.logsumexp(-1).expand_as(lse), rtol=1e-5, atol=0)
    torch.testing.assert_close(scores.double(), expected.softmax(-1).expand_as(scores), rtol=1e-5, atol=0)


def test_absent_queries_and_an_infinite_key() -> None:
    """A key whose scores are -inf has no weight, also in a partial block."""
    q, k, v = make_gpu(n_q=BLOCK + 3, n_kv=100, dim=64)
    q[:] = q.abs() + 0.5
    k[:, :, 5, 3] = -torch.inf
    out, lse, scores = OP(q, k, v)
    assert not scores[..., 5].any()
    assert all(t.isfinite().all() for t in (out, lse, scores))


def test_strided_inputs() -> None:
    heads = make_gpu(batch=2, n_q=300, n_kv=500, dim=128)
    expected = check(heads)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in heads]
    results = OP(*turned)
    assert results[0].transpose(1, 2).is_contiguous()
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    packed = torch.randn(2, 500, 3, 4, 128, device="cuda", dtype=torch.bfloat16)
    views = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    torch.testing.assert_close(OP(*views), OP(*(t.contiguous() for t in views)), rtol=0, atol=0)


@pytest.mark.parametrize("n_q", [100, 9000])
def test_what_lies_around_the_views_may_be_nan(n_q: int) -> None:
    heads = make_gpu(n_q=n_q, n_kv=150, dim=128)
    expected = check(heads)
    views = []
    for t in heads:
        around = torch.full((*t.shape[:2], t.shape[2] + 140, 128), torch.nan, device="cuda", dtype=torch.bfloat16)
        views.append(around[:, :, 70 : 70 + t.shape[2]].copy_(t))
    torch.testing.assert_close(OP(*views), expected, rtol=0, atol=0)


def test_nan_of_a_query_spreads_to_its_block_only() -> None:
    q, k, v = make_gpu(n_q=9000, n_kv=150, dim=128)
    q[0, 1, 5 * BLOCK + 3, 7] = torch.nan
    out, lse, scores = OP(q, k, v)
    bad = torch.zeros_like(lse, dtype=torch.bool)
    bad[0, 1, 5 * BLOCK + 3] = True
    assert torch.equal(lse.isnan(), bad)
    assert torch.equal(out.isnan().all(-1), bad)
    assert torch.equal(out.isnan().any(-1), bad)
    bad = torch.zeros_like(scores[..., 0], dtype=torch.bool)
    bad[0, 1, 5] = True
    assert torch.equal(scores.isnan().all(-1), bad)
    assert torch.equal(scores.isnan().any(-1), bad)


@pytest.mark.parametrize("empty", ["batch", "heads", "n_q", "n_kv"])
def test_nothing(empty: str) -> None:
    sizes = {"batch": 2, "heads": 4, "n_q": 100, "n_kv": 200, empty: 0}
    q, k, v = make_gpu(**sizes, kv_heads=1 if empty == "heads" else 2)
    out, lse, scores = OP(q, k, v)
    assert out.shape == q.shape
    assert scores.shape == (*q.shape[:2], blocks(q.shape[2]), k.shape[2])
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_far_apart() -> None:
    """Queries and keys of the last head start more than 2^31 elements after the first."""
    q, k, v = make_gpu(heads=9, kv_heads=9, n_q=100, n_kv=100, dim=128)
    buffer = torch.empty(1, 9, 2**21, 128, device="cuda", dtype=torch.bfloat16)
    far = []
    for i, t in enumerate((q, k, v)):
        far.append(buffer[:, :, 1000 * i : 1000 * i + 100].copy_(t))
    torch.testing.assert_close(OP(*far), OP(q, k, v), rtol=0, atol=0)


def test_graph_capture_at_first_call_and_side_stream() -> None:
    heads = make_gpu(n_q=1000, n_kv=364, dim=128)
    stream = torch.cuda.Stream()
    expected = check_replays(stream, lambda: OP(*heads), lambda: check(heads))
    late = [torch.zeros_like(t) for t in heads]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for t, value in zip(late, heads, strict=True):
            t.copy_(value)
        aside = OP(*late)
    stream.synchronize()
    torch.testing.assert_close(aside, expected, rtol=0, atol=0)


def test_errors_and_compile() -> None:
    q, k, v = make_gpu(dim=128)
    with pytest.raises(RuntimeError, match="coarse_attn_fwd: k must be on the device of q"):
        OP(q, k.cpu(), v)
    with pytest.raises(RuntimeError, match="coarse_attn_fwd: v"):
        OP(q, k, v.half())
    torch.library.opcheck(OP, (q, k, v))
    compiled = torch.compile(lambda *args: dsa_ext.coarse_attn(*args), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), dsa_ext.coarse_attn(q, k, v), rtol=0, atol=0)


def test_selection_follows() -> None:
    _, scores = dsa_ext.coarse_attn(*make_gpu(n_q=9000, n_kv=141, dim=128))
    index, number = dsa_ext.block_select(scores, "topk", topk=10)
    assert (number == 10).all()
    assert torch.equal(
        index.long(), scores.sort(dim=-1, descending=True, stable=True).indices[..., :10].sort(-1).values
    )


@pytest.mark.parametrize("shape", [{}, {"n_q": 700, "n_kv": 364, "heads": 12, "kv_heads": 4, "dim": 128}])
def test_gradients(shape: dict[str, int]) -> None:
    leaves = [t.requires_grad_() for t in make_gpu(**shape)]
    out, lse, _ = OP(*leaves)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, upstream)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    share = leaves[0].shape[1] // leaves[1].shape[1]
    q, k, v = wide[0], *(t.repeat_interleave(share, 1) for t in wide[1:])
    logits = q @ k.mT * q.shape[3] ** -0.5
    expected = torch.autograd.grad(
        (logits.softmax(-1) @ v, logits.logsumexp(-1)), wide, tuple(t.double() for t in upstream)
    )
    for a, b in zip(got, expected, strict=True):
        assert similarity_error(a, b) <= SIMILARITY
