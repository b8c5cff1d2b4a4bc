"""Sizes that kernels refuse, of tensors that repeat one row in memory."""

import pytest
from callers import assert_error, native

from dsa_ext.testing.calls import ORDINARY

MANY, ROWS = 2**31 - 2**26 + 1, 2**30 + 1
LISTS = "indices must have at most 2^30 rows of at most 2^29 slots, got int32"
POSITIONS = "must have at most 2^31 - 2^26"
SLOTS = "q2k_index must have at most 2^20 slots per row and 2^30 per head of k, got int32"
GROUPS = 2**30 // 576 + 1
LONG = {"q": {2: 2**16}, "q2k_num": {2: 2**10}, "q2k_index": {2: 2**10, 3: 2**20}}  # two heads for each of k

# The operator, sizes of dimensions of its arguments, and the message without the operator's name.
CASES: list[tuple[str, dict[str, dict[int, int]], str]] = [
    ("sparse_mla_fwd", {"kv": {1: 2**31}}, f"kv must have sizes below 2^31, got bfloat16 [1, {2**31}, 1, 576]"),
    ("sparse_mla_fwd", {"q": {1: ROWS}, "indices": {1: ROWS}}, f"{LISTS} [1, {ROWS}, 1, 24]"),
    (
        "sparse_mla_bwd",
        {name: {2: GROUPS} for name in ("dout", "q", "kv", "out", "lse", "indices", "dlse")},
        f"kv's groups times d_qk must be less than 2^30, got {GROUPS} * 576",
    ),
    ("indexer_scores", {name: {0: ROWS} for name in ("q", "weights", "indices")}, f"{LISTS} [{ROWS}, 30]"),
    ("topk_select", {"logits": {1: MANY}}, f"logits {POSITIONS} columns, got float32 [9, {MANY}]"),
    ("indexer_loss", {"scores": {1: MANY}, "p": {1: MANY}}, f"scores {POSITIONS} columns, got float32 [9, {MANY}]"),
    (
        "indexer_logits",
        {name: {0: MANY} for name in ("q", "weights", "starts", "ends")},
        f"q {POSITIONS} rows, got bfloat16 [{MANY}, 8, 64]",
    ),
    ("indexer_logits", {"k": {0: MANY}}, f"k {POSITIONS} rows, got bfloat16 [{MANY}, 64]"),
    ("indexer_topk", {"k": {0: MANY}}, f"k {POSITIONS} rows, got bfloat16 [{MANY}, 64]"),
    ("indexer_scores", {"k": {0: MANY}}, f"k {POSITIONS} rows, got bfloat16 [{MANY}, 64]"),
    ("indexer_scores_bwd", {"k": {0: MANY}}, f"k {POSITIONS} rows, got bfloat16 [{MANY}, 64]"),
    (
        "indexer_logits_bwd",
        {"k": {0: MANY}, "dlogits": {1: MANY}},
        f"k {POSITIONS} rows, got bfloat16 [{MANY}, 64]",
    ),
    (
        "indexer_logits_paged",
        {"weights": {0: 2**30}} | {name: {0: 2**29} for name in ("q", "context_lens", "block_table")},
        f"q's sequences must have fewer than 2^31 - B tiles of up to 64 keys of a page, got {3 * 2**29}",
    ),
    ("block_sparse_attn_fwd", {"q2k_index": {3: 2**20 + 1}}, f"{SLOTS} [1, 4, 2, {2**20 + 1}]"),
    ("block_sparse_attn_fwd", LONG, f"{SLOTS} [1, 4, {2**10}, {2**20}]"),
    (
        "block_sparse_attn_bwd",
        LONG | {"dout": {2: 2**16}, "out": {2: 2**16}, "lse": {2: 2**16}, "dlse": {2: 2**16}},
        f"{SLOTS} [1, 4, {2**10}, {2**20}]",
    ),
]


@pytest.mark.parametrize(("op", "sizes", "message"), CASES, ids=[f"{op}-{text}" for op, _, text in CASES])
def test_sizes_that_kernels_refuse(op: str, sizes: dict[str, dict[int, int]], message: str) -> None:
    args = ORDINARY[op]()
    for name, dims in sizes.items():
        row = args[name]
        for dim in dims:
            row = row.narrow(dim, 0, 1)
        args[name] = row.expand([dims.get(dim, size) for dim, size in enumerate(row.shape)])
    assert_error(lambda **changed: native(op, **changed), op, args, message)
