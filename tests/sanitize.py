"""Small calls of every variant of the kernels, for compute-sanitizer. Exits with an error on a wrong result.

compute-sanitizer --tool memcheck python tests/sanitize.py [--only NAME ..] [--without NAME ..]

Names are those of checks, such as sparse_mla. racecheck knows barriers alone: to it the words that CTAs of mhc_pre_fwd
send each other, and read until they have come, are races.
"""

import argparse
import itertools
import math

import torch
from torch import Tensor

import dsa_ext
from dsa_ext import reference
from dsa_ext.testing.block_inputs import make_block_inputs, make_heads
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
from dsa_ext.testing.tolerances import (
    SIMILARITY,
    backward_errors,
    check_dist,
    check_selected,
    forward_errors,
    logits_errors,
    similarity_error,
)

# (S, S_kv, H, G, K, Dqk): one tile, several tiles, partial heads, groups, keys split over CTAs, nothing to see, several
# queries a CTA.
SPARSE_MLA = (
    (3, 100, 64, 1, 64, 576),
    (3, 100, 128, 1, 200, 512),
    (2, 100, 3, 1, 70, 576),
    (2, 100, 16, 1, 130, 512),
    (2, 100, 34, 2, 65, 576),
    (1, 600, 17, 1, 520, 576),
    (2, 0, 65, 1, 5, 576),
    (300, 200, 100, 1, 129, 576),
)
# (R, C, K): one column, all selected, candidates that are cut, rows cut in two and in eight.
TOPK_SELECT = ((3, 1, 5), (3, 300, 4096), (2, 13001, 2048), (2, 17004, 100), (1, 70001, 2048))
# (S, S_kv, K): one of each, all selected, several blocks of queries, many keys. Every variant takes one of them.
INDEXER = ((1, 1, 1), (5, 200, 300), (130, 300, 64), (3, 9000, 500))

# (B, H, Mq, Mkv): no block, rows of one warp, of two, of many.
BLOCK_SPARSE = ((1, 1, 1), (300, 500, 5), (64, 4000, 63))  # queries, keys, slots
COARSE = ((1, 1), (300, 150), (9000, 100))  # queries, keys
BLOCK_SELECT = ((1, 1, 2, 0), (1, 2, 3, 364), (2, 1, 2, 700), (1, 1, 2, 16384))

# (H, N): one row, a part of a CTA's, several CTAs.
GATED_FUSION = ((1, 1), (3, 7), (3, 50))
# (M, N): one block, parts of a CTA's rows and columns, several CTAs.
ACT_QUANT = ((1, 128), (9, 1152), (17, 2176))
# (M, N, K): one row, every number of rows, clusters, tiles in turn, several calls of the kernel.
FP8_GEMM = ((1, 1, 128), (9, 200, 640), (30, 64, 2176), (64, 8500, 256), (70, 72, 384))
# (B, S, n, D): one token, clusters of 2 to 16 CTAs, tiles in turn.
MHC = ((1, 1, 2, 128), (1, 40, 4, 640), (2, 9, 4, 1920), (1, 17, 4, 3968), (1, 1100, 4, 128))

# (S, S_kv, K): one slot, several tiles, several queries a CTA.
INDEXER_TRAINING = ((1, 1, 1), (5, 200, 300), (300, 500, 129))


