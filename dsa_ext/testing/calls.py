"""Arguments of an ordinary call of every operator, by the names of its schema. Tests change them as they need."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsa_ext._public import functions_of
from dsa_ext.ops import OPERATORS
from dsa_ext.testing.block_inputs import make_block_inputs, make_heads
from dsa_ext.testing.inputs import make_cache, make_indexer_inputs, make_inputs
from dsa_ext.testing.paged_inputs import make_paged_inputs

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Args = dict[str, Any]


def _normal(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _sparse_mla(heads: int, seq: int, s_kv: int, topk: int, d_qk: int) -> Args:
    inputs = make_inputs(1, seq, s_kv, heads, 1, topk, d_qk)
    return {"q": inputs.q, "kv": inputs.kv, "indices": inputs.indices, "causal": False}


def sparse_mla_fwd(heads: int = 8, seq: int = 3, s_kv: int = 40, topk: int = 24, d_qk: int = 576) -> Args:
    return _sparse_mla(heads, seq, s_kv, topk, d_qk)


def sparse_mla_max_fwd(heads: int = 8, seq: int = 3, s_kv: int = 40, topk: int = 24, d_qk: int = 576) -> Args:
    return _sparse_mla(heads, seq, s_kv, topk, d_qk)


def sparse_mla_bwd(heads: int = 8, seq: int = 3, s_kv: int = 40, topk: int = 24, d_qk: int = 576) -> Args:
    args = _sparse_mla(heads, seq, s_kv, topk, d_qk)
    dout = _normal(1, seq, heads, 512).to(BF16)
    return with_forward("sparse_mla_bwd", {**args, "dout": dout, "dlse": _normal(1, seq, heads, seed=6)})


def attn_dist(heads: int = 8, seq: int = 3, s_kv: int = 40, topk: int = 24, d_qk: int = 576) -> Args:
    return with_forward("attn_dist", _sparse_mla(heads, seq, s_kv, topk, d_qk))


def _sparse_mha(heads: int, seq: int, s_kv: int, topk: int) -> Args:
    q, k, v = (
        _normal(1, n, heads, d, seed=i).to(BF16) for i, (n, d) in enumerate(((seq, 192), (s_kv, 128), (s_kv, 128)))
    )
    indices = make_inputs(1, seq, s_kv, 1, 1, topk, 576).indices[:, :, 0]
    return {"q": q, "k": k, "k_rope": _normal(1, s_kv, 64).to(BF16), "v": v, "indices": indices, "causal": False}


def sparse_mha_fwd(heads: int = 3, seq: int = 5, s_kv: int = 40, topk: int = 24) -> Args:
    return _sparse_mha(heads, seq, s_kv, topk)


def sparse_mha_bwd(heads: int = 3, seq: int = 5, s_kv: int = 40, topk: int = 24) -> Args:
    args = _sparse_mha(heads, seq, s_kv, topk)
    dout = _normal(1, seq, heads, 128).to(BF16)
    return with_forward("sparse_mha_bwd", {**args, "dout": dout, "dlse": _normal(1, seq, heads, seed=6)})


def sparse_mha_dist(heads: int = 3, seq: int = 5, s_kv: int = 40, topk: int = 24) -> Args:
    args = _sparse_mha(heads, seq, s_kv, topk)
    del args["v"]
    return with_forward("sparse_mha_dist", args)


def pack_kv_fp8(rows: int = 7, d_qk: int = 576) -> Args:
    return {"kv": _normal(rows, d_qk).to(BF16)}


def sparse_mla_decode(
    heads: int = 8, tokens: int = 3, page: int = 10, topk: int = 24, d_qk: int = 576, packed: bool = True
) -> Args:
    inputs = make_cache(2, tokens, 4, page, heads, topk, d_qk, packed=packed)
    return {"q": inputs.q, "kv_cache": inputs.kv_cache, "indices": inputs.indices}


def _block_sparse(dim: int, n_q: int, n_kv: int) -> Args:
    return vars(make_block_inputs(n_q=n_q, n_kv=n_kv, dim=dim, dtype=BF16))


def block_sparse_attn_fwd(dim: int = 64, n_q: int = 100, n_kv: int = 200) -> Args:
    return _block_sparse(dim, n_q, n_kv)


def block_sparse_attn_bwd(dim: int = 64, n_q: int = 100, n_kv: int = 200) -> Args:
    args = _block_sparse(dim, n_q, n_kv)
    dlse = _normal(*args["q"].shape[:3], seed=6)
    return with_forward("block_sparse_attn_bwd", {**args, "dout": _normal(*args["q"].shape).to(BF16), "dlse": dlse})


def coarse_attn_fwd(dim: int = 64, n_q: int = 100, n_kv: int = 70) -> Args:
    return dict(zip("qkv", make_heads(n_q=n_q, n_kv=n_kv, dim=dim, dtype=BF16), strict=True))


def gated_fusion_fwd(dim: int = 64) -> Args:
    fine, coarse = (_normal(2, 3, 20, dim, seed=seed).to(BF16) for seed in range(2))
    return {"fine": fine, "coarse": coarse, "gate": 4 * _normal(2, 3, 20)}


def gated_fusion_bwd(dim: int = 64) -> Args:
    return {"dout": _normal(2, 3, 20, dim).to(BF16), **gated_fusion_fwd(dim)}


def _indexer(dtype: torch.dtype, seq: int, s_kv: int, heads: int, dim: int) -> Args:
    inputs = make_indexer_inputs(seq, s_kv, heads, dim, dtype=dtype)
    args = {"q": inputs.q, "k": inputs.k, "weights": inputs.weights}
    args |= {"starts": inputs.ks, "ends": inputs.ke}
    return args if inputs.k_scale is None else {**args, "k_scale": inputs.k_scale}


def indexer_logits(dtype: torch.dtype = BF16, seq: int = 9, s_kv: int = 70, heads: int = 8, dim: int = 64) -> Args:
    return _indexer(dtype, seq, s_kv, heads, dim)


def indexer_topk(dtype: torch.dtype = BF16, seq: int = 9, s_kv: int = 70, heads: int = 8, dim: int = 64) -> Args:
    return {**_indexer(dtype, seq, s_kv, heads, dim), "topk": 16}


def indexer_logits_bwd(seq: int = 9, s_kv: int = 70, heads: int = 8, dim: int = 64) -> Args:
    return {"dlogits": _normal(seq, s_kv), **_indexer(BF16, seq, s_kv, heads, dim)}


def indexer_scores(seq: int = 9, s_kv: int = 70, heads: int = 8, dim: int = 64, slots: int = 30) -> Args:
    args = _indexer(BF16, seq, s_kv, heads, dim)
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(-2, s_kv + 2, (seq, slots), generator=generator, dtype=torch.int32)
    return {**{name: args[name] for name in ("q", "k", "weights")}, "indices": indices}


def indexer_scores_bwd(seq: int = 9, s_kv: int = 70, heads: int = 8, dim: int = 64, slots: int = 30) -> Args:
    return {"dscores": _normal(seq, slots), **indexer_scores(seq, s_kv, heads, dim, slots)}


def indexer_loss(rows: int = 9, slots: int = 50) -> Args:
    p = _normal(rows, slots, seed=6).exp()
    return {"scores": _normal(rows, slots), "p": p, "row_weights": _normal(rows, seed=7).abs()}


def indexer_dense_loss(seq: int = 9, s_kv: int = 20, heads: int = 8, dim: int = 64) -> Args:
    index = _indexer(BF16, seq, s_kv, heads, dim)
    main_q, main_kv = _normal(seq, 16, 576).to(BF16), _normal(s_kv, 576, seed=6).to(BF16)
    args = {name: index[name] for name in ("q", "k", "weights")} | {"main_q": main_q, "main_kv": main_kv}
    return with_forward("indexer_dense_loss", {**args, "q_start": s_kv - seq, "gradients": True})


def topk_select(rows: int = 9, columns: int = 72) -> Args:
    ends = torch.full((rows,), columns, dtype=torch.int32)
    return {"logits": _normal(rows, columns), "starts": torch.zeros_like(ends), "ends": ends, "topk": 16}


def indexer_logits_paged(dtype: torch.dtype = BF16, keys: int = 150, heads: int = 8, dim: int = 64) -> Args:
    args = vars(make_paged_inputs(3, 2, keys, heads, dim, dtype=dtype))
    lengths = torch.tensor([keys, keys // 2, 1], dtype=torch.int32)
    return {**args, "context_lens": lengths, "max_len": keys + 20}


def indexer_topk_paged(dtype: torch.dtype = BF16, keys: int = 150, heads: int = 8, dim: int = 64) -> Args:
    args = indexer_logits_paged(dtype, keys, heads, dim)
    del args["max_len"]
    return {**args, "topk": 16}


def block_select() -> Args:
    return {"scores": _normal(1, 2, 5, 40).abs()}


def act_quant() -> Args:
    return {"x": _normal(7, 256).to(BF16)}


def fp8_gemm(rows: int = 9, width: int = 200, columns: int = 512) -> Args:
    a, b = _normal(rows, columns).to(FP8), _normal(width, columns, seed=6).to(FP8)
    a_s = _normal(columns // 128, rows).abs().mT
    return {"a": a, "a_s": a_s, "b": b, "b_s": _normal(-(-width // 128), columns // 128, seed=7).abs()}


def mhc_pre_fwd(tokens: int = 5, streams: int = 4, columns: int = 128) -> Args:
    mixed, flat = streams * streams + 2 * streams, streams * columns
    return {
        "x": _normal(1, tokens, streams, columns).to(BF16),
        "phi": _normal(mixed, flat) / flat**0.5,
        "alpha": torch.tensor([1.5, -0.7, 2.0]),
        "bias": _normal(mixed),
        "gamma": 1 + _normal(flat) / 4,
    }


def mhc_pre_bwd(tokens: int = 5, streams: int = 4, columns: int = 128) -> Args:
    return with_forward("mhc_pre_bwd", mhc_pre_fwd(tokens, streams, columns))


def mhc_post_fwd(tokens: int = 5, streams: int = 4, columns: int = 128) -> Args:
    return {
        "x": _normal(1, tokens, streams, columns).to(BF16),
        "y": _normal(1, tokens, columns, seed=6).to(BF16),
        "h_post": 2 * _normal(1, tokens, streams).sigmoid(),
        "h_res": 2 * _normal(1, tokens, streams, streams),
    }


def mhc_post_bwd(tokens: int = 5, streams: int = 4, columns: int = 128) -> Args:
    return {"dout": _normal(1, tokens, streams, columns, seed=8).to(BF16), **mhc_post_fwd(tokens, streams, columns)}


#: For an operator that takes results of a forward: that forward, and the arguments' names in the order of its results;
#: None for a result that is not taken.
_SAVED = {
    "sparse_mla_bwd": ("sparse_mla_fwd", ("out", "lse")),
    "attn_dist": ("sparse_mla_fwd", (None, "lse")),
    "sparse_mha_bwd": ("sparse_mha_fwd", ("out", "lse")),
    "sparse_mha_dist": ("sparse_mha_fwd", (None, "lse")),
    "block_sparse_attn_bwd": ("block_sparse_attn_fwd", ("out", "lse")),
    "mhc_pre_bwd": ("mhc_pre_fwd", (None, "h_post", None, "inv_rms", "h_mix", "h_pre")),
}


def with_forward(op: str, args: Args) -> Args:
    """The arguments of an operator; those that are results of another operator are computed from the others."""
    if op == "indexer_dense_loss":
        main_q, main_kv = args["main_q"], args["main_kv"]
        ids = torch.arange(len(main_kv), dtype=torch.int32, device=main_q.device).expand(1, len(main_q), 1, -1)
        call = {"q": main_q[None], "kv": main_kv[None, :, None], "indices": ids.contiguous()}
        options = {name: args[name] for name in ("sm_scale", "q_start") if name in args}
        return {**args, "lse": torch.ops.dsa.sparse_mla_fwd(**call, **options)[1][0]}
    if op not in _SAVED:
        return args
    forward, names = _SAVED[op]
    if op == "mhc_pre_bwd":  # which takes no bias itself
        args = {"bias": args["phi"].new_zeros(len(args["phi"])), **args}
    known = {argument.name for argument in getattr(torch.ops.dsa, forward).default._schema.arguments}
    given = {"v": args["k"], **args} if op == "sparse_mha_dist" else args  # which takes no values itself
    results = getattr(torch.ops.dsa, forward)(**{name: given[name] for name in given.keys() & known})
    saved = {name: result for name, result in zip(names, results, strict=True) if name is not None}
    if op != "mhc_pre_bwd":
        return {**args, **saved}
    upstream = {}
    for name, result, seed in zip(("dh_in", "dh_post", "dh_res"), results, (1, 2, 3), strict=False):
        upstream[name] = args.get(name, _normal(*result.shape, seed=seed).to(result))
    kept = {name: value for name, value in args.items() if name != "bias"}
    return {**upstream, **kept, **saved}


#: The functions above by operator. All their parameters have defaults.
ORDINARY: dict[str, Callable[..., Args]] = {op: make for op, make in functions_of(globals()).items() if op in OPERATORS}
