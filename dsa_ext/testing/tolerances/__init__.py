"""Tolerances: how far the results of an operator may be from the reference in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsa_ext import reference
from dsa_ext._public import functions_of
from dsa_ext.ops import OPERATORS
from dsa_ext.testing.tolerances import attention, attention_gradients, indexer, indexer_paged, mixing, sparse_mha
from dsa_ext.testing.tolerances.limits import (
    FP8_SIMILARITY,
    FP32_SIMILARITY,
    SIMILARITY,
    Errors,
    Expected,
    Measure,
    bits,
    exact_measures,
    measures,
    similarity_error,
)

__all__ = [
    "FP8_SIMILARITY",
    "FP32_SIMILARITY",
    "OPS",
    "SIMILARITY",
    "backward_errors",
    "bits",
    "check",
    "check_dist",
    "check_selected",
    "errors",
    "forward_errors",
    "logits_errors",
    "similarity_error",
]

_JUDGED: dict[str, Callable[[dict[str, Any]], list[Expected]]] = {
    op: judge
    for module in (attention, attention_gradients, indexer, indexer_paged, mixing, sparse_mha)
    for op, judge in functions_of(vars(module)).items()
    if op in OPERATORS
}
#: Most logits that are held at a time to recompute the selection of indexer_topk.
_LOGITS = 2**27


def check(op: str, results: tuple[Tensor, ...] | Tensor, args: dict[str, Any]) -> dict[str, float]:
    """Compares the results of torch.ops.dsa.<op>(**args) with the reference in float64.

    Returns:
        The value of each measure as a fraction of its limit, at most 1.

    Raises:
        AssertionError: A value exceeds its limit; the text names the result, the measure, the value and the limit.
    """
    _check_forms(op, (results,) if isinstance(results, Tensor) else tuple(results), _complete(op, args))
    return errors(op, results, args).check()


def errors(op: str, results: tuple[Tensor, ...] | Tensor, args: dict[str, Any]) -> Errors:
    """The measures of check, without comparing them with their limits."""
    args = _complete(op, args)
    got = (results,) if isinstance(results, Tensor) else tuple(results)
    if op in _EXACT:
        return Errors(op, _EXACT[op](got, args))
    pairs = zip(got, _JUDGED[op](args), strict=True)
    return Errors(op, [measure for result, expected in pairs for measure in measures(result, expected)])


def expectations(op: str, args: dict[str, Any]) -> list[Expected]:
    """The expected results and their error bounds, for an operator whose results need not be bitwise equal."""
    return _JUDGED[op](_complete(op, args))


def forward_errors(out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> Errors:
    """The errors of a call of sparse_mla_fwd with these arguments."""
    return errors("sparse_mla_fwd", (out, lse), {"q": q, "kv": kv, "indices": indices, **options})


def backward_errors(
    grads: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    dlse: Tensor | None,
    **options: Any,
) -> Errors:
    """The errors of a call of sparse_mla_bwd with these arguments."""
    args = {"dout": dout, "q": q, "kv": kv, "out": out, "lse": lse, "indices": indices, "dlse": dlse}
    return errors("sparse_mla_bwd", grads, {**args, **options})


def check_dist(dist: Tensor, q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, **options: Any) -> float:
    """Checks the result of a call of attn_dist with these arguments and returns its similarity_error."""
    found = errors("attn_dist", dist, {"q": q, "kv": kv, "indices": indices, "lse": lse, **options})
    found.check()
    return found.similarity


def logits_errors(
    logits: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    k_scale: Tensor | None = None,
) -> Errors:
    """The errors of a call of indexer_logits with these arguments."""
    bounds = {"starts": starts, "ends": ends}
    return errors("indexer_logits", logits, {"q": q, "k": k, "weights": weights, **bounds, "k_scale": k_scale})


def check_selected(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Raises AssertionError unless the indices and values of two selections are bitwise equal."""
    Errors("topk_select", exact_measures(("indices", "values"), got, expected)).check()


