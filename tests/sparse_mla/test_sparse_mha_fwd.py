"""sparse_mha without a GPU: its reference against sparse_mla and plain formulas; the operator's errors."""

from typing import Any

import pytest
import torch
from callers import assert_error, native
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.calls import ORDINARY
from dsa_ext.testing.inputs import INT32_MAX, INT32_MIN

BATCH, SEQ, KEYS, HEADS, SLOTS = 2, 9, 20, 3, 7
BOUNDS = {
    "starts": torch.full((BATCH, SEQ), 3, dtype=torch.int32),
    "ends": torch.full((BATCH, SEQ), 11, dtype=torch.int32),
}
OPTIONS: list[dict[str, Any]] = [{"causal": False}, {"q_start": 4, "sm_scale": -0.3}, {}, BOUNDS]
OPTIONS += [{"q_start": 4, "window": 3}, {"window": 1}, {"q_start": 50, "window": 35}, {"window": 2**62}]


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, SEQ, HEADS, 192), (BATCH, KEYS, HEADS, 128), (BATCH, KEYS, 64), (BATCH, KEYS, HEADS, 128)
    leaves = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    ids = torch.stack([torch.randperm(KEYS, generator=generator)[:SLOTS] for _ in range(BATCH * SEQ)])
    ids = ids.view(BATCH, SEQ, SLOTS).int()
    ids[..., 2] = torch.tensor([-1, INT32_MIN, INT32_MAX, KEYS, -1, -1, -1, -1, -1], dtype=torch.int32)
    return leaves, ids


def within(listed: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """Lists [B, S, groups, K] without the keys before the window."""
    if window is None:
        return listed
    position = options.get("q_start", 0) + torch.arange(SEQ)[:, None, None]
    return listed.where(listed > position - window, -1)


@pytest.mark.parametrize("options", OPTIONS)
def test_it_equals_sparse_mla(options: dict[str, Any]) -> None:
    """With a group of one head each, of whose keys the first columns are values that queries do not see."""
    (q, k, k_rope, v), ids = make_inputs()
    got = dsa_ext.sparse_mha(q, k, k_rope, v, ids, return_lse=True, **options)
    wide_q = torch.cat([torch.zeros_like(q[..., :128]), q], -1)
    keys = torch.cat([v, k, k_rope[:, :, None].expand(-1, -1, HEADS, -1)], -1)
    listed = ids[:, :, None].expand(-1, -1, HEADS, -1)
    scale = {"sm_scale": 192**-0.5, **options}
    listed = within(listed, scale.pop("window", None), options)
    names = "causal", "q_start", "positions_per_key", "topk_length", "starts", "ends"
    defaults = dict(zip(names, (True, 0, 1, None, None, None), strict=True))
    out, lse = reference.sparse_mla_fwd(wide_q, keys, listed, d_v=128, **defaults | scale)
    torch.testing.assert_close(got, (out, lse))
    upstream = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in got]
    gradients = torch.autograd.grad(got, [q, k, k_rope, v], upstream)
    dq, dkv, *_ = reference.sparse_mla_bwd(
        upstream[0], wide_q, keys, out, lse, listed, dlse=upstream[1], **defaults | scale
    )
    expected = dq[..., 128:], dkv[..., 128:256], dkv[..., 256:].sum(2), dkv[..., :128]
    torch.testing.assert_close(gradients, expected)


def test_a_repeated_id_counts_once() -> None:
    (q, k, k_rope, v), ids = make_inputs()
    twice = torch.cat([ids, ids[..., :4].flip(-1)], -1)
    assert torch.equal(*(dsa_ext.sparse_mha(q, k, k_rope, v, listed, causal=False) for listed in (ids, twice)))


