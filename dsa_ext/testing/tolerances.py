"""How far a kernel may be from the reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_ext.reference import indexer
from dsa_ext.reference import sparse_mla as reference

#: Of bf16 results: see similarity_error. The rounding of a bf16 result alone makes about 2e-6.
SIMILARITY = 7e-6
#: Of each element, as a fraction of sum_i p_i |v_i|: the rounding of P to bf16 and that of the result.
ELEMENTWISE = 2.0**-7
#: Of lse: max(LSE_ABSOLUTE, LSE_RELATIVE |lse|), plus FP32_RESOLUTION * |sm_scale| * max_i sum_d |q_d k_id| over the
#: row's visible keys: one unit in the last place of the largest value that a partial sum of q.k can take. It matters
#: only where products cancel to an lse near zero, in rows with a few visible keys. Tensor cores truncate each partial
#: sum, so that its rounding errors add up in one direction, beyond LSE_ABSOLUTE; rounding to nearest would stay below.
LSE_ABSOLUTE, LSE_RELATIVE = 1e-6, 3e-5
FP32_RESOLUTION = 2.0**-23


def similarity_error(a: Tensor, b: Tensor) -> float:
    """1 - 2 <a, b> / (|a|^2 + |b|^2) in float64: 0 for equal tensors, sensitive to direction and to scale."""
    a, b = a.double(), b.double()
    norms = (a * a).sum() + (b * b).sum()
    return 0.0 if norms == 0 else float(1 - 2 * (a * b).sum() / norms)


@dataclass
class ForwardErrors:
    """Errors of one call of sparse_mla_fwd against the reference in float64."""

    similarity: float  # limit: SIMILARITY
    elementwise: float  # largest |error| / sum_i p_i |v_i|, limit: ELEMENTWISE
    lse: float  # largest |error| as a fraction of the limit at LSE_ABSOLUTE
    same_specials: bool  # inf and NaN stand in the same places

    def check(self) -> None:
        ok = self.similarity <= SIMILARITY and self.elementwise <= ELEMENTWISE and self.lse <= 1 and self.same_specials
        if not ok:
            raise AssertionError(f"beyond the tolerances of sparse_mla_fwd: {self}")


def forward_errors(out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> ForwardErrors:
    """Compares out and lse of a call with these arguments with the reference in float64."""
    sink = options.get("attn_sink")
    options["attn_sink"] = None if sink is None else sink.double()
    expected, expected_lse = reference.sparse_mla_fwd(q.double(), kv.double(), indices, **options)
    magnitude, score_magnitude = magnitudes(q.double(), kv.double(), indices, expected_lse, **options)

    out, lse = out.double(), lse.double()
    finite, finite_lse = expected.isfinite(), expected_lse.isfinite()
    same_specials = _same_specials(out, expected) and _same_specials(lse, expected_lse)
    error = (out - expected).abs()[finite]
    # 0 / 0 where nothing is visible and the result is 0, as it must be there.
    elementwise = (error / magnitude[finite]).masked_fill(error == 0, 0)
    lse_limit = (LSE_RELATIVE * expected_lse.abs()).clamp(min=LSE_ABSOLUTE) + FP32_RESOLUTION * score_magnitude
    lse_error = (lse - expected_lse).abs() / lse_limit
    return ForwardErrors(
        similarity=similarity_error(out[finite], expected[finite]),
        elementwise=_largest(elementwise),
        lse=_largest(lse_error[finite_lse]),
        same_specials=same_specials,
    )


#: Of the gradients: see similarity_error. dP - delta cancels, and dS is rounded to bf16.
GRADIENT_SIMILARITY = 1e-5


@dataclass
class BackwardErrors:
    """Errors of one call of sparse_mla_bwd against the reference in float64, as similarity_error."""

    dq: float
    dkv: float
    d_sink: float
    finite: bool

    def check(self) -> None:
        if not (self.finite and max(self.dq, self.dkv, self.d_sink) <= GRADIENT_SIMILARITY):
            raise AssertionError(f"beyond the tolerances of sparse_mla_bwd: {self}")


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
) -> BackwardErrors:
    """Compares dq, dkv and d_sink of a call with these arguments with the reference in float64.

    The reference takes the same rounded `out`: where a row has few keys, dP - sum(dout * out) cancels down to the
    rounding of `out`, and no backward can do better than what it is given. With one key it cancels to nothing: dq then
    counts as right where it differs by no more than fp32 resolves of its terms.
    """
    scale = options.get("sm_scale")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    sink = options.get("attn_sink")
    options["attn_sink"] = None if sink is None else sink.double()
    options["dlse"] = None if dlse is None else dlse.double()
    options.pop("d_v", None)
    expected = reference.sparse_mla_bwd(
        dout.double(), q.double(), kv.double(), out.double(), lse.double(), indices, **options
    )
    key, terms = _largest(kv.abs()), dout.shape[3] * _largest(dout.abs()) * _largest(kv.abs())
    resolved = FP32_RESOLUTION * abs(scale) * terms * key
    return BackwardErrors(
        dq=0.0 if _largest((grads[0] - expected[0]).abs()) <= resolved else similarity_error(grads[0], expected[0]),
        dkv=similarity_error(grads[1], expected[1]),
        d_sink=similarity_error(grads[2], expected[2]),
        finite=all(bool(grad.isfinite().all()) for grad in grads),
    )


#: Of attn_dist, over the finite entries: see similarity_error.
DIST_SIMILARITY = 1e-7


def check_dist(
    dist: Tensor, q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, normalize: bool = False, **options: Any
) -> float:
    """Compares the result of a call of attn_dist with the reference in float64; returns similarity_error.

    Fails beyond DIST_SIMILARITY, and where zeros, inf and NaN do not stand in the same places: an entry that float64
    resolves and fp32 does not may be 0.
    """
    expected = reference.attn_dist(q.double(), kv.double(), indices, lse.double(), normalize=normalize, **options)
    finite = expected.isfinite()
    tiny = expected < 2 * torch.finfo(torch.float32).tiny
    error = similarity_error(dist[finite], expected[finite])
    zeros_agree = bool(((dist == 0) == (expected == 0)).logical_or(tiny).all())
    if not (error <= DIST_SIMILARITY and zeros_agree and _same_specials(dist.double(), expected)):
        raise AssertionError(f"beyond the tolerances of attn_dist: similarity {error}, zeros agree: {zeros_agree}")
    return error


#: Of indexer_logits, over the finite entries: see similarity_error.
LOGITS_SIMILARITY = 5e-6


@dataclass
class LogitsErrors:
    """Errors of one call of indexer_logits against the reference in float64."""

    similarity: float  # limit: LOGITS_SIMILARITY
    same_specials: bool  # -inf, inf and NaN stand in the same places

    def check(self) -> None:
        if not (self.similarity <= LOGITS_SIMILARITY and self.same_specials):
            raise AssertionError(f"beyond the tolerances of indexer_logits: {self}")


def logits_errors(
    logits: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    cu_seqlen_ks: Tensor,
    cu_seqlen_ke: Tensor,
    k_scale: Tensor | None = None,
) -> LogitsErrors:
    """Compares the logits of a call with these arguments with the reference in float64."""
    scale = None if k_scale is None else k_scale.double()
    expected = indexer.indexer_logits(q.double(), k.double(), weights.double(), cu_seqlen_ks, cu_seqlen_ke, scale)
    finite = expected.isfinite()
    return LogitsErrors(
        similarity=similarity_error(logits[finite], expected[finite]),
        same_specials=_same_specials(logits.double(), expected),
    )


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, which tell -0.0 from 0.0 and equal NaN."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def check_selected(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Fails unless the indices and values of two selections are the same bits."""
    for name, a, b in zip(("indices", "values"), got, expected, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise AssertionError(f"{name}: {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
        wrong = bits(a) != bits(b)
        if wrong.any():
            row, slot = wrong.nonzero()[0].tolist()
            raise AssertionError(
                f"{name} differ in {int(wrong.any(1).sum())} of {len(a)} rows, first in row {row}, slot {slot}: "
                f"{a[row, slot].item()} instead of {b[row, slot].item()}"
            )


def magnitudes(q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """What rounding errors are relative to, given the reference's lse.

    Of every element of out [B, S, H, d_v]: sum_i p_i |v_i|. Of every row [B, S, H]: the largest, over its visible keys,
    of sum_d |sm_scale q_d k_id|.
    """
    d_v, sink = options.get("d_v", 512), options.get("attn_sink")
    scale = options.get("sm_scale")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    visible = reference.visible_slots(
        indices,
        kv.shape[1],
        options.get("causal", True),
        options.get("q_start", 0),
        options.get("kv_stride", 1),
        options.get("topk_length"),
    )
    of_values, of_scores = q.new_empty(*q.shape[:3], d_v), q.new_empty(q.shape[:3])
    for chunk in reference.chunks(q, kv, indices, visible):
        rows = lse[:, chunk.queries]
        p = chunk.probabilities(rows.unflatten(2, chunk.q.shape[2:4]), scale)
        share = reference.share_beside_sink(rows, sink)[..., None]
        keys = chunk.keys.abs()
        of_values[:, chunk.queries] = (p @ keys[..., :d_v]).flatten(2, 3) * share
        # Slots that do not take part hold zeros.
        of_scores[:, chunk.queries] = (chunk.q.abs() @ keys.mT).amax(-1).flatten(2) * abs(scale)
    return of_values, of_scores


def _same_specials(a: Tensor, b: Tensor) -> bool:
    def specials(x: Tensor) -> Tensor:
        return x.nan_to_num(nan=2, posinf=1, neginf=-1).masked_fill(x.isfinite(), 0)

    return torch.equal(specials(a), specials(b))


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
