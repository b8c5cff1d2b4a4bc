"""Small calls of every operator and of every variant of the kernels, under compute-sanitizer, one part at a time.

    python tests/sanitize.py [--only NAME ..] [--tool memcheck racecheck]     each part under each tool
    python tests/sanitize.py --run NAME                                       the calls of one part, without a tool

Each part takes less than two minutes: its calls are small, and their results are checked on the CPU, so that the tool
runs little but the kernels. memcheck finds accesses outside of each tensor, not only outside of the allocator's blocks:
every tensor is an allocation of its own. racecheck recognizes only barriers as synchronization. It reports the words
that CTAs of mhc_pre_fwd send each other and poll as races, so that part is skipped.
"""

import argparse
import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.testing.block_inputs import make_block_inputs, make_heads
from dsa_ext.testing.calls import ORDINARY, with_forward
from dsa_ext.testing.inputs import (
    INT32_MAX,
    INT32_MIN,
    make_indexer_inputs,
    make_inputs,
    nasty_rows,
    spoil_indices,
    strided_copy,
    strided_rows,
)
from dsa_ext.testing.progress import Progress
from dsa_ext.testing.tolerances import check, check_selected

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOOLS = ("memcheck", "racecheck")
#: Parts that a tool skips.
LEFT_OUT = {"memcheck": (), "racecheck": ("mhc_pre_fwd",)}
#: Seconds after which a part counts as hanging.
LIMIT = 600
Args = dict[str, Any]

# (B, S, S_kv, H, G, K, d_qk): one tile, several tiles, partial tiles of heads, groups, keys split over CTAs, no
# visible key, several queries per CTA.
SPARSE_MLA = (
    (2, 3, 100, 64, 1, 64, 576),
    (2, 3, 100, 128, 1, 200, 512),
    (1, 2, 100, 3, 1, 70, 576),
    (2, 2, 100, 16, 1, 130, 512),
    (1, 2, 100, 34, 2, 65, 576),
    (1, 1, 600, 17, 1, 520, 576),
    (2, 2, 0, 65, 1, 5, 576),
    (1, 150, 100, 100, 1, 70, 576),
)
# (R, C, K): one column, all selected, candidates cut to the best K, rows split in two and in eight.
TOPK_SELECT = ((3, 1, 5), (3, 300, 4096), (2, 13001, 2048), (2, 17004, 100), (1, 70001, 2048))
# (S, S_kv, K): one of each, all selected, several blocks of queries, many keys. Every kernel variant runs one of them.
INDEXER = ((1, 1, 1), (5, 200, 300), (130, 300, 64), (3, 9000, 500))
# (S, S_kv, K): one slot, several tiles, several queries per CTA. Every kernel variant runs one of them.
INDEXER_TRAINING = ((1, 1, 1), (5, 200, 300), (150, 300, 129))
# (queries, keys, slots): one slot, several blocks of queries, many slots.
BLOCK_SPARSE = ((1, 1, 1), (200, 500, 5), (64, 4000, 63))
COARSE = ((1, 1), (300, 150), (3000, 100))  # queries, keys
# (B, H, query blocks, key blocks): no block, rows of one warp, of two, of many.
BLOCK_SELECT = ((1, 1, 2, 0), (1, 2, 3, 364), (2, 1, 2, 700), (1, 1, 2, 16384))
# (H, N): one row, a part of a CTA's rows, several CTAs.
GATED_FUSION = ((1, 1), (3, 7), (3, 50))
# (M, N): one block, parts of a CTA's rows and columns, several CTAs.
ACT_QUANT = ((1, 128), (9, 1152), (17, 2176))
# (M, N, K): one row, every template instance (kRows), clusters, several tiles per CTA, several launches.
FP8_GEMM = ((1, 1, 128), (9, 200, 640), (30, 64, 2176), (64, 8500, 256), (70, 72, 384))
# (B, S, n, D): one token, clusters of 2 to 16 CTAs, several tiles per CTA.
MHC = ((1, 1, 2, 128), (1, 40, 4, 640), (2, 9, 4, 1920), (1, 17, 4, 3968), (1, 1100, 4, 128))


# ---- Calls. Their arguments are made on the CPU.


def on_gpu(value: Any) -> Any:
    """A copy on the GPU in the same layout, in an allocation of its own that ends at the last element."""
    if not isinstance(value, Tensor):
        return value
    offset, reach = (
        value.storage_offset(),
        1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)),
    )
    if value.numel() == 0:
        return value.cuda()
    memory = value.as_strided((offset + reach,), (1,), 0).cuda()
    return memory.as_strided(value.shape, value.stride(), offset)