def _check_forms(op: str, got: tuple[Tensor, ...], args: dict[str, Any]) -> None:
    """Checks that the number, dtypes and shapes of the results are those of the operator's fake implementation."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fakes = {n: mode.from_tensor(t.detach()) if isinstance(t, Tensor) else t for n, t in args.items()}
        results = getattr(torch.ops.dsa, op)(**fakes)
    results = (results,) if isinstance(results, Tensor) else results
    expected, found = ([f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in x] for x in (results, got))
    if found != expected:
        raise AssertionError(f"the results of {op} must be {', '.join(expected)}, got {', '.join(found)}")


def _complete(op: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments in the order of the operator's schema, with its defaults for those that are missing."""
    if op not in OPS:
        raise ValueError(f"no operator {op!r}; there are {', '.join(OPS)}")
    schema = getattr(torch.ops.dsa, op).default._schema
    unknown = args.keys() - {argument.name for argument in schema.arguments}
    missing = {argument.name for argument in schema.arguments if not argument.has_default_value()} - args.keys()
    if unknown:
        raise ValueError(f"{op} has no arguments {sorted(unknown)}")
    if missing:
        raise ValueError(f"{op} needs the arguments {sorted(missing)}")
    return {a.name: args.get(a.name, a.default_value) for a in schema.arguments}


def _topk_select(got: tuple[Tensor, ...], args: dict[str, Any]) -> list[Measure]:
    return exact_measures(("indices", "values"), got, reference.topk_select(**args))


def _indexer_topk(got: tuple[Tensor, ...], args: dict[str, Any]) -> list[Measure]:
    """Compares the selection with the reference's selection from the operator's own logits, which are checked too."""
    q, k, topk = args["q"], args["k"], args["topk"]
    found: list[Measure] = []
    starts, ends = (args[name] for name in indexer.BOUNDS)
    step = max(1, _LOGITS // max(1, len(k)))
    for begin in range(0, max(1, len(q)), step):
        run = slice(begin, begin + step)
        index = {name: args[name][run] for name in ("q", "weights", *indexer.BOUNDS)}
        index |= {"k": k, "k_scale": args["k_scale"]}
        logits = torch.ops.dsa.indexer_logits(**index)
        expected = reference.topk_select(logits, starts[run], ends[run], topk)
        found += exact_measures(("indices", "values"), [t[run] for t in got], expected)
        found += errors("indexer_logits", logits, index).measures
    return found


def _indexer_topk_paged(got: tuple[Tensor, ...], args: dict[str, Any]) -> list[Measure]:
    """The same as _indexer_topk."""
    table = args["block_table"] if args["return_slots"] else None
    index = {name: value for name, value in args.items() if name not in ("topk", "return_slots")}
    logits = torch.ops.dsa.indexer_logits_paged(**index)
    ends = reference.query_lengths(args["context_lens"], args["q"].shape[1], logits.shape[1]).flatten().int()
    page = args["k_cache"].shape[1]
    expected = reference.topk_select(logits, torch.zeros_like(ends), ends, args["topk"], table, page)
    measured = errors("indexer_logits_paged", logits, index).measures
    return exact_measures(("indices", "values"), got, expected) + measured


def _block_select(got: tuple[Tensor, ...], args: dict[str, Any]) -> list[Measure]:
    expected = reference.block_select(**{**args, "scores": args["scores"].cpu()})
    return exact_measures(("q2k_index", "q2k_num"), got, expected)


def _act_quant(got: tuple[Tensor, ...], args: dict[str, Any]) -> list[Measure]:
    return exact_measures(("y", "s"), got, reference.act_quant(args["x"].cpu(), args["round_scale"]))


def _pack_kv_fp8(got: tuple[Tensor, ...], args: dict[str, Any]) -> list[Measure]:
    """Compares e4m3, scales and rope part separately: NaN may have any bits."""
    parts = (reference.parts_of_packed(packed) for packed in (got[0], reference.pack_kv_fp8(args["kv"].cpu())))
    return exact_measures(("e4m3", "scales", "rope part"), *parts)


_EXACT = {
    "topk_select": _topk_select,
    "indexer_topk": _indexer_topk,
    "indexer_topk_paged": _indexer_topk_paged,
    "block_select": _block_select,
    "act_quant": _act_quant,
    "pack_kv_fp8": _pack_kv_fp8,
}
#: All operators that `check` supports.
OPS = (*_JUDGED, *_EXACT)