def sparse_mla(seq: int, s_kv: int, heads: int, groups: int, topk: int, d_qk: int) -> None:
    inputs = make_inputs(2, seq, s_kv, heads, groups, topk, d_qk, device="cuda")
    q, kv = strided_copy(inputs.q, swap_leading=True), strided_copy(inputs.kv)
    indices = spoil_indices(inputs.indices, s_kv)
    lengths = torch.full((2, seq), topk, dtype=torch.int32, device="cuda")
    lengths[0, 0] = 0
    sink = torch.linspace(-1, 1, heads, device="cuda")
    sink[0] = math.inf
    for options in (
        {"causal": False},
        {"q_start": 50, "kv_stride": 2, "topk_length": lengths, "attn_sink": sink},
    ):
        out, lse = dsa_ext.sparse_mla(q, kv, indices, return_lse=True, **options)
        forward_errors(out, lse, q, kv, indices, **options).check()
        plain = {name: value for name, value in options.items() if name != "attn_sink"}
        for kind in ({}, {"normalize": True}, {"per_head_block": True}):
            check_dist(dsa_ext.attn_dist(q, kv, indices, lse, **plain, **kind), q, kv, indices, lse, **plain, **kind)
        for deterministic in (False, True):
            grads = torch.ops.dsa.sparse_mla_bwd(
                out, q, kv, out, lse, indices, **options, dlse=lse.clamp(min=0), deterministic=deterministic
            )
            backward_errors(grads, out, q, kv, out, lse, indices, lse.clamp(min=0), **options).check()


def topk_select(rows: int, columns: int, topk: int) -> None:
    nasty = nasty_rows(columns, device="cuda")
    starts = torch.tensor([3, 0, INT32_MIN], dtype=torch.int32, device="cuda")[:rows]
    ends = torch.tensor([columns, columns - 5, INT32_MAX], dtype=torch.int32, device="cuda")[:rows]
    for names in (("normal", "plateau of zeros", "NaN"), ("ascending", "one fp16 bucket", "infinities")):
        logits = torch.stack([nasty[name] for name in names[:rows]])
        for dtype in (torch.float32, torch.bfloat16):
            args = (strided_rows(logits.to(dtype)), starts, ends, topk)
            check_selected(dsa_ext.topk_select(*args), reference.topk_select(*args))


def indexer(seq: int, s_kv: int, topk: int) -> None:
    dtypes = (torch.float8_e4m3fn, torch.bfloat16)
    first = INDEXER.index((seq, s_kv, topk))
    for i, (dtype, heads, dim) in enumerate(itertools.product(dtypes, (8, 16, 32, 64), (64, 128))):
        if (i + i // 4) % len(INDEXER) != first:
            continue
        inputs = make_indexer_inputs(seq, s_kv, heads, dim, dtype=dtype, device="cuda")
        inputs.ks[-1] = 5
        args = (strided_copy(inputs.q), strided_rows(inputs.k), strided_rows(inputs.weights), inputs.ks, inputs.ke)
        k_scale = inputs.k_scale
        logits = dsa_ext.indexer_logits(*args, k_scale=k_scale)
        logits_errors(logits, *args, k_scale).check()
        dsa_ext.indexer_logits(*args, k_scale=k_scale, clean=False)
        expected = reference.topk_select(logits, inputs.ks, inputs.ke, topk)
        check_selected(dsa_ext.indexer_topk(*args, topk, k_scale=k_scale), expected)


def indexer_training(seq: int, s_kv: int, topk: int) -> None:
    for heads, dim in itertools.product((8, 16, 32, 64), (64, 128)):
        inputs = make_indexer_inputs(seq, s_kv, heads, dim, dtype=torch.bfloat16, device="cuda")
        indices = torch.arange(seq * topk, device="cuda", dtype=torch.int32).view(seq, topk) * 7 % (s_kv + 1) - 1
        args = (strided_copy(inputs.q), strided_rows(inputs.k), strided_rows(inputs.weights), strided_rows(indices, -1))
        scores = dsa_ext.indexer_scores(*args)
        expected = reference.indexer_scores(*args)
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
        loss = dsa_ext.indexer_loss(scores, torch.ones_like(scores), valid=indices >= 0, reduction="none")
        torch.testing.assert_close(
            loss, reference.indexer_loss(scores, torch.ones_like(scores))[0], rtol=1e-4, atol=1e-4
        )
        for deterministic in (False, True):
            dscores = scores.masked_fill(indices < 0, torch.nan)
            got = torch.ops.dsa.indexer_scores_bwd(dscores, *args, deterministic)
            check_gradients(got, reference.indexer_scores_bwd(*(t.double() for t in (dscores, *args[:3])), indices))
            dlogits = torch.randn(seq, s_kv, device="cuda")
            got = torch.ops.dsa.indexer_logits_bwd(dlogits, *args[:3], inputs.ks, inputs.ke, deterministic)
            wide = (t.double() for t in (dlogits, *args[:3]))
            check_gradients(got, reference.indexer_logits_bwd(*wide, inputs.ks, inputs.ke))


def block_select(batch: int, heads: int, q_blocks: int, blocks: int) -> None:
    rows = strided_rows(torch.rand(batch * heads * q_blocks, blocks, device="cuda") ** 8, math.inf)
    for dtype, options in itertools.product(
        (torch.float32, torch.bfloat16), ({}, {"mode": "top_tau", "tau": 1.0}, {"mode": "topk", "topk": 9})
    ):
        scores = strided_rows(rows.to(dtype), math.inf).view(batch, heads, q_blocks, blocks)
        got = dsa_ext.block_select(scores, **options)
        expected = dsa_ext.block_select(scores.cpu(), **options)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.cpu(), b), options


