"""A module that wraps a layer in a hyper-connection."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dsa_ext import functional
from dsa_ext.ops._checks import check_sizes, describe, dtype_name
from dsa_ext.ops._library import autocast_dtype, check_input
from dsa_ext.ops.mhc import STREAMS
from dsa_ext.reference.mhc import split
from dsa_ext.reference.numerics import compute_dtype

#: Initial alpha: the factor on the part of the gates that depends on the token.
_ALPHA = 0.01
#: Initial bias of h_res between different streams: their mixing weight, about exp of this, is negligible.
_OFF_DIAGONAL = -8.0


class HyperConnection(nn.Module):
    """Replaces the residual connection of a layer: n streams instead of one, mixed with weights computed per token.

    ::

        h_in, h_post, h_res = mhc_pre(x)
        x' = mhc_post(x, layer(h_in), h_post, h_res)

    (Manifold-constrained hyper-connections, see :func:`dsa_ext.mhc_pre` and :func:`dsa_ext.mhc_post`.) At
    initialization it is nearly a residual connection per stream: the layer reads the mean of the streams, its output is
    added to each of them, and they are hardly mixed. Before the first such layer, expand one stream to n with
    ``x[:, :, None].expand(-1, -1, n, -1)``; after the last one, merge them with ``x.mean(2)``.

    Parameters, fp32 whatever the dtype of the layer: `phi` [n * n + 2 n, n * hidden_size], `alpha` [3], `bias`
    [n * n + 2 n], `gamma` [n * hidden_size]. If the module is converted to bf16, they are cast to fp32 for computation.

    Args:
        layer: takes [B, S, hidden_size], and returns the same shape, or a tuple of that and further results, which are
            passed on.
        hidden_size: columns of a stream, a multiple of 128.
        streams: n, 2 or 4; on the CPU also 8.
        iterations: number of times that columns and rows of the mixing weights are normalized, 1 to 100.
        eps: added to the mean square under the root, and to the weight of each stream in h_in (its minimum); from 0
            on, less than 1.
        dtype: dtype of the parameters; float64 for float64 streams.
    """

    def __init__(
        self,
        layer: nn.Module,
        hidden_size: int,
        streams: int = 4,
        *,
        iterations: int = 20,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_sizes("HyperConnection", hidden_size=hidden_size, streams=streams, iterations=iterations)
        if streams not in STREAMS:
            raise ValueError(f"HyperConnection: streams must be 2, 4 or 8, got {streams}")
        if hidden_size % 128 != 0:
            raise ValueError(f"HyperConnection: hidden_size must be a multiple of 128, got {hidden_size}")
        self.layer, self.iterations, self.eps = layer, iterations, eps
        self.streams, columns, mixed = streams, streams * hidden_size, streams * streams + 2 * streams
        self.phi = nn.Parameter(torch.empty(mixed, columns, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(mixed, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.empty(columns, device=device, dtype=dtype))
        self.reset_parameters()
        parameters = (self.phi, self.alpha, self.bias, self.gamma)
        phi, alpha, bias, gamma = (p.detach().to("meta", torch.float32) for p in parameters)
        x = torch.empty(0, 0, streams, hidden_size, device="meta", dtype=torch.bfloat16)
        # Checks the arguments.
        functional.mhc_post(x, *functional.mhc_pre(x, phi, alpha, bias, gamma, eps), iterations)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets the parameters of the connection, but not those of the layer."""
        nn.init.normal_(self.phi, std=self.phi.shape[1] ** -0.5)
        nn.init.constant_(self.alpha, _ALPHA)
        nn.init.ones_(self.gamma)
        pre, post, res = split(self.bias, self.streams)
        pre.fill_(-math.log(self.streams - 1))  # a gate of 1 / n
        post.zero_()  # a gate of 1
        res.fill_(_OFF_DIAGONAL).fill_diagonal_(0)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's input, and the weights with which its output is written to the streams: h_in, h_post, h_res."""
        dtype = compute_dtype(x)
        phi, alpha, bias, gamma = (p.to(dtype) for p in (self.phi, self.alpha, self.bias, self.gamma))
        return functional.mhc_pre(x, phi, alpha, bias, gamma, self.eps)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Maps streams [B, S, n, hidden_size] to streams; further arguments are passed to the layer.

        If the layer returns a tuple, returns a tuple of the streams and its other elements.
        """
        check_input("HyperConnection", x, None)
        expected = (self.streams, self.phi.shape[1] // self.streams)
        if x.dim() != 4 or x.shape[2:] != expected:
            raise ValueError(f"HyperConnection: x must be [B, S, {expected[0]}, {expected[1]}], got {describe(x)}")
        h_in, h_post, h_res = self.read(x)
        result = self.layer(h_in, *args, **kwargs)
        y = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(y, Tensor):
            got = type(y).__name__
            raise TypeError(f"HyperConnection: layer must return a tensor, or a tuple that begins with one, got {got}")
        if y.dtype != h_in.dtype and autocast_dtype(x) is None:
            wanted = dtype_name(h_in.dtype)
            raise ValueError(f"HyperConnection: layer must return the dtype of its input, {wanted}, got {describe(y)}")
        out = functional.mhc_post(x, y, h_post, h_res, self.iterations)
        return (out, *result[1:]) if isinstance(result, tuple) else out
