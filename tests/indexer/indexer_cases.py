"""Valid and invalid calls of indexer_logits, topk_select and indexer_topk, and checks that they share."""

from typing import Any

import pytest
import torch
from callers import cpu, to_fake_cuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import dsa_ext
from dsa_ext.testing.inputs import IndexerInputs, make_indexer_inputs

S, S_KV, HI, DI, K = 4, 16, 8, 64, 5
FP8 = torch.float8_e4m3fn


def scoring_arguments(dtype: torch.dtype = FP8, **changes: Any) -> dict[str, Any]:
    """Valid arguments of indexer_logits, of small size."""
    inputs = make_indexer_inputs(S, S_KV, HI, DI, dtype=dtype)
    return {
        "q": inputs.q,
        "k": inputs.k,
        "weights": inputs.weights,
        "starts": inputs.ks,
        "ends": inputs.ke,
        "k_scale": inputs.k_scale,
        **changes,
    }


def arguments(op: str, **changes: Any) -> dict[str, Any]:
    if op == "topk_select":
        bounds = {"starts": torch.zeros(S).int(), "ends": torch.full((S,), S_KV).int()}
        return {"logits": torch.randn(S, S_KV), **bounds, "topk": K, **changes}
    return scoring_arguments(**({"topk": K, **changes} if op == "indexer_topk" else changes))


# What is wrong, and the message without the operator's name. Every implementation says the same.
SCORING_ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"q": torch.zeros(S, DI).bfloat16()},
        "q must be float8_e4m3fn or bfloat16 [S, Hi, Di], got bfloat16 [4, 64]",
    ),
    (
        {"q": torch.zeros(S, HI, DI).half()},
        "q must be float8_e4m3fn or bfloat16 [S, Hi, Di], got float16 [4, 8, 64]",
    ),
    (
        {"q": torch.zeros(S, HI, DI).to(torch.float8_e5m2)},
        "q must be float8_e4m3fn or bfloat16 [S, Hi, Di], got float8_e5m2 [4, 8, 64]",
    ),
    ({"k": torch.zeros(S_KV, DI).bfloat16()}, "k must be float8_e4m3fn [S_kv, Di], got bfloat16 [16, 64]"),
    (
        {"q": torch.zeros(S, HI, DI).bfloat16(), "k_scale": None},
        "k must be bfloat16 [S_kv, Di], got float8_e4m3fn [16, 64]",
    ),
    ({"k": torch.zeros(S_KV, 1, DI).to(FP8)}, "k must be float8_e4m3fn [S_kv, Di], got float8_e4m3fn [16, 1, 64]"),
    ({"k": torch.zeros(S_KV, 128).to(FP8)}, "k must be float8_e4m3fn [S_kv, Di=64], got float8_e4m3fn [16, 128]"),
    ({"weights": torch.zeros(S, HI).bfloat16()}, "weights must be float32 [S, Hi], got bfloat16 [4, 8]"),
    ({"weights": torch.zeros(HI, S)}, "weights must be float32 [S=4, Hi=8], got float32 [8, 4]"),
    ({"starts": torch.zeros(S).long()}, "starts must be int32 [S], got int64 [4]"),
    ({"starts": torch.zeros(S + 1).int()}, "starts must be int32 [S=4], got int32 [5]"),
    ({"ends": torch.zeros(S, 1).int()}, "ends must be int32 [S], got int32 [4, 1]"),
    ({"ends": torch.zeros(0).int()}, "ends must be int32 [S=4], got int32 [0]"),
    ({"k_scale": None}, "k_scale (float32 [S_kv]) is required when q is float8_e4m3fn, got None"),
    ({"k_scale": torch.ones(S_KV).bfloat16()}, "k_scale must be float32 [S_kv], got bfloat16 [16]"),
    ({"k_scale": torch.ones(S_KV, 1)}, "k_scale must be float32 [S_kv], got float32 [16, 1]"),
    ({"k_scale": torch.ones(S)}, "k_scale must be float32 [S_kv=16], got float32 [4]"),
    (
        scoring_arguments(torch.bfloat16, k_scale=torch.ones(S_KV)),
        "k_scale must be None when q is bfloat16, got float32 [16]",
    ),
    (
        {"q": torch.zeros(S, 12, DI).to(FP8), "weights": torch.zeros(S, 12)},
        "q's heads must be 8, 16, 32 or 64, got 12",
    ),
    (
        {"q": torch.zeros(S, 0, DI).to(FP8), "weights": torch.zeros(S, 0)},
        "q's heads must be 8, 16, 32 or 64, got 0",
    ),
    (
        {"q": torch.zeros(S, HI, 96).to(FP8), "k": torch.zeros(S_KV, 96).to(FP8)},
        "q's head dimension must be 64 or 128, got 96",
    ),
]