def block_sparse_attn(n_q: int, n_kv: int, slots: int) -> None:
    for dim in (64, 128):
        x = make_block_inputs(n_q=n_q, n_kv=n_kv, slots=slots, dim=dim, dtype=torch.bfloat16, device="cuda")
        args = (*(strided_copy(t.transpose(1, 2)).transpose(1, 2) for t in (x.q, x.k, x.v)), *x.lists())
        got, lse = torch.ops.dsa.block_sparse_attn_fwd(*args)
        wide = tuple(t.double() for t in args[:3])
        expected, expected_lse = reference.block_sparse_attn_fwd(*wide, *args[3:])
        assert not expected.any() or similarity_error(got, expected) <= SIMILARITY, similarity_error(got, expected)
        dlse = lse.clamp(min=0)
        grads = torch.ops.dsa.block_sparse_attn_bwd(got, *args[:3], got, lse, *args[3:], dlse=dlse)
        expected_grads = reference.block_sparse_attn_bwd(
            got.double(), *wide, expected, expected_lse, *args[3:], dlse=dlse.double()
        )
        # With one key, dq is what rounding leaves of 0.
        pairs = [(a, b) for a, b in zip(grads, expected_grads, strict=True) if bool((b.abs() > 1e-6).any())]
        check_gradients(*(tuple(side) for side in zip(*pairs, strict=True)))


def coarse_attn(n_q: int, n_kv: int) -> None:
    for dim in (64, 128):
        heads = make_heads(n_q=n_q, n_kv=n_kv, dim=dim, dtype=torch.bfloat16, device="cuda")
        args = [strided_copy(t.transpose(1, 2)).transpose(1, 2) for t in heads]
        out, lse, scores = torch.ops.dsa.coarse_attn_fwd(*args)
        expected, *sums = reference.coarse_attn_fwd(*(t.double() for t in args))
        assert similarity_error(out, expected) <= SIMILARITY, similarity_error(out, expected)
        torch.testing.assert_close([lse.double(), scores.double()], sums, rtol=1e-4, atol=1e-5)


def gated_fusion(heads: int, length: int) -> None:
    for dim, gate_dtype in itertools.product((64, 128), (torch.bfloat16, torch.float32)):
        rows = torch.randn(3, 2, heads, length, dim, device="cuda").bfloat16()
        dout, fine, coarse = rows[0], strided_copy(rows[1]), rows[2].transpose(1, 2).contiguous().transpose(1, 2)
        gate = torch.randn(2, length, heads, device="cuda").to(gate_dtype).mT
        got = torch.ops.dsa.gated_fusion_fwd(fine, coarse, gate)
        wide = [t.double() for t in (fine, coarse, gate)]
        expected = reference.gated_fusion_fwd(*wide)
        assert similarity_error(got, expected) <= SIMILARITY, similarity_error(got, expected)
        gradients = torch.ops.dsa.gated_fusion_bwd(dout, fine, coarse, gate)
        check_gradients(gradients, reference.gated_fusion_bwd(dout.double(), *wide))


