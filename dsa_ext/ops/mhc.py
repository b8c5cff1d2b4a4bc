"""Manifold-constrained hyper-connections: a layer's input from the streams, the streams after it, and gradients."""

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.ops._checks import check_same_device, check_tensor, differentiable_dtype, fail
from dsa_ext.ops._operator import Args, Operator
from dsa_ext.reference.numerics import compute_dtype

STREAMS = (2, 4, 8)
_MAX_COLUMNS = 8192
_POST = "Tensor x, Tensor y, Tensor h_post, Tensor h_res, SymInt iterations=20"


def _check_streams(a: Args) -> None:
    check_tensor(a.op, "x", a.x, differentiable_dtype(a.x), B=None, S=None, n=None, D=None)
    streams, columns = a.x.shape[2:]
    if streams not in STREAMS:
        fail(a.op, f"x must have 2, 4 or 8 streams, got {streams}")
    if columns % 128 != 0 or not 0 < columns <= _MAX_COLUMNS:
        fail(a.op, f"x's hidden size must be a multiple of 128, at most {_MAX_COLUMNS}, got {columns}")


def _check_like_x(a: Args, name: str, **dims: int) -> None:
    """Checks a tensor [B, S, ...] with these trailing sizes and the dtype of x."""
    tensor = getattr(a, name)
    check_tensor(a.op, name, tensor, a.x.dtype, B=a.x.shape[0], S=a.x.shape[1], **dims)
    check_same_device(a.op, "x", a.x, **{name: tensor})


def _check_token(a: Args, **tensors: tuple[int, ...]) -> None:
    """Checks per-token tensors [B, S, ...] with these trailing sizes: fp32, or float64 if x is."""
    for name, sizes in tensors.items():
        tensor, letters = getattr(a, name), dict(zip("MN", sizes, strict=False))
        check_tensor(a.op, name, tensor, compute_dtype(a.x), B=a.x.shape[0], S=a.x.shape[1], **letters)
        check_same_device(a.op, "x", a.x, **{name: tensor})


def _check_gates(a: Args, bias: Tensor | None = None) -> None:
    """Checks shared by mhc_pre_fwd and mhc_pre_bwd."""
    _check_streams(a)
    streams, columns, dtype = a.x.shape[2], a.x.shape[3], compute_dtype(a.x)
    mixed = streams * streams + 2 * streams
    check_tensor(a.op, "phi", a.phi, dtype, M=mixed, C=streams * columns)
    check_tensor(a.op, "alpha", a.alpha, dtype, A=3)
    check_same_device(a.op, "x", a.x, phi=a.phi, alpha=a.alpha, bias=bias, gamma=a.gamma)
    if bias is not None:
        check_tensor(a.op, "bias", bias, dtype, M=mixed)
    if a.gamma is not None:
        check_tensor(a.op, "gamma", a.gamma, dtype, C=streams * columns)
    if not 0 <= a.eps < 1:
        fail(a.op, f"eps must be from 0 to less than 1, got {a.eps:g}")


def _check_pre_bwd(a: Args) -> None:
    _check_gates(a)
    streams, columns = a.x.shape[2:]
    each, pairs = (streams,), (streams, streams)
    _check_like_x(a, "dh_in", D=columns)
    _check_token(a, dh_post=each, dh_res=pairs, h_post=each, inv_rms=(), h_mix=(a.phi.shape[0],), h_pre=each)


def _check_post(a: Args) -> None:
    _check_streams(a)
    streams, columns = a.x.shape[2:]
    _check_like_x(a, "y", D=columns)
    _check_token(a, h_post=(streams,), h_res=(streams, streams))
    if not 1 <= a.iterations <= 100:
        fail(a.op, f"iterations must be from 1 to 100, got {a.iterations}")


def _check_post_bwd(a: Args) -> None:
    _check_post(a)
    _check_like_x(a, "dout", n=a.x.shape[2], D=a.x.shape[3])


def _fake_pre(a: Args) -> tuple[Tensor, ...]:
    (batch, length, streams, columns), dtype = a.x.shape, compute_dtype(a.x)
    sizes = ((streams,), (streams, streams), (), (streams * streams + 2 * streams,), (streams,))
    gates = (a.x.new_empty(batch, length, *size, dtype=dtype) for size in sizes)
    return a.x.new_empty(batch, length, columns), *gates


