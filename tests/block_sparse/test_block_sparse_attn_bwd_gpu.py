"""The kernels of block_sparse_attn_bwd against the reference in float64 on the same GPU, and their other promises."""

from concurrent.futures import ThreadPoolExecutor

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

FORWARD = torch.ops.dsa.block_sparse_attn_fwd.default
OP = torch.ops.dsa.block_sparse_attn_bwd.default


def upstream(x: BlockInputs, seed: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    dout = torch.randn(x.q.shape, generator=generator, device="cuda").bfloat16()
    return dout, torch.randn(x.q.shape[:3], generator=generator, device="cuda")


def check(x: BlockInputs, sm_scale: float | None = None, sizes: bool = True, with_lse: bool = True) -> list[Tensor]:
    lists = x.lists() if sizes else (*x.lists()[:2], None)
    dout, dlse = upstream(x)
    dlse = dlse if with_lse else None
    out, lse = FORWARD(x.q, x.k, x.v, *lists, sm_scale)
    gradients = OP(dout, x.q, x.k, x.v, out, lse, *lists, sm_scale, dlse)
    args = {**vars(x), "kv_block_size": lists[2], "dout": dout, "out": out, "lse": lse, "dlse": dlse}
    tolerances.check("block_sparse_attn_bwd", gradients, {**args, "sm_scale": sm_scale})
    for gradient, tensor in zip(gradients, (x.q, x.k, x.v), strict=True):
        assert gradient.dtype == torch.bfloat16
        assert gradient.stride() == torch.empty_like(tensor).stride()
    assert not gradients[0][lse == -torch.inf].any()
    unseen = ~valid_keys(x.k, lists[2]).flatten()[: x.k.shape[2]]
    assert not any(gradient[:, :, unseen].any() for gradient in gradients[1:])
    again = OP(dout, x.q, x.k, x.v, out, lse, *lists, sm_scale, dlse)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    return list(gradients)


def check_same_gradients(x: BlockInputs, index: Tensor, number: Tensor) -> None:
    """Other lists of the same blocks in the same order have the same gradients."""
    expected = check(x)
    dout, dlse = upstream(x)
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    gradients = OP(dout, x.q, x.k, x.v, out, lse, index, number, x.kv_block_size, None, dlse)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("sizes", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"n_q": 1, "n_kv": 1, "slots": 1},
        {"n_q": 63, "n_kv": 65, "slots": 2, "batch": 3},
        {"n_q": 64, "n_kv": 4000, "slots": 63, "heads": 12, "kv_heads": 12},
        {"n_q": 64, "n_kv": 30000, "slots": 460, "heads": 1, "kv_heads": 1},
        {"n_q": 700, "n_kv": 1000, "slots": 9, "heads": 3, "kv_heads": 1},
        {"n_q": 5000, "n_kv": 5000, "slots": 40, "batch": 2},
        {"n_q": 2048, "n_kv": 9000, "slots": 8, "heads": 12, "kv_heads": 3},
        {"n_q": 6300, "n_kv": 300, "slots": 1, "heads": 8, "kv_heads": 1},
        # Nine units of heads, in four buffers.
        {"n_q": 1280, "n_kv": 1280, "slots": 5, "heads": 140, "kv_heads": 140},
    ],
)
def test_values(shape: dict[str, int], sizes: bool, dim: int) -> None:
    check(make_gpu(**shape, dim=dim), sizes=sizes, with_lse=sizes)


@pytest.mark.parametrize("seed", range(4))
def test_many_rounds(seed: int) -> None:
    """Shared-memory rings with few slots wrap around many times, with blocks of every size."""
    check(make_gpu(n_q=12800, n_kv=3000, slots=7 + seed, heads=4, dim=128, seed=seed))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "shape",
    [
        {"n_q": 6400, "n_kv": 300, "slots": 900, "heads": 2, "kv_heads": 2},  # two parts of each head
        {"n_q": 2500, "n_kv": 1000, "slots": 900, "heads": 6, "kv_heads": 2},  # parts that begin within a query head
        {"n_q": 12800, "n_kv": 200, "slots": 1800, "heads": 1, "kv_heads": 1},  # five parts, in three buffers
    ],
)
def test_lists_of_a_head_that_do_not_fit(shape: dict[str, int], dim: int) -> None:
    """The listed blocks may be far from each other: slots between them name no block."""
    used = 8
    x = make_gpu(**{**shape, "slots": used}, dim=dim)
    is_used = torch.arange(used, device="cuda") < x.q2k_num[..., None]
    index = x.q2k_index.new_full((*x.q2k_num.shape, shape["slots"]), -1)
    step = shape["slots"] // used
    index[..., shape["slots"] - 1 - (used - 1) * step :: step] = x.q2k_index.where(is_used, -1)
    check_same_gradients(x, index, torch.full_like(x.q2k_num, shape["slots"]))


