"""Sparse MLA, its gradients, its attention weights, and decoding."""

import itertools
import math
from collections.abc import Iterator

import torch

from dsa_ext.nn.rotary import apply_rope
from dsa_ext.testing.calls import ORDINARY, with_forward
from dsa_ext.testing.inputs import drift_indices, make_cache, make_inputs, spoil_indices, strided_cache, strided_copy
from sanitized.calls import BF16, Args, checked, random

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
# (B, N, blocks, page, H, K, d_qk), batch_invariant: one tile, partial tiles, keys split over CTAs, no key; fp8 keys for
# CTAs with 16, 32 and 64 heads, and for pairs of CTAs.
SPARSE_MLA_DECODE = (
    ((2, 2, 3, 53, 64, 64, 576), True),
    ((1, 3, 5, 64, 128, 200, 512), False),
    ((2, 1, 7, 69, 5, 300, 576), False),
    ((1, 1, 40, 61, 20, 2000, 576), True),
    ((150, 1, 9, 2, 33, 17, 512), False),
    ((8, 2, 5, 64, 64, 200, 576), False),
    ((2, 2, 3, 53, 128, 70, 576), True),
    ((1, 2, 5, 64, 65, 70, 512), True),
    ((5, 2, 5, 64, 100, 200, 576), False),
    ((2, 2, 0, 64, 3, 5, 576), False),
    ((64, 1, 40, 61, 4, 4096, 512), False),
)


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


def sparse_mla_max_fwd() -> None:
    for args in attention_args():
        checked("sparse_mla_max_fwd", **args, inf_if_empty=True)


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
    args = with_forward("sparse_mla_bwd", args)
    checked("sparse_mla_bwd", **args, deterministic=True)
    checked("sparse_mla_bwd", **args)  # sorts the lists


def sparse_mla_bwd_merged() -> None:
    """Few heads, and many slots, of which few are used: lists are merged, except where they repeat a key."""
    for heads, d_qk in ((3, 576), (20, 512)):
        inputs = make_inputs(1, 257, 16000, heads, 1, 1, d_qk)
        indices = drift_indices((1, 257, 1, 1024), 16000, torch.Generator().manual_seed(1))
        indices[:, 200:, :, 1] = indices[:, 200:, :, 0]
        lengths = torch.full((1, 257), 70, dtype=torch.int32)
        args = {"q": inputs.q, "kv": inputs.kv, "indices": indices, "topk_length": lengths, "causal": False}
        args["dout"] = random(1, 257, heads, 512).to(BF16)
        checked("sparse_mla_bwd", **with_forward("sparse_mla_bwd", with_sink(args)))


def sparse_mla_decode() -> None:
    for i, (sizes, batch_invariant) in enumerate(SPARSE_MLA_DECODE):
        batch, tokens, blocks, page, *_ = sizes
        for packed in (True, False):
            inputs = make_cache(*sizes, packed=packed)
            lengths = torch.arange(batch * tokens, dtype=torch.int32).view(batch, tokens) * 9
            args = {"q": strided_copy(inputs.q), "kv_cache": inputs.kv_cache}
            args["indices"] = spoil_indices(inputs.indices, blocks * page)
            checked(
                "sparse_mla_decode", **args, topk_length=lengths if i % 2 else None, batch_invariant=batch_invariant
            )
        args = with_sink({**args, "kv_cache": strided_cache(args["kv_cache"])})
        checked("sparse_mla_decode", **args, inf_if_empty=True)


def pack_kv_fp8() -> None:
    for shape in ((1, 576), (9, 512), (2, 3, 5, 576)):
        checked("pack_kv_fp8", kv=random(*shape).to(BF16))
    checked("pack_kv_fp8", kv=random(2, 1, 576).to(BF16).expand(2, 3, 576))


def rope() -> None:
    for (shape, columns), layout in itertools.product(
        (((2, 3, 5, 64), 64), ((1, 7, 128), 16)), ("half", "interleaved")
    ):
        x = random(*shape).to(BF16)
        positions = torch.arange(shape[1])
        expected = apply_rope(x, positions, columns=columns, layout=layout)
        got = apply_rope(x.cuda(), positions.cuda(), columns=columns, layout=layout)
        assert torch.allclose(got.cpu().float(), expected.float(), rtol=2e-2, atol=2e-2)
