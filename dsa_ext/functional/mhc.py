"""Hyper-connections: several residual streams, mixed with weights computed per token."""

import torch
from torch import Tensor


def mhc_pre(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes a layer's input from n residual streams, and the weights with which its output is written to them.

    For each token, x_flat [n * D] is the concatenation of its streams. The rows of phi, the bias and t are split into
    three parts of n, n and n * n::

        t = phi @ (gamma * x_flat) / sqrt(mean(x_flat^2) + eps)
        h_pre = sigmoid(alpha_0 * t_0 + bias_0) + eps,    h_in = sum_i h_pre_i * x_i
        h_post = 2 * sigmoid(alpha_1 * t_1 + bias_1),     h_res = alpha_2 * t_2 + bias_2

    (Manifold-constrained hyper-connections, arXiv 2512.24880.) :func:`mhc_post` takes h_post and h_res.

    Args:
        x: streams [B, S, n, D], bf16. On the CPU also fp32 and float64. n is 2 or 4, on the CPU also 8; D a multiple
            of 128 up to 8192.
        phi: [n * n + 2 n, n * D], fp32 (float64 if x is, as everything below).
        alpha: [3]. bias: [n * n + 2 n].
        gamma: weights [n * D] that multiply x_flat before phi; 1 by default. The mean square does not include them.
        eps: at least 0 and less than 1.

    Returns:
        h_in [B, S, D], like x; h_post [B, S, n] and h_res [B, S, n, n], fp32. Row i of h_res belongs to the stream i
        that is written. All are differentiable (once) with respect to all tensors.

    Raises:
        RuntimeError: an argument violates one of these requirements; the message names the argument, what was expected
            and what was passed. Also when there is no kernel for the GPU.
    """
    h_in, h_post, h_res, *_ = torch.ops.dsa.mhc_pre_fwd.default(x, phi, alpha, bias, gamma, eps)
    return h_in, h_post, h_res


def mhc_post(x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int = 20) -> Tensor:
    """Updates the streams after a layer: mixes them and adds the layer's output to each.

    ::

        x'_i = sum_j M_ij * x_j + h_post_i * y

    M is exp(h_res) after `iterations` steps of Sinkhorn-Knopp, each of which divides the columns and then the rows by
    their sums. In the limit all columns and rows sum to 1 (M is doubly stochastic), so that streams are averaged and
    none grows. M is computed in log space.

    Args:
        x: streams [B, S, n, D], bf16, as :func:`mhc_pre` takes them.
        y: the layer's output for h_in [B, S, D], like x.
        h_post, h_res: [B, S, n] and [B, S, n, n], fp32, from :func:`mhc_pre`.
        iterations: number of times that columns and rows are normalized, 1 to 100.

    Returns:
        [B, S, n, D], like x, differentiable (once) with respect to all tensors.

    Raises:
        RuntimeError: see :func:`mhc_pre`.
    """
    result: Tensor = torch.ops.dsa.mhc_post_fwd.default(x, y, h_post, h_res, iterations)
    return result
