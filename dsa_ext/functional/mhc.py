"""Hyper-connections: streams of a residual connection, mixed by what each token says."""

import torch
from torch import Tensor


def mhc_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer reads of the n streams of a residual connection, and how its result is to be written to them.

    With c = n * D, x_flat [c] the streams of a token concatenated, and the rows of phi, the bias and t in
    three parts, of n, n and n * n::

        t = phi @ (gamma * x_flat) / sqrt(mean(x_flat^2) + eps)
        h_pre = sigmoid(alpha_0 * t_0 + bias_0) + eps,    h_in = sum_i h_pre_i * x_i
        h_post = 2 * sigmoid(alpha_1 * t_1 + bias_1),     h_res = alpha_2 * t_2 + bias_2

    (Manifold-constrained hyper-connections, arXiv 2512.24880.) :func:`mhc_post` takes the last two.

    Args:
        x: streams [B, S, n, D], bf16. On the CPU also fp32 and float64. n is 2 or 4, on the CPU also 8; D a multiple
            of 128 up to 8192.
        phi: [n * n + 2 n, n * D], fp32 (float64 if x is, as everything below).
        alpha: [3]. bias: [n * n + 2 n].
        gamma: weights [n * D] on x before phi; 1 by default. The mean square is that of x itself.
        eps: from 0 to less than 1.

    Returns:
        h_in [B, S, D], like x; h_post [B, S, n] and h_res [B, S, n, n], fp32, the rows of h_res those that it writes.
        All are differentiable with respect to all tensors (once).

    Raises:
        RuntimeError: an argument breaks one of these rules; the text names the argument, what was expected and what
            came. Also when a GPU has no kernel.
    """
    h_in, h_post, h_res, *_ = torch.ops.dsa.mhc_pre_fwd.default(x, phi, alpha, bias, gamma, eps)
    return h_in, h_post, h_res


def mhc_post(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> Tensor:
    """The streams after a layer: mixed, with its result added to each.

    ::

        x'_i = sum_j M_ij * x_j + h_post_i * y

    M is exp(h_res), its columns and then its rows divided by their sums, again and again (Sinkhorn-Knopp): in the
    limit all of them sum to 1, so that streams are averaged and none grows. Computed in logarithms.

    Args:
        x: streams [B, S, n, D], bf16, as :func:`mhc_pre` takes them.
        y: what the layer made of h_in [B, S, D], like x.
        h_post, h_res: [B, S, n] and [B, S, n, n], fp32, from :func:`mhc_pre`.
        iterations: how often columns and rows are divided, 1 to 100.

    Returns:
        [B, S, n, D], like x, differentiable with respect to all tensors (once).

    Raises:
        RuntimeError: see :func:`mhc_pre`.
    """
    result: Tensor = torch.ops.dsa.mhc_post_fwd.default(x, y, h_post, h_res, iterations)
    return result
