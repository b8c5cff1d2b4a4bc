"""A layer between the streams of a hyper-connection."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from dsa_ext import functional
from dsa_ext.ops.mhc import STREAMS
from dsa_ext.reference.mhc import split
from dsa_ext.reference.numerics import compute_dtype

#: How much of what a token says counts at first.
_ALPHA = 0.01
#: Of a stream for another, at first: with weight exp of this, none to speak of.
_OFF_DIAGONAL = -8.0


class HyperConnection(nn.Module):
    """Wraps a layer in the place of a residual connection: n streams instead of one, mixed as each token says.

    ::

        h_in, h_post, h_res = mhc_pre(x)
        x' = mhc_post(x, layer(h_in), h_post, h_res)

    (Manifold-constrained hyper-connections, see :func:`dsa_ext.mhc_pre` and :func:`dsa_ext.mhc_post`.) At first it is
    nearly a residual connection for each stream: the layer reads their mean, its result is added to all, and streams
    keep to themselves. In front of the first such layer a stream becomes n, ``x[:, :, None].expand(-1, -1, n, -1)``;
    after the last one ``x.mean(2)`` merges them.

    Parameters, fp32 whatever the dtype of the layer: `phi` [n * n + 2 n, n * hidden_size], `alpha` [3], `bias`
    [n * n + 2 n], `gamma` [n * hidden_size]. A module that has been brought to bf16 computes with them in fp32.

    Args:
        layer: takes [B, S, hidden_size], and gives as much; or a tuple of that and more, which is passed on.
        hidden_size: columns of a stream, a multiple of 128.
        streams: n, 2 or 4; on the CPU also 8.
        iterations: how often columns and rows of the mixing weights are normalized.
        eps: of the root mean square, and the least weight of a stream in h_in.
        dtype: of the parameters; float64 for streams of float64.
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
        if streams not in STREAMS:
            raise ValueError(f"HyperConnection: streams must be 2, 4 or 8, got {streams}")
        if hidden_size < 1 or hidden_size % 128 != 0:
            raise ValueError(f"HyperConnection: hidden_size must be a multiple of 128, got {hidden_size}")
        self.layer, self.iterations, self.eps = layer, iterations, eps
        self.streams, columns, mixed = streams, streams * hidden_size, streams * streams + 2 * streams
        self.phi = nn.Parameter(torch.empty(mixed, columns, device=device, dtype=dtype))
        self.alpha = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(mixed, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.empty(columns, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Of the connection, not of the layer."""
        nn.init.normal_(self.phi, std=self.phi.shape[1] ** -0.5)
        nn.init.constant_(self.alpha, _ALPHA)
        nn.init.ones_(self.gamma)
        pre, post, res = split(self.bias, self.streams)
        pre.fill_(-math.log(self.streams - 1))  # whose gate is 1 / n
        post.zero_()  # whose gate is 1
        res.fill_(_OFF_DIAGONAL).fill_diagonal_(0)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the layer reads of the streams, and the weights with which its result is written to them."""
        dtype = compute_dtype(x)
        phi, alpha, bias, gamma = (p.to(dtype) for p in (self.phi, self.alpha, self.bias, self.gamma))
        return functional.mhc_pre(x, phi, alpha, bias, gamma, self.eps)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Streams [B, S, n, hidden_size] to streams; what else comes goes to the layer.

        Where the layer gives a tuple, streams and the other elements.
        """
        h_in, h_post, h_res = self.read(x)
        result = self.layer(h_in, *args, **kwargs)
        y, *others = result if isinstance(result, tuple) else (result,)
        out = functional.mhc_post(x, y, h_post, h_res, self.iterations)
        return (out, *others) if isinstance(result, tuple) else out
