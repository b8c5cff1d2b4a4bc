"""Manifold-constrained hyper-connections in plain PyTorch, forward and backward, on any device."""

import torch
from torch import Tensor

from dsa_ext.reference.numerics import compute_dtype


def split(mixed: Tensor, streams: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splits [..., n * n + 2 n] into the parts for pre [..., n], post [..., n] and res [..., n, n]."""
    pre, post, res = mixed.split([streams, streams, streams * streams], -1)
    return pre, post, res.unflatten(-1, (streams, streams))


def join(pre: Tensor, post: Tensor, res: Tensor) -> Tensor:
    """The inverse of split."""
    return torch.cat([pre, post, res.flatten(-2)], -1)


def mhc_pre_fwd(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See :func:`dsa_ext.mhc_pre`; also inv_rms [B, S], h_mix [B, S, n * n + 2 n] and h_pre [B, S, n]."""
    streams, dtype = x.shape[2], compute_dtype(x)
    rows = x.to(dtype)
    flat = rows.flatten(2)
    inv_rms = (flat.square().mean(-1) + eps).rsqrt()
    h_mix = (flat if gamma is None else flat * gamma) @ phi.mT
    pre, post, res = split(h_mix * inv_rms[..., None], streams)
    bias_pre, bias_post, bias_res = split(bias, streams)
    h_pre = (alpha[0] * pre + bias_pre).sigmoid() + eps
    h_post = 2 * (alpha[1] * post + bias_post).sigmoid()
    h_res = alpha[2] * res + bias_res
    h_in = (h_pre[..., None] * rows).sum(2).to(x.dtype)
    return h_in, h_post, h_res, inv_rms, h_mix, h_pre


def mhc_pre_bwd(
    dh_in: Tensor,
    dh_post: Tensor,
    dh_res: Tensor,
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    gamma: Tensor | None,
    h_post: Tensor,
    inv_rms: Tensor,
    h_mix: Tensor,
    h_pre: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to x, phi, alpha, bias and gamma; the last one is empty without gamma."""
    streams, dtype = x.shape[2], compute_dtype(x)
    rows, upstream = x.to(dtype), dh_in.to(dtype)
    flat = rows.flatten(2)
    share = h_pre - eps
    # Gradients with respect to alpha * t + bias of each part.
    dpre = (upstream[:, :, None] * rows).sum(-1) * share * (1 - share)
    dpost = dh_post * h_post * (1 - h_post / 2)
    dsums = join(dpre, dpost, dh_res)
    dbias = dsums.sum((0, 1))
    dalpha = torch.stack([part.sum() for part in split(dsums * h_mix * inv_rms[..., None], streams)])
    dmixed = dsums * join(*(a.expand_as(part) for a, part in zip(alpha, split(dsums, streams), strict=True)))
    dh_mix = dmixed * inv_rms[..., None]
    dscaled = dh_mix @ phi
    dphi = torch.einsum("bsm,bsc->mc", dh_mix, flat if gamma is None else flat * gamma)
    dgamma = flat.new_empty(0) if gamma is None else (flat * dscaled).sum((0, 1))
    dinv_rms = (dmixed * h_mix).sum(-1) * inv_rms**3 / flat.shape[-1]
    dflat = (dscaled if gamma is None else gamma * dscaled) - dinv_rms[..., None] * flat
    dx = dflat.view_as(rows) + h_pre[..., None] * upstream[:, :, None]
    return dx.to(x.dtype), dphi, dalpha, dbias, dgamma


def sinkhorn(h_res: Tensor, iterations: int) -> list[Tensor]:
    """Sinkhorn-Knopp in log space: the logarithm of exp(h_res) [..., n, n] after each step. Steps alternate between
    normalizing the columns and the rows to a sum of 1, columns first."""
    steps = []
    for _ in range(iterations):
        for dim in (-2, -1):
            h_res = h_res - h_res.logsumexp(dim, keepdim=True)
            steps.append(h_res)
    return steps


def mhc_post_fwd(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> Tensor:
    """See :func:`dsa_ext.mhc_post`."""
    dtype = compute_dtype(x)
    mixing = sinkhorn(h_res, iterations)[-1].exp()
    return (mixing @ x.to(dtype) + h_post[..., None] * y.to(dtype)[:, :, None]).to(x.dtype)


def mhc_post_bwd(
    dout: Tensor, x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to x, y, h_post and h_res."""
    dtype = compute_dtype(x)
    upstream, rows, layer = (t.to(dtype) for t in (dout, x, y))
    steps = sinkhorn(h_res, iterations)
    mixing = steps[-1].exp()
    dh_res = (upstream @ rows.mT) * mixing
    for step, logarithm in reversed(list(enumerate(steps))):
        dh_res = dh_res - logarithm.exp() * dh_res.sum(-2 + step % 2, keepdim=True)
    dx = mixing.mT @ upstream
    dy = (h_post[..., None] * upstream).sum(2)
    dh_post = (upstream * layer[:, :, None]).sum(-1)
    return dx.to(x.dtype), dy.to(y.dtype), dh_post, dh_res