def test_long_lists_of_a_head_that_do_not_fit() -> None:
    check(make_gpu(n_q=2500, n_kv=1000, slots=900, heads=6, kv_heads=2, dim=64))


@pytest.mark.parametrize("slots", [1, 5, 9, 16, 17])
def test_free_slots(slots: int) -> None:
    """Many free slots change nothing."""
    x = make_gpu(n_q=2500, n_kv=1000, slots=slots, heads=6, dim=128)
    free = torch.nn.functional.pad(x.q2k_index, (0, 3000), value=2)
    check_same_gradients(x, free, x.q2k_num.clamp(max=slots))


def test_a_block_that_every_query_lists() -> None:
    x = make_gpu(n_q=6400, n_kv=6400, slots=4, heads=16, kv_heads=16, dim=128)
    x.q2k_index[..., 0] = 0
    x.q2k_num.fill_(4)
    check(x)


@pytest.mark.parametrize("sm_scale", [0.3, -0.05, 0.0])
def test_scale(sm_scale: float) -> None:
    check(make_gpu(n_q=300, n_kv=1000, slots=8), sm_scale)


@pytest.mark.parametrize("dim", [64, 128])
def test_what_nobody_sees_may_be_nan(dim: int) -> None:
    x = make_gpu(n_q=300, n_kv=1000, slots=8, dim=dim)
    expected = check(x)
    seen = valid_keys(x.k, x.kv_block_size).flatten()[: x.k.shape[2]]
    x.k[:, :, ~seen], x.v[:, :, ~seen] = torch.nan, torch.nan
    assert all(torch.equal(a, b) for a, b in zip(check(x), expected, strict=True))


def test_gradients_of_queries_that_see_nothing_have_no_effect() -> None:
    x = make_gpu(n_q=300, n_kv=640, slots=3, heads=2, kv_heads=2, dim=128)
    x.q2k_num[0, 0, 1] = 0
    dout, dlse = upstream(x)
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    expected = OP(dout, x.q, x.k, x.v, out, lse, *x.lists(), None, dlse)
    dout[0, 0, BLOCK : 2 * BLOCK], dlse[0, 0, BLOCK : 2 * BLOCK] = torch.nan, torch.nan
    gradients = OP(dout, x.q, x.k, x.v, out, lse, *x.lists(), None, dlse)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert not gradients[0][0, 0, BLOCK : 2 * BLOCK].any()


def test_a_nan_spreads_to_what_it_touches_only() -> None:
    x = make_gpu(n_q=300, n_kv=640, slots=1, heads=2, kv_heads=2, dim=128)
    x.q2k_index.copy_(torch.arange(5, device="cuda")[:, None])
    x.q2k_num.fill_(1)
    x.kv_block_size.fill_(BLOCK)
    dout, _ = upstream(x)
    dout[0, 1, 2 * BLOCK + 3, 5] = torch.nan
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    dq, dk, dv = OP(dout, x.q, x.k, x.v, out, lse, *x.lists())
    assert dq[0, 1, 2 * BLOCK + 3].isnan().all()
    assert dk[0, 1, 2 * BLOCK : 3 * BLOCK].isnan().all()
    assert dv[0, 1, 2 * BLOCK : 3 * BLOCK, 5].isnan().all()
    assert dq.isnan().sum() == 128
    assert dk.isnan().sum() == BLOCK * 128
    assert dv.isnan().sum() == BLOCK


@pytest.mark.parametrize("dim", [64, 128])
def test_missing_queries_add_nothing_to_infinite_keys(dim: int) -> None:
    """All scores of an infinite key are -inf, so that it has no weight."""
    x = make_gpu(n_q=70, n_kv=640, slots=3, heads=2, kv_heads=2, dim=dim)
    x.q.abs_()
    x.k[:, :, 3::BLOCK, 5] = -torch.inf
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    assert out.isfinite().all()
    _, dk, dv = OP(upstream(x)[0], x.q, x.k, x.v, out, lse, *x.lists())
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@pytest.mark.parametrize("dim", [64, 128])
def test_an_infinite_offset_reaches_visible_keys_only(dim: int) -> None:
    x = make_gpu(n_q=70, n_kv=640, slots=3, heads=2, kv_heads=2, dim=dim)
    x.q2k_index.fill_(0)
    x.q2k_num.fill_(1)
    x.kv_block_size.fill_(50)
    x.k[:, :, :50].abs_()
    x.k[:, :, 50:] = torch.nan
    dout, dlse = upstream(x)
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    dlse[0, 0, 7] = torch.inf
    dq, dk, dv = OP(dout, x.q, x.k, x.v, out, lse, *x.lists(), None, dlse)
    assert dq[0, 0, 7].isinf().all()
    assert dq[0, 0, :7].isfinite().all()
    assert not dk[:, :, 50:].any()
    assert not dv[:, :, 50:].any()