def act_quant(rows: int, columns: int) -> None:
    for dtype, round_scale in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        got, expected = dsa_ext.act_quant(x, round_scale=round_scale), reference.act_quant(x.cpu(), round_scale)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.cpu().float(), b.float())


def fp8_gemm(rows: int, width: int, columns: int) -> None:
    x, w = (torch.randn(n, columns, device="cuda").bfloat16() for n in (rows, width))
    args = (*dsa_ext.act_quant(x), *dsa_ext.prepare_weight(w))
    assert similarity_error(dsa_ext.fp8_gemm(*args), reference.fp8_gemm(*args)) <= 2 * SIMILARITY


def make_streams(batch: int, length: int, streams: int, columns: int) -> tuple[Tensor, ...]:
    """x, phi, alpha, bias, gamma"""
    mixed, flat = streams * streams + 2 * streams, streams * columns
    sizes = ((batch, length, streams, columns), (mixed, flat), (3,), (mixed,), (flat,))
    x, phi, alpha, bias, gamma = (torch.randn(*size, device="cuda") for size in sizes)
    return x.bfloat16(), phi / flat**0.5, alpha, bias, 1 + gamma / 4


def mhc_pre_fwd(batch: int, length: int, streams: int, columns: int) -> None:
    args = make_streams(batch, length, streams, columns)
    check_gradients(torch.ops.dsa.mhc_pre_fwd(*args), reference.mhc_pre_fwd(*(t.double() for t in args)))


def mhc(batch: int, length: int, streams: int, columns: int) -> None:
    x, phi, alpha, bias, gamma = make_streams(batch, length, streams, columns)
    y, h_post, h_res, *saved = reference.mhc_pre_fwd(x, phi, alpha, bias, gamma)
    upstream = (y, torch.randn_like(h_post), torch.randn_like(h_res))
    args = (*upstream, x, phi, alpha, gamma, h_post, *saved)
    check_gradients(torch.ops.dsa.mhc_pre_bwd(*args), reference.mhc_pre_bwd(*(t.double() for t in args)))
    args = (x, y, h_post, h_res)
    out, expected = torch.ops.dsa.mhc_post(*args), reference.mhc_post(*(t.double() for t in args))
    # With one round: of weights that have converged the gradient is what rounding leaves.
    gradients = torch.ops.dsa.mhc_post_bwd(x, *args, 1)
    expected_gradients = reference.mhc_post_bwd(x.double(), *(t.double() for t in args), 1)
    check_gradients((out, *gradients), (expected, *expected_gradients))


def check_gradients(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        # With a single key and query there is nothing over which roundings, three of bf16, would average out.
        assert similarity_error(a, b) <= 4 * SIMILARITY, (a.shape, similarity_error(a, b))


def main() -> None:
    checks = (
        (sparse_mla, SPARSE_MLA),
        (topk_select, TOPK_SELECT),
        (indexer, INDEXER),
        (indexer_training, INDEXER_TRAINING),
        (block_select, BLOCK_SELECT),
        (block_sparse_attn, BLOCK_SPARSE),
        (coarse_attn, COARSE),
        (gated_fusion, GATED_FUSION),
        (act_quant, ACT_QUANT),
        (fp8_gemm, FP8_GEMM),
        (mhc_pre_fwd, MHC),
        (mhc, MHC),
    )
    by_name = {check.__name__: (check, cases) for check, cases in checks}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    parser.add_argument("--without", nargs="+", choices=by_name, default=[], metavar="NAME")
    args = parser.parse_args()
    for check, cases in (by_name[name] for name in args.only if name not in args.without):
        for case in cases:
            check(*case)
            print(f"{check.__name__} {case}: correct")


if __name__ == "__main__":
    main()
