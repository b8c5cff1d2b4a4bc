"""Calls of every operator with numbers of every magnitude, and with NaN and Inf in every argument."""

from collections.abc import Iterator
from typing import Any

import torch
from magnitudes_case import POISONS, Case, filled
from magnitudes_hidden import HIDDEN
from torch import Tensor

import dsa_ext  # noqa: F401
from dsa_ext.testing.calls import FP8, ORDINARY, Args, with_forward
from dsa_ext.testing.inputs import INT32_MAX
from dsa_ext.testing.tolerances import check

SIZES = (1e-40, 1e-30, 1e-10, 1e4, 1e10, 1e18, 3e38)
#: For each operator that with_forward knows, the arguments that it computes.
COMPUTED = {
    "sparse_mla_bwd": {"out", "lse"},
    "attn_dist": {"lse"},
    "sparse_mha_bwd": {"out", "lse"},
    "sparse_mha_dist": {"lse"},
    "block_sparse_attn_bwd": {"out", "lse"},
    "indexer_dense_loss": {"lse"},
    "mhc_pre_bwd": {"h_post", "inv_rms", "h_mix", "h_pre"},
}
_SPARSE_MLA = [{"heads": 64}, {"heads": 128, "d_qk": 512}, {"heads": 33}, {"seq": 1, "s_kv": 3000, "topk": 2048}]
#: Sizes other than those of ORDINARY, for which other kernels or other code paths run.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sparse_mla_fwd": _SPARSE_MLA,
    "sparse_mla_bwd": _SPARSE_MLA,
    "attn_dist": [{"heads": 64}, {"heads": 128, "d_qk": 512}, {"heads": 33}, {"heads": 1}],
    "sparse_mha_fwd": [{"seq": 200, "s_kv": 300}, {"heads": 1, "seq": 1, "s_kv": 1, "topk": 1}],
    "sparse_mha_bwd": [{"seq": 200, "s_kv": 300}, {"heads": 1, "seq": 1, "s_kv": 1, "topk": 1}],
    "sparse_mha_dist": [{"seq": 200, "s_kv": 300}, {"heads": 1, "seq": 1, "s_kv": 1, "topk": 1}],
    "sparse_mla_decode": [
        {"heads": 64},
        {"heads": 128, "d_qk": 512},
        {"heads": 33, "packed": False},
        {"tokens": 1, "page": 600, "topk": 2048, "packed": False},
        {"tokens": 1, "page": 600, "topk": 2048},
    ],
    "pack_kv_fp8": [{"d_qk": 512}],
    "block_sparse_attn_fwd": [{"dim": 128}, {"dim": 128, "n_q": 64, "n_kv": 4000}, {"n_q": 2000, "n_kv": 1000}],
    "block_sparse_attn_bwd": [{"dim": 128}, {"dim": 128, "n_q": 64, "n_kv": 4000}, {"n_q": 2000, "n_kv": 1000}],
    "coarse_attn_fwd": [{"dim": 128}, {"dim": 128, "n_q": 64, "n_kv": 900}, {"n_q": 6000, "n_kv": 300}],
    "gated_fusion_fwd": [{"dim": 128}],
    "gated_fusion_bwd": [{"dim": 128}],
    "indexer_logits": [{"dtype": FP8}, {"heads": 64, "dim": 128}, {"dtype": FP8, "heads": 64, "dim": 128, "seq": 70}],
    "indexer_topk": [{"dtype": FP8}, {"heads": 64, "dim": 128}, {"dtype": FP8, "heads": 64, "dim": 128, "s_kv": 9000}],
    "indexer_logits_paged": [{"dtype": FP8}, {"heads": 64, "dim": 128}, {"dtype": FP8, "heads": 64, "dim": 128}],
    "indexer_topk_paged": [{"dtype": FP8}, {"dtype": FP8, "heads": 64, "dim": 128, "keys": 9000}],
    "indexer_logits_bwd": [{"heads": 64, "dim": 128, "seq": 70, "s_kv": 300}],
    "indexer_scores": [{"heads": 64, "dim": 128, "s_kv": 300, "slots": 200}],
    "indexer_scores_bwd": [{"heads": 64, "dim": 128, "s_kv": 300, "slots": 200}],
    "indexer_loss": [{"slots": 3000}, {"slots": 20000}],
    "indexer_dense_loss": [{"heads": 64, "dim": 128, "s_kv": 70}],
    "topk_select": [{"columns": 40000}],
    "fp8_gemm": [{"rows": 70}, {"rows": 300}],
    "mhc_pre_fwd": [{"streams": 2}, {"columns": 1280, "tokens": 70}],
    "mhc_pre_bwd": [{"streams": 2}, {"columns": 1280, "tokens": 70}],
    "mhc_post_fwd": [{"streams": 2}, {"columns": 1280, "tokens": 70}],
    "mhc_post_bwd": [{"streams": 2}, {"columns": 1280, "tokens": 70}],
}


