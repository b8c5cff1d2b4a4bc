"""Valid and invalid calls of indexer_logits_paged and indexer_topk_paged, and checks that they share."""

from typing import Any

import pytest
import torch
from callers import cpu, to_fake_cuda
from indexer_cases import TOPK_ERRORS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dsa_ext.testing.paged_inputs import PagedInputs, make_paged_inputs

FP8 = torch.float8_e4m3fn
DTYPES = [FP8, torch.bfloat16, torch.float32, torch.float64]
B, N, KEYS, HI, DI, PAGE = 3, 2, 16, 8, 64, 4
PAGES, BLOCKS = KEYS // PAGE, B * KEYS // PAGE + 2


def make_small(dtype: torch.dtype, page: int = PAGE, batch: int = B, keys: int = KEYS, spare: int = 2) -> PagedInputs:
    return make_paged_inputs(batch, N, keys, HI, DI, page, dtype=dtype, spare=spare)


def paged_arguments(op: str, dtype: torch.dtype = FP8, **changes: Any) -> dict[str, Any]:
    topk = {"topk": 5} if op == "indexer_topk_paged" else {}
    return {**vars(make_small(dtype)), **topk, **changes}


PAGED_ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"q": torch.zeros(B, HI, DI).bfloat16()},
        "q must be float8_e4m3fn or bfloat16 [B, N, Hi, Di], got bfloat16 [3, 8, 64]",
    ),
    (
        {"q": torch.zeros(B, N, HI, DI).half()},
        "q must be float8_e4m3fn or bfloat16 [B, N, Hi, Di], got float16 [3, 2, 8, 64]",
    ),
    (
        {"k_cache": torch.zeros(BLOCKS, PAGE, DI).to(FP8)},
        "k_cache must be uint8 [blocks, page, Di + 4], got float8_e4m3fn [14, 4, 64]",
    ),
    (
        {"k_cache": torch.zeros(BLOCKS, PAGE, DI).byte()},
        "k_cache must be uint8 [blocks, page, Di + 4=68], got uint8 [14, 4, 64]",
    ),
    (
        {"q": torch.zeros(B, N, HI, DI).bfloat16()},
        "k_cache must be bfloat16 [blocks, page, Di], got uint8 [14, 4, 68]",
    ),
    (
        {"q": torch.zeros(B, N, HI, DI).bfloat16(), "k_cache": torch.zeros(BLOCKS, PAGE, 68).bfloat16()},
        "k_cache must be bfloat16 [blocks, page, Di=64], got bfloat16 [14, 4, 68]",
    ),
    ({"weights": torch.zeros(B * N, HI).double()}, "weights must be float32 [B * N, Hi], got float64 [6, 8]"),
    ({"weights": torch.zeros(B, HI)}, "weights must be float32 [B * N=6, Hi=8], got float32 [3, 8]"),
    ({"context_lens": torch.zeros(B).long()}, "context_lens must be int32 [B], got int64 [3]"),
    ({"context_lens": torch.zeros(B * N).int()}, "context_lens must be int32 [B=3], got int32 [6]"),
    ({"context_lens": torch.zeros(B, 1).int()}, "context_lens must be int32 [B=3, N=2], got int32 [3, 1]"),
    ({"context_lens": torch.zeros(B, N, 1).int()}, "context_lens must be int32 [B, N], got int32 [3, 2, 1]"),
    ({"block_table": torch.zeros(B, PAGES)}, "block_table must be int32 [B, pages], got float32 [3, 4]"),
    ({"block_table": torch.zeros(2, PAGES).int()}, "block_table must be int32 [B=3, pages], got int32 [2, 4]"),
    (
        {"q": torch.zeros(B, 7, HI, DI).to(FP8), "weights": torch.zeros(B * 7, HI)},
        "q must have 1 to 6 queries per sequence, got 7",
    ),
    (
        {"q": torch.zeros(B, 0, HI, DI).to(FP8), "weights": torch.zeros(0, HI)},
        "q must have 1 to 6 queries per sequence, got 0",
    ),
    (
        {"q": torch.zeros(B, N, 12, DI).to(FP8), "weights": torch.zeros(B * N, 12)},
        "q's heads must be 8, 16, 32 or 64, got 12",
    ),
    (
        {"q": torch.zeros(B, N, HI, 96).to(FP8), "k_cache": torch.zeros(BLOCKS, PAGE, 100).byte()},
        "q's head dimension must be 64 or 128, got 96",
    ),
    (
        {"k_cache": torch.zeros(BLOCKS, 6, DI + 4).byte()},
        "k_cache must have a multiple of 4 keys per page when q is float8_e4m3fn, got 6",
    ),
]
MAX_LEN_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"max_len": -1}, "the logits must have 0 to 2^31 - 2^26 columns (max_len, or pages * page), got -1"),
    (
        {"max_len": 2**31 - 2**26 + 1},
        "the logits must have 0 to 2^31 - 2^26 columns (max_len, or pages * page), got 2080374785",
    ),
]
ERRORS = {
    "indexer_logits_paged": PAGED_ERRORS + MAX_LEN_ERRORS,
    "indexer_topk_paged": PAGED_ERRORS + TOPK_ERRORS,
}


def errors_of(op: str) -> Any:
    """Parametrizes a test over `op`, what is wrong, and the message without the operator's name."""
    cases = [pytest.param(op, changes, text, id=f"{op}: {text}") for changes, text in ERRORS[op]]
    return pytest.mark.parametrize(("op", "changes", "text"), cases)


def check_a_mix_of_devices(op: str) -> None:
    args = paged_arguments(op)
    with FakeTensorMode(allow_non_fake_inputs=True):
        args["q"] = to_fake_cuda(args["q"])
        with pytest.raises(RuntimeError, match=f"{op}: k_cache must be on the device of q, cuda:0, got cpu"):
            cpu(op, **args)


def opcheck(op: str, dtype: torch.dtype, **options: Any) -> None:
    args = paged_arguments(op, dtype, **options)
    if dtype != FP8:
        args = {n: value.requires_grad_() if n in ("q", "k_cache", "weights") else value for n, value in args.items()}
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if dtype != FP8:  # test_schema compares arguments with torch.allclose, which has no fp8
        tests.append("test_schema")
    torch.library.opcheck(getattr(torch.ops.dsa, op).default, (), args, test_utils=tests)


def check_flop_formula(op: str, **options: Any) -> None:
    args = paged_arguments(op, **options)
    with FlopCounterMode(display=False) as counter:
        cpu(op, **args)
    counts = counter.get_flop_counts()["Global"]
    assert counts == {getattr(torch.ops.dsa, op): 2 * B * N * HI * options.get("max_len", KEYS) * DI}
