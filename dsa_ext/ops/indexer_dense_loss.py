"""torch.ops.dsa.indexer_dense_loss: indexer_loss over all keys, some queries at a time. Made of other operators."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext.ops._checks import check_q_start, check_same_device, check_scale, check_tensor, fail
from dsa_ext.ops._indexer import check_rows, gradients_like
from dsa_ext.ops._library import follow_autocast, library, not_differentiable_again, use_autograd_function
from dsa_ext.reference.indexer import runs

_OP = "indexer_dense_loss"
library.define(
    "indexer_dense_loss(Tensor q, Tensor k, Tensor weights, Tensor main_q, Tensor main_kv, Tensor lse, "
    "Tensor? row_weights=None, float? sm_scale=None, bool causal=True, SymInt q_start=0, bool gradients=False) -> "
    "(Tensor loss, Tensor dq, Tensor dk, Tensor dweights)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_redispatch = torch.ops.dsa.indexer_dense_loss.default.redispatch
Results = tuple[Tensor, Tensor, Tensor, Tensor]


def _bounds(q: Tensor, first: int, last: int, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Of queries at positions [first, last), of which there are `keys` keys: cu_seqlen_ks and cu_seqlen_ke."""
    ks = torch.zeros(last - first, device=q.device, dtype=torch.int32)
    if not causal:
        return ks, torch.full_like(ks, keys)
    return ks, torch.arange(first + 1, last + 1, device=q.device).clamp(max=keys).int()


def _check(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    row_weights: Tensor | None,
    sm_scale: float | None,
    q_start: int,
) -> None:
    if q.dtype == torch.float8_e4m3fn:
        fail(_OP, "q must be bfloat16, got float8_e4m3fn")
    check_rows(_OP, q, k, weights)
    seq = q.shape[0]
    check_tensor(_OP, "main_q", main_q, q.dtype, S=seq, H=None, D=None)
    check_tensor(_OP, "main_kv", main_kv, q.dtype, S_kv=k.shape[0], D=main_q.shape[2])
    check_tensor(_OP, "lse", lse, weights.dtype, S=seq, H=main_q.shape[1])
    if row_weights is not None:
        check_tensor(_OP, "row_weights", row_weights, weights.dtype, S=seq)
    check_same_device(_OP, "q", q, main_q=main_q, main_kv=main_kv, lse=lse, row_weights=row_weights)
    check_scale(_OP, sm_scale)
    check_q_start(_OP, q_start)


def _compute(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    row_weights: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    gradients: bool = False,
) -> Results:
    _check(q, k, weights, main_q, main_kv, lse, row_weights, sm_scale, q_start)
    seq, s_kv = q.shape[0], k.shape[0]
    loss = weights.new_zeros(())
    dq, dk, dweights = q.new_zeros(q.shape), k.new_zeros(k.shape, dtype=weights.dtype), weights.new_zeros(weights.shape)
    ids = torch.arange(s_kv, device=q.device, dtype=torch.int32)
    for run in runs(seq if s_kv > 0 else 0, s_kv):
        first, last = q_start + run.start, q_start + min(run.stop, seq)
        keys = min(s_kv, last) if causal else s_kv
        ks, ke = _bounds(q, first, last, keys, causal)
        index = q[run], k[:keys], weights[run]
        logits = torch.ops.dsa.indexer_logits(*index, ks, ke)
        listed = ids[:keys].expand(1, last - first, 1, keys)
        p = torch.ops.dsa.attn_dist(
            main_q[None, run], main_kv[None, :keys, None], listed, lse[None, run], sm_scale, causal, first
        )
        losses, dlogits = torch.ops.dsa.indexer_loss(
            logits, p[0, :, 0], None, None if row_weights is None else row_weights[run]
        )
        loss += losses.sum()
        if gradients:
            dq[run], more_dk, dweights[run] = torch.ops.dsa.indexer_logits_bwd(dlogits, *index, ks, ke)
            dk[:keys] += more_dk
    if not gradients:
        return loss, q.new_empty(0), k.new_empty(0), weights.new_empty(0)
    return loss, dq, dk.to(k.dtype), dweights


def _fake(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    main_q: Tensor,
    main_kv: Tensor,
    lse: Tensor,
    row_weights: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    q_start: int = 0,
    gradients: bool = False,
) -> Results:
    _check(q, k, weights, main_q, main_kv, lse, row_weights, sm_scale, q_start)
    if not gradients:
        return weights.new_empty(()), q.new_empty(0), k.new_empty(0), weights.new_empty(0)
    return weights.new_empty(()), *gradients_like(q, k, weights)


class _Autograd(torch.autograd.Function):
    """The forward computes the gradients of the sum, which is all that it returns."""

    @staticmethod
    def forward(
        ctx: Any,
        keyset: torch._C.DispatchKeySet,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        main_q: Tensor,
        main_kv: Tensor,
        lse: Tensor,
        row_weights: Tensor | None = None,
        sm_scale: float | None = None,
        causal: bool = True,
        q_start: int = 0,
        gradients: bool = False,
    ) -> Results:
        for name, tensor in (("main_q", main_q), ("main_kv", main_kv), ("lse", lse), ("row_weights", row_weights)):
            if tensor is not None and tensor.requires_grad:
                fail(_OP, f"{name} must not require a gradient: only q, k and weights have one")
        tensors, options = (q, k, weights, main_q, main_kv, lse, row_weights), (sm_scale, causal, q_start)
        with torch._C._AutoDispatchBelowAutograd():
            results: Results = _redispatch(keyset, *tensors, *options, True)
        ctx.save_for_backward(*results)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        loss, *of_sum = ctx.saved_tensors
        gradients = tuple(gradient * dloss for gradient in of_sum)
        return None, *not_differentiable_again(_OP, gradients, loss), *(None,) * 8


library.impl(_OP, _compute, "CompositeExplicitAutograd")
torch.library.register_fake(f"dsa::{_OP}", _fake, lib=library)
use_autograd_function(_OP, _Autograd)
follow_autocast(_OP, "q", "k", "main_q", "main_kv")
