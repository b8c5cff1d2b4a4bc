"""attn_dist without a GPU: its reference against dense attention; errors, fake tensors, compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.inputs import make_inputs, spoil_indices

OP = torch.ops.dsa.attn_dist.default
native, cpu, fake = callers("attn_dist")
B, S, S_KV, H, G, K, D = 1, 4, 16, 8, 2, 5, 576


def arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments of small size, bf16."""
    inputs = make_inputs(B, S, S_KV, H, G, K, D)
    return {
        "q": inputs.q,
        "kv": inputs.kv,
        "indices": inputs.indices,
        "lse": torch.zeros(B, S, H),
        "topk_length": torch.full((B, S), K, dtype=torch.int32),
        **changes,
    }


# What is wrong, and the message without the operator's name. Every implementation says the same. What attn_dist shares
# with sparse_mla_fwd is tested there.
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(B, S, H, D).half()}, "q must be bfloat16 [B, S, H, Dqk], got float16 [1, 4, 8, 576]"),
    (
        {"q": torch.zeros(B, S, H, 192).bfloat16(), "kv": torch.zeros(B, S_KV, G, 192).bfloat16()},
        "Dqk must be 576 or 512, got 192",
    ),
    ({"lse": torch.zeros(B, S, H).bfloat16()}, "lse must be float32 [B, S, H], got bfloat16 [1, 4, 8]"),
    ({"lse": torch.zeros(B, H, S)}, "lse must be float32 [B=1, S=4, H=8], got float32 [1, 8, 4]"),
    ({"topk_length": torch.zeros(B, S)}, "topk_length must be int32 [B, S], got float32 [1, 4]"),
    (
        {"normalize": True, "per_head_block": True},
        "normalize must be False when per_head_block is True: rows are divided by the sum over all blocks",
    ),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[text for _, text in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, "attn_dist", arguments(**changes), message)


def test_native_checks_take_any_strides_of_lse() -> None:
    assert_error(
        native,
        "attn_dist",
        arguments(lse=torch.zeros(H, S, 2 * B).permute(2, 1, 0)[::2]),
        "q must be on a CUDA device, got cpu",
    )


