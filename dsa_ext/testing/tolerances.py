"""How far a kernel may be from the reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsa_ext.reference import sparse_mla as reference

#: Of bf16 results: see similarity_error. The rounding of a bf16 result alone makes about 2e-6.
SIMILARITY = 7e-6
#: Of each element, as a fraction of sum_i p_i |v_i|: the rounding of P to bf16 and that of the result.
ELEMENTWISE = 2.0**-7
LSE_ABSOLUTE, LSE_RELATIVE = 1e-6, 3e-5


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
    lse: float  # largest |error| / max(LSE_ABSOLUTE, LSE_RELATIVE |lse|), limit: 1
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
    magnitude = value_magnitude(q.double(), kv.double(), indices, expected_lse, **options)

    out, lse = out.double(), lse.double()
    finite, finite_lse = expected.isfinite(), expected_lse.isfinite()
    same_specials = _same_specials(out, expected) and _same_specials(lse, expected_lse)
    error = (out - expected).abs()[finite]
    # 0 / 0 where nothing is visible and the result is 0, as it must be there.
    elementwise = (error / magnitude[finite]).masked_fill(error == 0, 0)
    lse_error = (lse - expected_lse).abs() / (LSE_RELATIVE * expected_lse.abs()).clamp(min=LSE_ABSOLUTE)
    return ForwardErrors(
        similarity=similarity_error(out[finite], expected[finite]),
        elementwise=_largest(elementwise),
        lse=_largest(lse_error[finite_lse]),
        same_specials=same_specials,
    )


def value_magnitude(q: Tensor, kv: Tensor, indices: Tensor, lse: Tensor, **options: Any) -> Tensor:
    """sum_i p_i |v_i| of every element of out [B, S, H, d_v]; `lse` is the reference's."""
    d_v, sink = options.get("d_v", 512), options.get("attn_sink")
    scale = options.get("sm_scale")
    visible = reference.visible_slots(
        indices,
        kv.shape[1],
        options.get("causal", True),
        options.get("q_start", 0),
        options.get("kv_stride", 1),
        options.get("topk_length"),
    )
    magnitude = q.new_empty(*q.shape[:3], d_v)
    for chunk in reference.chunks(q, kv, indices, visible):
        rows = lse[:, chunk.queries]
        p = chunk.probabilities(rows.unflatten(2, chunk.q.shape[2:4]), q.shape[3] ** -0.5 if scale is None else scale)
        share = reference.share_beside_sink(rows, sink)[..., None]
        magnitude[:, chunk.queries] = (p @ chunk.keys[..., :d_v].abs()).flatten(2, 3) * share
    return magnitude


def _same_specials(a: Tensor, b: Tensor) -> bool:
    def specials(x: Tensor) -> Tensor:
        return x.nan_to_num(nan=2, posinf=1, neginf=-1).masked_fill(x.isfinite(), 0)

    return torch.equal(specials(a), specials(b))


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0
