"""What the operators of hyper-connections share: what must hold of their arguments."""

from torch import Tensor

from dsa_ext.ops._checks import check_same_device, check_tensor, differentiable_dtype, fail
from dsa_ext.reference.sparse_mla import compute_dtype

STREAMS = (2, 4, 8)
_MAX_COLUMNS = 8192


def check_streams(op: str, x: Tensor) -> None:
    check_tensor(op, "x", x, differentiable_dtype(x), B=None, S=None, n=None, D=None)
    if x.shape[2] not in STREAMS:
        fail(op, f"x must have 2, 4 or 8 streams, got {x.shape[2]}")
    if x.shape[3] % 128 != 0 or not 0 < x.shape[3] <= _MAX_COLUMNS:
        fail(op, f"x's columns must be a multiple of 128, at most {_MAX_COLUMNS}, got {x.shape[3]}")


def check_pre(op: str, x: Tensor, phi: Tensor, alpha: Tensor, gamma: Tensor | None, bias: Tensor | None = None) -> None:
    check_streams(op, x)
    streams, columns, dtype = x.shape[2], x.shape[3], compute_dtype(x)
    mixed = streams * streams + 2 * streams
    check_tensor(op, "phi", phi, dtype, M=mixed, C=streams * columns)
    check_tensor(op, "alpha", alpha, dtype, A=3)
    check_same_device(op, "x", x, phi=phi, alpha=alpha, bias=bias, gamma=gamma)
    if bias is not None:
        check_tensor(op, "bias", bias, dtype, M=mixed)
    if gamma is not None:
        check_tensor(op, "gamma", gamma, dtype, C=streams * columns)


def check_eps(op: str, eps: float) -> None:
    if not 0 <= eps < 1:
        fail(op, f"eps must be from 0 to less than 1, got {eps:g}")


def check_token(op: str, x: Tensor, **tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    """Of each token: fp32 tensors [B, S, ..] of these further sizes."""
    for name, (tensor, sizes) in tensors.items():
        letters = dict(zip("MN", sizes, strict=False))
        check_tensor(op, name, tensor, compute_dtype(x), B=x.shape[0], S=x.shape[1], **letters)
        check_same_device(op, "x", x, **{name: tensor})


def check_post(op: str, x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor, iterations: int) -> None:
    check_streams(op, x)
    batch, length, streams, columns = x.shape
    check_tensor(op, "y", y, x.dtype, B=batch, S=length, D=columns)
    check_same_device(op, "x", x, y=y)
    check_token(op, x, h_post=(h_post, (streams,)), h_res=(h_res, (streams, streams)))
    if not 1 <= iterations <= 100:
        fail(op, f"iterations must be from 1 to 100, got {iterations}")