@pytest.mark.parametrize("heads", [1, 64, 65, 128])
@pytest.mark.parametrize("groups", [1, 2])
def test_dense_attention(heads: int, groups: int) -> None:
    """With every key listed it is the sum of the heads' softmax rows; the blocks add up to it."""
    inputs = make_inputs(2, 5, 9, heads * groups, groups, 9, 576, dtype=torch.float64)
    _, lse = dsa_ext.sparse_mla(inputs.q, inputs.kv, inputs.indices, return_lse=True)
    keys = inputs.kv.repeat_interleave(heads, 2)
    scores = torch.einsum("bshd,bthd->bhst", inputs.q, keys) * 576**-0.5
    later = torch.ones(5, 9, dtype=torch.bool).triu(1)
    dense = scores.masked_fill(later, -torch.inf).softmax(-1).unflatten(1, (groups, heads)).sum(2)  # [B, G, S, S_kv]
    expected = dense.transpose(1, 2).gather(3, inputs.indices.long())
    dist = dsa_ext.attn_dist(inputs.q, inputs.kv, inputs.indices, lse)
    torch.testing.assert_close(dist, expected)
    normalized = dsa_ext.attn_dist(inputs.q, inputs.kv, inputs.indices, lse, normalize=True)
    torch.testing.assert_close(normalized, expected / heads)
    blocks = dsa_ext.attn_dist(inputs.q, inputs.kv, inputs.indices, lse, per_head_block=True)
    assert blocks.shape == (-(-heads // 64), *inputs.indices.shape)
    torch.testing.assert_close(blocks.sum(0), expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("squeezed", [False, True])
def test_no_batch_is_a_batch_of_one(groups: int, squeezed: bool) -> None:
    inputs = make_inputs(seq=5, s_kv=40, heads=4, groups=groups, topk=12, dtype=torch.float64)
    q, kv, indices = inputs.q.requires_grad_(), inputs.kv.requires_grad_(), inputs.indices
    length = torch.tensor([[0, 3, 12, 7, 12]], dtype=torch.int32)
    options: dict[str, Any] = {"q_start": 20, "sm_scale": 0.1}
    _, lse = dsa_ext.sparse_mla(q, kv, indices, **options, topk_length=length, return_lse=True)
    rows = [q[0], kv[0], indices[0]]
    if squeezed and groups == 1:
        rows[1:] = [rows[1][:, 0], rows[2][:, 0]]
    dist = dsa_ext.attn_dist(*rows, lse[0], **options, topk_length=length[0])
    assert dist.shape == rows[2].shape
    batched = dsa_ext.attn_dist(q, kv, indices, lse, **options, topk_length=length)
    assert torch.equal(dist.view_as(batched[0]), batched[0])
    blocks = dsa_ext.attn_dist(*rows, lse[0], **options, topk_length=length[0], per_head_block=True)
    assert blocks.shape == (1, *rows[2].shape)


def test_another_denominator() -> None:
    """With a sink or more keys in lse the sums stay below 1; heads whose lse is -inf add nothing."""
    inputs = make_inputs(1, 3, 9, 4, 1, 5, 576, dtype=torch.float64)
    _, lse = dsa_ext.sparse_mla(inputs.q, inputs.kv, inputs.indices, causal=False, return_lse=True)
    twice = dsa_ext.attn_dist(inputs.q, inputs.kv, inputs.indices, lse + torch.log(torch.tensor(2.0)), causal=False)
    torch.testing.assert_close(twice.sum(-1), torch.full_like(twice.sum(-1), 4 / 2))
    lse[..., 1:] = -torch.inf
    one = dsa_ext.attn_dist(inputs.q, inputs.kv, inputs.indices, lse, causal=False)
    torch.testing.assert_close(one.sum(-1), torch.ones_like(one.sum(-1)))


@pytest.mark.parametrize("normalize", [False, True])
def test_rows_without_a_key_are_zero(normalize: bool) -> None:
    inputs = make_inputs(2, 4, 16, 8, 1, 5, 576)
    indices = spoil_indices(inputs.indices, 16)
    _, lse = dsa_ext.sparse_mla(inputs.q, inputs.kv, indices, causal=False, return_lse=True)
    dist = dsa_ext.attn_dist(inputs.q, inputs.kv, indices, lse, causal=False, normalize=normalize)
    assert (dist[:, 0] == 0).all()
    hidden = (indices < 0) | (indices >= 16)
    assert (dist[hidden] == 0).all()
    assert (dist[~hidden] > 0).all()


@pytest.mark.parametrize("options", [{}, {"normalize": True, "causal": False}, {"per_head_block": True, "q_start": 3}])
def test_opcheck(options: dict[str, Any]) -> None:
    torch.library.opcheck(OP, tuple(arguments()[name] for name in ("q", "kv", "indices", "lse")), options)


def test_it_has_no_gradient() -> None:
    args = arguments(q=arguments()["q"].requires_grad_())
    assert not torch.ops.dsa.attn_dist(**args).requires_grad


def test_compile() -> None:
    torch._dynamo.reset()

    def call(args: dict[str, Any]) -> Tensor:
        _, lse = dsa_ext.sparse_mla(args["q"], args["kv"], args["indices"], return_lse=True)
        return dsa_ext.attn_dist(args["q"], args["kv"], args["indices"], lse, normalize=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(arguments()), call(arguments()))


def test_flop_formula() -> None:
    args = arguments()
    with FlopCounterMode(display=False) as counter:
        torch.ops.dsa.attn_dist(**args)
    assert counter.get_flop_counts()["Global"][torch.ops.dsa.attn_dist] == 2 * B * S * H * K * D


@pytest.mark.parametrize("call", [cpu, fake])
@pytest.mark.parametrize(("per_head_block", "blocks"), [(False, ()), (True, (0,))])
def test_no_heads(call: Callable[..., Any], per_head_block: bool, blocks: tuple[int, ...]) -> None:
    args = arguments(q=torch.zeros(B, S, 0, D).bfloat16(), lse=torch.zeros(B, S, 0), per_head_block=per_head_block)
    dist = call(**args)
    assert dist.shape == (*blocks, B, S, G, K)
    assert call is fake or not dist.any()


def test_reference_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    whole = reference.attn_dist(**args)
    monkeypatch.setattr(reference.sparse_mla, "_CHUNK_ELEMENTS", 1)
    assert torch.equal(reference.attn_dist(**args), whole)