def test_queries_without_keys() -> None:
    (q, k, k_rope, v), ids = make_inputs()
    ids[:, ::2] = -1
    out, lse = dsa_ext.sparse_mha(q, k, k_rope, v, ids, causal=False, return_lse=True)
    assert not out[:, ::2].any()
    assert (lse[:, ::2] == -torch.inf).all()
    gradients = torch.autograd.grad([out, lse], [q, k, k_rope, v], [torch.ones_like(out), torch.ones_like(lse)])
    assert not gradients[0][:, ::2].any()
    assert all(g.isfinite().all() for g in gradients)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, k_rope, v), ids = make_inputs()

    def results() -> tuple[Tensor, ...]:
        out = dsa_ext.sparse_mha(q, k, k_rope, v, ids)
        return out, *torch.autograd.grad(out.sin().sum(), [q, k, k_rope, v])

    expected = results()
    monkeypatch.setattr(reference.sparse_mha, "_CHUNK_SCORES", 2 * BATCH * HEADS * KEYS)
    torch.testing.assert_close(results(), expected)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(1, 5, 3, 128).bfloat16()}, "q must be bfloat16 [B, S, H, Dqk=192], got bfloat16 [1, 5, 3, 128]"),
    (
        {"k": torch.zeros(1, 40, 2, 128).bfloat16()},
        "k must be bfloat16 [B=1, S_kv, H=3, Dnope=128], got bfloat16 [1, 40, 2, 128]",
    ),
    (
        {"k_rope": torch.zeros(1, 39, 64).bfloat16()},
        "k_rope must be bfloat16 [B=1, S_kv=40, Drope=64], got bfloat16 [1, 39, 64]",
    ),
    (
        {"v": torch.zeros(1, 40, 3, 64).bfloat16()},
        "v must be bfloat16 [B=1, S_kv=40, H=3, Dv=128], got bfloat16 [1, 40, 3, 64]",
    ),
    ({"indices": torch.zeros(1, 5, 24)}, "indices must be int32 [B, S, K], got float32 [1, 5, 24]"),
    ({"indices": torch.zeros(1, 5, 0).int()}, "indices must have at least one slot per row, got int32 [1, 5, 0]"),
    ({"sm_scale": 2.0**128}, "sm_scale must be from -2^127 to 2^127, got 3.40282e+38"),
    ({"q_start": -1}, "q_start must be from 0 to 2^62, got -1"),
    ({"starts": torch.zeros(1, 5).int()}, "starts and ends must be given together"),
    (
        {"starts": torch.zeros(1, 5).int(), "ends": torch.zeros(1, 4).int()},
        "ends must be int32 [B=1, S=5], got int32 [1, 4]",
    ),
    (
        {"starts": torch.zeros(1, 5).int(), "ends": torch.zeros(1, 5).int(), "q_start": 1},
        "q_start must be 0 with starts and ends, got 1",
    ),
    ({"causal": False, "window": 5}, "window must be None with causal=False, or with starts and ends, got 5"),
    (
        {"causal": True, "starts": torch.zeros(1, 5).int(), "ends": torch.zeros(1, 5).int(), "window": 5},
        "window must be None with causal=False, or with starts and ends, got 5",
    ),
    ({"causal": True, "window": 0}, "window must be from 1 to 2^62, got 0"),
    ({"causal": True, "window": 2**62 + 1}, "window must be from 1 to 2^62, got 4611686018427387905"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
@pytest.mark.parametrize("op", ["sparse_mha_fwd", "sparse_mha_bwd"])
def test_errors(op: str, change: dict[str, Any], message: str) -> None:
    args = ORDINARY[op]() | change
    assert_error(getattr(torch.ops.dsa, op), op, args, message)
    assert_error(lambda **changed: native(op, **changed), op, args, message)


def test_rows_must_be_aligned() -> None:
    for name in ("q", "k", "k_rope", "v"):
        args = ORDINARY["sparse_mha_fwd"]()
        x = args[name]
        args[name] = torch.cat([x, x[..., :4]], -1)[..., 4:]
        with pytest.raises(RuntimeError, match=rf"dsa::sparse_mha_fwd: {name} must have .*aligned"):
            native("sparse_mha_fwd", **args)