def _fake_pre_bwd(a: Args) -> tuple[Tensor, ...]:
    mixed, columns = a.phi.shape
    sizes = ((mixed, columns), (3,), (mixed,), (0 if a.gamma is None else columns,))
    return a.x.new_empty(a.x.shape), *(a.phi.new_empty(size) for size in sizes)


def _pre_backward(
    a: Args, dh_in: Tensor | None, dh_post: Tensor | None, dh_res: Tensor | None, *_: None
) -> dict[str, Tensor | None]:
    batch, length, streams, columns = a.x.shape
    if dh_in is None:
        dh_in = a.x.new_zeros(batch, length, columns)
    if dh_post is None:
        dh_post = a.h_post.new_zeros(batch, length, streams)
    if dh_res is None:
        dh_res = a.h_post.new_zeros(batch, length, streams, streams)
    dx, dphi, dalpha, dbias, dgamma = torch.ops.dsa.mhc_pre_bwd(dh_in, dh_post, dh_res, *a)
    return {"x": dx, "phi": dphi, "alpha": dalpha, "bias": dbias, "gamma": None if a.gamma is None else dgamma}


def _post_backward(a: Args, dout: Tensor | None) -> dict[str, Tensor | None]:
    if dout is None:
        dout = a.x.new_zeros(a.x.shape)
    return dict(zip(("x", "y", "h_post", "h_res"), torch.ops.dsa.mhc_post_bwd(dout, *a), strict=True))


def _mixing(a: Args) -> int:
    """Operations of the product of all tokens' n x n matrices and streams."""
    batch, length, streams, columns = a.x
    count: int = 2 * batch * length * streams * streams * columns
    return count


def _product(a: Args) -> int:
    """Operations of the product of phi and the streams of all tokens."""
    batch, length = a.x[:2]
    count: int = 2 * batch * length * a.phi[0] * a.phi[1]
    return count


Operator(
    "mhc_pre_fwd(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma=None, float eps=1e-6) -> "
    "(Tensor h_in, Tensor h_post, Tensor h_res, Tensor inv_rms, Tensor h_mix, Tensor h_pre)",
    check=lambda a: _check_gates(a, a.bias),
    fake=_fake_pre,
    reference=reference.mhc_pre_fwd,
    # In the order in which mhc_pre_bwd takes them, after the gradients.
    saves=("x", "phi", "alpha", "gamma", "h_post", "inv_rms", "h_mix", "h_pre"),
    backward=_pre_backward,
    constant_results=("inv_rms", "h_mix", "h_pre"),
    cast=("x",),
    flops=_product,
)
Operator(
    "mhc_pre_bwd(Tensor dh_in, Tensor dh_post, Tensor dh_res, Tensor x, Tensor phi, Tensor alpha, Tensor? gamma, "
    "Tensor h_post, Tensor inv_rms, Tensor h_mix, Tensor h_pre, float eps=1e-6) -> "
    "(Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)",
    check=_check_pre_bwd,
    fake=_fake_pre_bwd,
    reference=reference.mhc_pre_bwd,
    flops=lambda a: 2 * _product(a),
)
Operator(
    f"mhc_post_fwd({_POST}) -> Tensor",
    check=_check_post,
    fake=lambda a: a.x.new_empty(a.x.shape),
    reference=reference.mhc_post_fwd,
    saves=("x", "y", "h_post", "h_res"),
    backward=_post_backward,
    cast=("x", "y"),
    flops=_mixing,
)
Operator(
    f"mhc_post_bwd(Tensor dout, {_POST}) -> (Tensor dx, Tensor dy, Tensor dh_post, Tensor dh_res)",
    check=_check_post_bwd,
    fake=lambda a: tuple(t.new_empty(t.shape) for t in (a.x, a.y, a.h_post, a.h_res)),
    reference=reference.mhc_post_bwd,
    flops=lambda a: 2 * _mixing(a),  # the gradients of x and of the matrices
)