@pytest.mark.parametrize("empty", ["batch", "heads", "n_q", "n_kv"])
def test_nothing(empty: str) -> None:
    sizes = {"batch": 2, "heads": 4, "n_q": 100, "n_kv": 200, empty: 0}
    x = make_gpu(**sizes, kv_heads=1 if empty == "heads" else 2)
    dout, _ = upstream(x)
    gradients = OP(dout, x.q, x.k, x.v, *FORWARD(x.q, x.k, x.v, *x.lists()), *x.lists())
    for gradient, tensor in zip(gradients, (x.q, x.k, x.v), strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


def test_strided_inputs() -> None:
    x = make_gpu(batch=2, n_q=300, n_kv=500, slots=6, dim=128)
    expected = check(x)
    x.q, x.k, x.v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k, x.v))
    assert all(torch.equal(a, b) for a, b in zip(check(x), expected, strict=True))
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    dout, dlse = upstream(x)
    expected = OP(dout, x.q, x.k, x.v, out, lse, *x.lists(), None, dlse)
    wide = torch.zeros(2, 4, 300, 131, device="cuda", dtype=torch.bfloat16)
    wide[..., 2:130] = dout
    wide_dlse = torch.zeros(2, 4, 300, 3, device="cuda")
    wide_dlse[..., 1] = dlse
    arguments = (wide[..., 2:130], x.q, x.k, x.v, out.contiguous(), lse, *x.lists(), None, wide_dlse[..., 1])
    assert all(torch.equal(a, b) for a, b in zip(OP(*arguments), expected, strict=True))


def test_far_apart() -> None:
    """Keys of the last head start more than 2^31 elements after the first."""
    x, k, v, index, number = far_apart()
    dout, _ = upstream(x)
    out, lse = FORWARD(x.q, k, v, index, number)
    far = OP(dout, x.q, k, v, out, lse, index, number)
    near = OP(dout, x.q, x.k, x.v, out, lse, torch.zeros_like(index), number)
    assert torch.equal(far[0], near[0])
    assert not far[1][:, :, :-64].any()
    assert all(torch.equal(a[:, :, -64:], b) for a, b in zip(far[1:], near[1:], strict=True))


def test_graph_capture_at_first_call_and_side_stream() -> None:
    x = make_gpu(n_q=1000, n_kv=4000, slots=20, dim=128)
    dout, _ = upstream(x)
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    arguments = (dout, x.q, x.k, x.v, out, lse, *x.lists())
    stream = torch.cuda.Stream()
    expected = check_replays(stream, lambda: OP(*arguments), lambda: OP(*arguments))
    with torch.cuda.stream(stream):
        aside = OP(*arguments)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(aside, expected, strict=True))


def test_in_a_thread_of_its_own() -> None:
    """A new thread has no CUDA context until a call sets one; autograd's thread is one too."""
    x = make_gpu(n_q=300, dim=128)
    dout, _ = upstream(x)
    out, lse = FORWARD(x.q, x.k, x.v, *x.lists())
    expected = OP(dout, x.q, x.k, x.v, out, lse, *x.lists())
    for call, wanted in (
        (lambda: FORWARD(x.q, x.k, x.v, *x.lists()), (out, lse)),
        (lambda: OP(dout, x.q, x.k, x.v, out, lse, *x.lists()), expected),
    ):
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(call).result()
        assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


def test_autograd_errors_and_compile() -> None:
    x = make_gpu(dim=128, n_q=300)
    leaves = x.leaves()
    dout, dlse = upstream(x)
    out, lse = dsa_ext.block_sparse_attn(*leaves, *x.lists(), return_lse=True)
    gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    arguments = (dout, *(t.detach() for t in (*leaves, out, lse)), *x.lists())
    expected = OP(*arguments, None, dlse)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    compiled = torch.compile(lambda *args: dsa_ext.block_sparse_attn(*args), fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(*leaves, *x.lists()), leaves, dout)
    assert all(torch.equal(a, b) for a, b in zip(gradients, OP(*arguments), strict=True))
    # One element, expanded: the gradient that sum() sends back.
    gradients = torch.autograd.grad(dsa_ext.block_sparse_attn(*leaves, *x.lists()).sum(), leaves)
    expected = OP(torch.ones_like(dout), *arguments[1:])
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    with pytest.raises(RuntimeError, match="block_sparse_attn_bwd: lse"):
        OP(*arguments[:5], arguments[5].double(), *arguments[6:])
    with pytest.raises(RuntimeError, match="block_sparse_attn_bwd: dout"):
        OP(dout.cpu(), *arguments[1:])
    torch.library.opcheck(OP, arguments)