def call(op: str, args: Args) -> tuple[Tensor, ...]:
    """The results of torch.ops.dsa.<op>, back on the CPU."""
    results = getattr(torch.ops.dsa, op)(**{name: on_gpu(value) for name, value in args.items()})
    return tuple(t.cpu() for t in ((results,) if isinstance(results, Tensor) else results))


def checked(op: str, **args: Any) -> tuple[Tensor, ...]:
    results = call(op, args)
    check(op, results, args)
    return results


def swapped(x: Tensor) -> Tensor:
    """Heads [B, H, N, D] that are [N, B, H, D] in memory, as in sequence-first models."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- Parts


def attention_args() -> Iterator[Args]:
    """Arguments of the sparse MLA operators, in several layouts, with their options."""
    for i, (batch, seq, s_kv, heads, groups, topk, d_qk) in enumerate(SPARSE_MLA):
        inputs = make_inputs(batch, seq, s_kv, heads, groups, topk, d_qk)
        lengths = torch.full((batch, seq), topk, dtype=torch.int32)
        lengths[0, 0] = 0
        q, kv = strided_copy(inputs.q, swap_leading=True), strided_copy(inputs.kv)
        args = {"q": q, "kv": kv, "indices": spoil_indices(inputs.indices, s_kv)}
        if i % 2:
            yield {**args, "causal": False}
        else:
            yield {**args, "q_start": 50, "positions_per_key": 2, "topk_length": lengths}


def with_sink(args: Args) -> Args:
    sink = torch.linspace(-1, 1, args["q"].shape[2])
    sink[0] = math.inf
    return {**args, "attn_sink": sink}


def sparse_mla_fwd() -> None:
    for args in attention_args():
        checked("sparse_mla_fwd", **args)
    checked("sparse_mla_fwd", **with_sink(args))


def attn_dist() -> None:
    for args, kind in zip(attention_args(), itertools.cycle(({}, {"normalize": True}, {"per_head_block": True}))):
        checked("attn_dist", **with_forward("attn_dist", args), **kind)


def sparse_mla_bwd() -> None:
    for i, args in enumerate(attention_args()):
        seq, heads = args["q"].shape[1:3]
        dout, dlse = random(len(args["q"]), seq, heads, 512).to(BF16), random(len(args["q"]), seq, heads, seed=4)
        args = with_forward("sparse_mla_bwd", {**(with_sink(args) if i % 3 else args), "dout": dout, "dlse": dlse})
        checked("sparse_mla_bwd", **args)
        checked("sparse_mla_bwd", **args, deterministic=True)
    # Few of very many keys are listed; one of them is in every list.
    args = ORDINARY["sparse_mla_bwd"](seq=3, s_kv=20_000, topk=70)
    args["indices"][..., 5] = 19_999
    checked("sparse_mla_bwd", **with_forward("sparse_mla_bwd", args), deterministic=True)


def topk_select() -> None:
    for i, (rows, columns, topk) in enumerate(TOPK_SELECT):
        nasty = nasty_rows(columns)
        starts = torch.tensor([3, 0, INT32_MIN], dtype=torch.int32)[:rows]
        ends = torch.tensor([columns, columns - 5, INT32_MAX], dtype=torch.int32)[:rows]
        for names in (("normal", "plateau of zeros", "NaN"), ("ascending", "one fp16 bucket", "infinities")):
            logits = torch.stack([nasty[name] for name in names[:rows]]).to((torch.float32, BF16)[i % 2])
            for layout in (strided_rows, unaligned_rows):
                checked("topk_select", logits=layout(logits), starts=starts, ends=ends, topk=topk)
    for dtype in (torch.float32, BF16):
        ends = torch.full((9,), 5, dtype=torch.int32)
        checked("topk_select", logits=random(9, 5).to(dtype), starts=torch.zeros_like(ends), ends=ends, topk=3)


def unaligned_rows(rows: Tensor) -> Tensor:
    """The same rows as a view of wider rows that starts at column 1."""
    return torch.cat([rows[:, :1], rows], 1)[:, 1:]


def indexer_args(shape: tuple[int, int, int], heads: int, dim: int, dtype: torch.dtype) -> Args:
    inputs = make_indexer_inputs(*shape[:2], heads, dim, dtype=dtype)
    inputs.ks[-1] = 5
    args = {"q": strided_copy(inputs.q), "k": strided_rows(inputs.k), "weights": strided_rows(inputs.weights)}
    args |= {"starts": inputs.ks, "ends": inputs.ke}
    return args if inputs.k_scale is None else {**args, "k_scale": inputs.k_scale}


def indexer() -> None:
    for i, (dtype, heads, dim) in enumerate(itertools.product((FP8, BF16), (8, 16, 32, 64), (64, 128))):
        shape = INDEXER[(i + i // 4) % len(INDEXER)]
        args = indexer_args(shape, heads, dim, dtype)
        (logits,) = checked("indexer_logits", **args)
        call("indexer_logits", {**args, "clean": False})
        bounds = (args["starts"], args["ends"])
        check_selected(
            call("indexer_topk", {**args, "topk": shape[2]}), reference.topk_select(logits, *bounds, shape[2])
        )


def indexer_candidates() -> None:
    """So many logits that indexer_topk selects from candidates; some queries are selected once more."""
    for dtype, heads in ((FP8, 32), (BF16, 16)):
        args = indexer_args((1030, 66000, 0), heads, 64, dtype)
        args["weights"][::200] = 0
        (logits,) = call("indexer_logits", args)
        bounds = (args["starts"], args["ends"])
        check_selected(call("indexer_topk", {**args, "topk": 300}), reference.topk_select(logits, *bounds, 300))


def indexer_training() -> None:
    for i, (heads, dim) in enumerate(itertools.product((8, 16, 32, 64), (64, 128))):
        shape = seq, s_kv, topk = INDEXER_TRAINING[i % len(INDEXER_TRAINING)]
        args = indexer_args(shape, heads, dim, BF16)
        row_args = {name: args[name] for name in ("q", "k", "weights")}
        indices = torch.arange(seq * topk, dtype=torch.int32).view(seq, topk) * 7 % (s_kv + 1) - 1
        listed = {**row_args, "indices": strided_rows(indices, -1)}
        checked("indexer_scores", **listed)
        dscores = random(seq, topk).masked_fill(indices < 0, torch.nan)
        for deterministic in (False, True):
            checked("indexer_scores_bwd", dscores=dscores, **listed, deterministic=deterministic)
            checked("indexer_logits_bwd", dlogits=random(seq, s_kv), **args, deterministic=deterministic)


def indexer_packed() -> None:
    """Two sequences with a gap between their keys that no query sees."""
    args = ORDINARY["indexer_logits_bwd"](seq=40, s_kv=300)
    second = torch.arange(40) >= 20
    args["k"][100:200] = torch.nan
    args["starts"] = torch.where(second, 200, 0).int()
    args["ends"] = torch.where(second, 300, 100).int()
    for deterministic in (False, True):
        checked("indexer_logits_bwd", **args, deterministic=deterministic)
    del args["dlogits"]
    checked("indexer_logits", **args)


def indexer_loss() -> None:
    for slots in (1, 50, 3000):
        args = ORDINARY["indexer_loss"](slots=slots)
        checked("indexer_loss", **args)
        checked("indexer_loss", **args, valid=random(*args["p"].shape) > 0)
    checked("indexer_dense_loss", **ORDINARY["indexer_dense_loss"]())


def block_select() -> None:
    for batch, heads, q_blocks, blocks in BLOCK_SELECT:
        weights = random(batch * heads * q_blocks, blocks).sigmoid() ** 8
        kinds = ({}, {"min_ratio": 1.0, "max_ratio": 1.0, "tau": 1.0}, {"topk": 9})
        for dtype, options in itertools.product((torch.float32, BF16), kinds):
            scores = strided_rows(weights.to(dtype), math.inf).view(batch, heads, q_blocks, blocks)
            checked("block_select", scores=scores, **options)


def block_sparse_args(n_q: int, n_kv: int, slots: int, dim: int, batch: int = 1) -> Args:
    x = vars(make_block_inputs(batch=batch, n_q=n_q, n_kv=n_kv, slots=slots, dim=dim, dtype=BF16))
    return {n: strided_copy(t.transpose(1, 2)).transpose(1, 2) if n in "qkv" else t for n, t in x.items()}


def block_sparse_attn_fwd() -> None:
    for dim, shape in itertools.product((64, 128), BLOCK_SPARSE):
        checked("block_sparse_attn_fwd", **block_sparse_args(*shape, dim))
        args = block_sparse_args(130, 200, 3, dim, batch=2)
        checked("block_sparse_attn_fwd", **{n: swapped(t) if n in "qkv" else t for n, t in args.items()})
    args["q"], args["k"] = 2e4 * args["q"], 2e4 * args["k"]
    checked("block_sparse_attn_fwd", **args)


def block_sparse_attn_bwd() -> None:
    def backward(args: Args) -> None:
        shape = args["q"].shape
        args = {**args, "dout": swapped(random(*shape).to(BF16)), "dlse": random(*shape[:3], seed=4)}
        checked("block_sparse_attn_bwd", **with_forward("block_sparse_attn_bwd", args))

    for dim, shape in itertools.product((64, 128), BLOCK_SPARSE):
        backward(block_sparse_args(*shape, dim))
    args = block_sparse_args(130, 200, 3, 64, batch=2)
    backward({name: swapped(t) if name in "qkv" else t for name, t in args.items()})


def coarse_attn() -> None:
    for dim, (n_q, n_kv) in itertools.product((64, 128), COARSE):
        q, k, v = (swapped(t) for t in make_heads(n_q=n_q, n_kv=n_kv, dim=dim, dtype=BF16))
        checked("coarse_attn_fwd", q=q, k=k, v=v)


def gated_fusion() -> None:
    for (heads, length), dim, gate_dtype in itertools.product(GATED_FUSION, (64, 128), (BF16, torch.float32)):
        rows = random(3, 2, heads, length, dim).to(BF16)
        args = {"fine": strided_copy(rows[0]), "coarse": swapped(rows[1])}
        args["gate"] = random(2, length, heads).to(gate_dtype).mT
        checked("gated_fusion_fwd", **args)
        checked("gated_fusion_bwd", dout=rows[2], **args)


def act_quant() -> None:
    for (rows, columns), dtype in itertools.product(ACT_QUANT, (BF16, torch.float32)):
        for round_scale in (False, True):
            checked("act_quant", x=random(rows, columns).to(dtype), round_scale=round_scale)
    checked("act_quant", x=random(2, 1, 256).expand(2, 3, 256))


def fp8_gemm() -> None:
    for rows, width, columns in FP8_GEMM:
        x, w = (random(n, columns).to(BF16) for n in (rows, width))
        args = dict(zip(("a", "a_s", "b", "b_s"), (*reference.act_quant(x), *reference.prepare_weight(w)), strict=True))
        checked("fp8_gemm", **args)


def mhc_pre_fwd() -> None:
    for batch, length, streams, columns in MHC:
        args = ORDINARY["mhc_pre_fwd"](batch * length, streams, columns)
        args["x"] = args["x"].view(batch, length, streams, columns)
        checked("mhc_pre_fwd", **args)


def mhc() -> None:
    for batch, length, streams, columns in MHC:
        sizes = (batch * length, streams, columns)
        checked("mhc_pre_bwd", **ORDINARY["mhc_pre_bwd"](*sizes))
        checked("mhc_post_fwd", **ORDINARY["mhc_post_fwd"](*sizes))
        checked("mhc_post_bwd", **ORDINARY["mhc_post_bwd"](*sizes), iterations=3)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        sparse_mla_fwd,
        sparse_mla_bwd,
        attn_dist,
        topk_select,
        indexer,
        indexer_candidates,
        indexer_training,
        indexer_packed,
        indexer_loss,
        block_select,
        block_sparse_attn_fwd,
        block_sparse_attn_bwd,
        coarse_attn,
        gated_fusion,
        act_quant,
        fp8_gemm,
        mhc_pre_fwd,
        mhc,
    )
}


# ---- Under the tools


def sanitized(tool: str, part: str, sanitizer: str) -> str | None:
    """Runs a part under a tool; returns the output if the tool or the part reports errors, else None."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, __file__, "--run", part]
    environment = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"did not end in {LIMIT} s"
    return (done.stdout + done.stderr)[-20_000:] if done.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=PARTS, metavar="NAME", help="the calls of this part, in this process")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=f"parts: {', '.join(PARTS)}"
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    default = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    parser.add_argument("--sanitizer", default=default, metavar="PATH")
    args = parser.parse_args()
    if args.run is not None:
        PARTS[args.run]()
        return 0
    if shutil.which(args.sanitizer) is None:
        parser.error(f"no compute-sanitizer at {args.sanitizer}: it is part of the CUDA toolkit, see --sanitizer")
    jobs = [(tool, part) for tool in args.tool for part in args.only if part not in LEFT_OUT[tool]]
    progress, wrong = Progress(len(jobs)), []
    for tool, part in jobs:
        begin = time.monotonic()
        found = sanitized(tool, part, args.sanitizer)
        took = f"{tool} {part}: {time.monotonic() - begin:.0f} s"
        if found is not None:
            wrong.append(f"{tool} {part}")
            print(f"\n{took}, ERRORS\n{found}", flush=True)
        progress.step(took)
    print(f"{len(jobs) - len(wrong)} of {len(jobs)} parts are free of errors" + "".join(f"\n  not {w}" for w in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