TOPK_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"topk": 0}, "topk must be from 1 to 4096, got 0"),
    ({"topk": -1}, "topk must be from 1 to 4096, got -1"),
    ({"topk": 4097}, "topk must be from 1 to 4096, got 4097"),
]


SELECTING_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"logits": torch.zeros(S, S_KV).half()}, "logits must be float32 or bfloat16 [R, C], got float16 [4, 16]"),
    ({"logits": torch.zeros(S_KV)}, "logits must be float32 or bfloat16 [R, C], got float32 [16]"),
    ({"starts": torch.zeros(S)}, "starts must be int32 [R], got float32 [4]"),
    ({"starts": torch.zeros(1).int()}, "starts must be int32 [R=4], got int32 [1]"),
    ({"ends": torch.zeros(S).long()}, "ends must be int32 [R], got int64 [4]"),
    ({"ends": torch.zeros(S + 1).int()}, "ends must be int32 [R=4], got int32 [5]"),
    *TOPK_ERRORS,
    ({"page_table": torch.zeros(S, 2)}, "page_table must be int32 [B, pages], got float32 [4, 2]"),
    ({"page_table": torch.zeros(S).int()}, "page_table must be int32 [B, pages], got int32 [4]"),
    ({"page_table": torch.zeros(S, 2).int(), "page_size": 0}, "page_size must be from 1 to 2^31 - 1, got 0"),
    (
        {"page_table": torch.zeros(S, 2).int(), "page_size": 2**31},
        "page_size must be from 1 to 2^31 - 1, got 2147483648",
    ),
    (
        {"page_table": torch.zeros(3, 2).int()},
        "page_table must be int32 [B, pages] with a B that divides R=4, or row_to_sequence given, got int32 [3, 2]",
    ),
    (
        {"page_table": torch.zeros(0, 2).int()},
        "page_table must be int32 [B, pages] with a B that divides R=4, or row_to_sequence given, got int32 [0, 2]",
    ),
    (
        {"page_table": torch.zeros(3, 2).int(), "row_to_sequence": torch.zeros(3).int()},
        "row_to_sequence must be int32 [R=4], got int32 [3]",
    ),
    (
        {"row_to_sequence": torch.zeros(S).int()},
        "row_to_sequence must be None without page_table, got int32 [4]",
    ),
]


ERRORS = {
    "indexer_logits": SCORING_ERRORS,
    "indexer_topk": SCORING_ERRORS + TOPK_ERRORS,
    "topk_select": SELECTING_ERRORS,
}


def errors_of(op: str) -> Any:
    """Parametrizes a test over `op`, what is wrong, and the message without the operator's name."""
    cases = [pytest.param(op, changes, text, id=f"{op}: {text}") for changes, text in ERRORS[op]]
    return pytest.mark.parametrize(("op", "changes", "text"), cases)


def check_a_mix_of_devices(op: str, first: str, name: str) -> None:
    args = arguments(op)
    with FakeTensorMode(allow_non_fake_inputs=True):
        args[first] = to_fake_cuda(args[first])
        with pytest.raises(RuntimeError, match=f"{op}: {name} must be on the device of {first}, cuda:0, got cpu"):
            cpu(op, **args)


def opcheck(op: str, dtype: torch.dtype) -> None:
    overload = getattr(torch.ops.dsa, op).default
    if op == "topk_select":
        args = arguments(op, logits=torch.randn(S, S_KV).to(torch.float32 if dtype == FP8 else dtype))
    else:
        args = arguments(op) | scoring_arguments(dtype)
    if dtype != FP8:
        args = {
            name: value.requires_grad_() if name in ("q", "k", "weights", "logits") else value
            for name, value in args.items()
        }
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype != FP8:  # test_schema compares arguments with torch.allclose, which has no fp8
        tests.append("test_schema")
    torch.library.opcheck(overload, (), args, test_utils=tests)


def check_flop_formula(op: str) -> None:
    args = arguments(op)
    with FlopCounterMode(display=False) as counter:
        cpu(op, **args)
    counts = counter.get_flop_counts()["Global"]
    assert counts == {getattr(torch.ops.dsa, op): 2 * S * HI * S_KV * DI}


def loss(inputs: IndexerInputs) -> Tensor:
    """The softmax of the scores against the keys that the same scores select."""
    logits = dsa_ext.indexer_logits(inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke)
    indices, values = dsa_ext.topk_select(logits, inputs.ks, inputs.ke, K)
    selected = logits.gather(1, indices.clamp(min=0).long()) + torch.where(indices < 0, -torch.inf, 0.0)
    others, _ = dsa_ext.indexer_topk(inputs.q, inputs.k, inputs.weights, inputs.ks, inputs.ke, K)
    return (selected.logsumexp(1) - logits.logsumexp(1)).sum() + values.sum() + others.sum()