def sized(x: Tensor, size: float) -> Tensor:
    """x * size, with infinities made the largest number of that sign."""
    largest = torch.finfo(x.dtype).max
    return (x.double() * size).clamp(-largest, largest).to(x.dtype)


def floats(op: str, args: Args) -> dict[str, Tensor]:
    """The floating-point arguments whose values a caller chooses."""
    return {
        name: value
        for name, value in args.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name not in COMPUTED.get(op, ())
    }


# ---- sizes


def sizes(op: str, args: Args) -> Iterator[Case]:
    given = floats(op, args)
    yield Case("ordinary", args)
    for size in SIZES:
        for name, x in given.items():
            if x.dtype != FP8:
                yield Case(f"{name} of {size:.0e}", {**args, name: sized(x, size)})
        scaled = {name: sized(x, size) for name, x in given.items() if x.dtype != FP8}
        yield Case(f"all of {size:.0e}", {**args, **scaled})
        some = {name: x for name, x in scaled.items() if name in ("q", "k", "kv")}
        if some:
            yield Case(f"{' and '.join(some)} of {size:.0e}", {**args, **some})
    for name, x in given.items():
        if x.dtype == FP8:
            yield Case(f"{name} of 448", {**args, name: sized(x, 1e6)})
            yield Case(f"{name} of 2^-9", {**args, name: sized(x, 2.0**-9)})
        yield Case(f"{name} of zeros", {**args, name: torch.zeros_like(x)})
        if x.shape[0] and x.dtype != FP8:
            for size in (1e4, 1e18):
                large = x.flatten(0, -2) if x.dim() > 1 else x[:, None]
                factors = torch.ones(len(large), 1, dtype=torch.float64)
                factors[len(large) // 2 :: 7] = size
                outliers = sized((large.double() * factors).view_as(x).clamp(-3e38, 3e38), 1).to(x.dtype)
                yield Case(f"some rows of {name} of {size:.0e}", {**args, name: outliers})


def scales(args: Args) -> Iterator[Case]:
    for scale in (0.0, 1e-40, 1e-30, -1e-3, -1.0, 30.0, 1e4, -1e4, 1e8, 1e10, 1e18, 1e30):
        yield Case(f"sm_scale {scale:.0e}", {**args, "sm_scale": scale})


def keys_of(args: Args) -> tuple[str, Tensor]:
    name = "kv" if "kv" in args else "k"
    return name, args[name]


def attention_sizes(args: Args) -> Iterator[Case]:
    """Scores that are large or equal, and scores that are sums of large terms that cancel."""
    name, keys = keys_of(args)
    q = args["q"]
    row = int(args["indices"][0, 0].flatten()[0]) if "indices" in args else 1
    by_position = "indices" in args  # keys [B, T, heads, D], else [B, H, T, D]
    place = (slice(None), row) if by_position else (slice(None), slice(None), row)
    for size in (30.0, 1e3, 2e4, 1e6, 1e9, 1e15):
        one_huge = keys.clone()
        one_huge[place] = sized(keys[place], size)
        yield Case(f"one key of {size:.0e}", {**args, name: one_huge})
        equal = keys[place].unsqueeze(1 if by_position else 2).expand_as(keys).contiguous()
        yield Case(f"equal keys of {size:.0e}", {**args, name: sized(equal, size), "q": sized(q, size)})
        yield Case(f"q and {name} of {size:.0e}", {**args, name: sized(keys, size), "q": sized(q, size)})
        cancelling, turned = sized(keys, size), sized(q, size)
        cancelling[..., 1::2] = -cancelling[..., ::2]
        turned[..., 1::2] = turned[..., ::2]
        yield Case(f"products of {size**2:.0e} that cancel", {**args, name: cancelling, "q": turned})
        # All scores have the same sign and grow from key to key.
        ramp = torch.linspace(0.1, 3, keys.shape[1 if by_position else 2]).view(-1, 1, 1) * size
        ramp = (ramp if by_position else ramp[..., 0]).to(keys.dtype).expand_as(keys).contiguous()
        for sign in (1, -1):
            same_sign = {"q": sign * q.abs(), name: ramp}
            yield Case(f"scores of {sign * size:.0e} that grow", {**args, **same_sign})
    if "v" in args:
        yield Case(
            "values of 1e30, scores that grow",
            {**args, "q": q.abs(), "k": ramp_of(keys, 1 if by_position else 2), "v": sized(args["v"], 1e30)},
        )
    if "q2k_index" in args:
        for scale in (2.0**20, 2.0**28, 2.0**31, 2.0**40):
            yield Case(f"sm_scale {scale:.0e}", {**args, "sm_scale": scale})


def ramp_of(keys: Tensor, dim: int) -> Tensor:
    ramp = torch.linspace(0.1, 30, keys.shape[dim]).view(-1, *(1,) * (keys.dim() - 1 - dim))
    return ramp.to(keys.dtype).expand_as(keys).contiguous()


# ---- NaN and Inf in elements that are read


def poisons(op: str, args: Args) -> Iterator[Case]:
    """NaN or Inf in one element, in one row, everywhere: results have NaN and Inf exactly where the reference has."""
    for name, x in floats(op, args).items():
        middle = tuple(size // 2 for size in x.shape)
        places = {"one element": middle, "one row": middle[:-1] if x.dim() > 1 else middle, "all": ...}
        for value in POISONS[:1] if x.dtype == FP8 else POISONS:
            for where, place in places.items():
                yield Case(f"{value} in {name}, {where}", {**args, name: filled(x, place, value)})


def attention_poisons(args: Args) -> Iterator[Case]:
    """Cases of sparse MLA only: columns of a key that its value lacks, and queries whose only key is not finite."""
    kv, indices, q = (args[name] for name in ("kv", "indices", "q"))
    one = torch.full_like(indices, -1)
    one[..., 0] = indices[..., 0]
    seen = int(indices[0, 1, 0, 0])
    for value in POISONS:
        if kv.shape[3] > 512:
            for columns in (slice(512, 513), slice(575, 576), slice(512, 576)):
                spoiled = filled(kv, (0, seen, slice(None), columns), value)
                yield Case(f"{value} in columns {columns.start} to {columns.stop} of a key", {**args, "kv": spoiled})
        spoiled = filled(kv, (0, int(one[0, 1, 0, 0])), value)
        yield Case(f"{value} in a query's only key", {**args, "kv": spoiled, "indices": one})
        yield Case(f"a query of {value}", {**args, "q": filled(q, (0, 1), value)})
        yield Case(f"a head's query of {value}", {**args, "q": filled(q, (0, 1, q.shape[2] // 2), value)})


# ---- all


def cases(op: str, variants: bool = True) -> Iterator[Case]:
    """All cases, always in the same order; without `variants` only those of the smallest sizes."""
    schema = {argument.name for argument in getattr(torch.ops.dsa, op).default._schema.arguments}
    for sizes_of_variant in [{}, *(VARIANTS.get(op, []) if variants else [])]:
        label = ", ".join(f"{name}={value}" for name, value in sizes_of_variant.items())
        args = ORDINARY[op](**sizes_of_variant)
        if "deterministic" in schema:
            args["deterministic"] = True
        found = [sizes(op, args), poisons(op, args)]
        if "sm_scale" in schema:
            found.append(scales(args))
        if "sm_scale" in schema and op not in ("indexer_dense_loss", "sparse_mla_decode"):
            found.append(attention_sizes(args))
        if "indices" in args and "kv" in args and args["indices"].shape[1] > 1:
            found.append(attention_poisons(args))
        if op in HIDDEN:
            found.append(HIDDEN[op](args))
        for case in (case for group in found for case in group):
            case.name = f"{label}: {case.name}" if label else case.name
            yield case


def poison_memory(device: str) -> None:
    """Fills the free memory of the allocator with bits that are NaN in every dtype, and an invalid id."""
    if device == "cuda":
        blocks = [torch.full((2**17,), INT32_MAX, dtype=torch.int32, device=device) for _ in range(64)]
        blocks.append(torch.full((2**24,), INT32_MAX, dtype=torch.int32, device=device))


def results_of(op: str, args: Args, device: str) -> tuple[tuple[Tensor, ...], Args]:
    args = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in args.items()}
    args = with_forward(op, args)
    poison_memory(device)
    results = getattr(torch.ops.dsa, op)(**args)
    return (results,) if isinstance(results, Tensor) else results, args


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(*(t.cpu().reshape(-1).view(torch.uint8) for t in (a, b)))


def run(op: str, case: Case, device: str) -> float:
    """The largest error, as a fraction of its limit."""
    results, args = results_of(op, case.args, device)
    worst = max(check(op, results, args).values(), default=0.0)
    if case.spreads:
        assert any(bool(r.isnan().any()) for r in results if r.is_floating_point()), "NaN that is seen has no effect"
    if case.hidden is not None:
        poisoned, _ = results_of(op, case.hidden, device)
        for i, (a, b) in enumerate(zip(results, poisoned, strict=True)):
            assert same(a, b), f"result {i} depends on elements that must not be read"
    return worst
