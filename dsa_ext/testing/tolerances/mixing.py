"""Error bounds of gated_fusion, the hyper-connections and fp8_gemm."""

from typing import Any

import torch
from torch import Tensor

from dsa_ext import reference
from dsa_ext.reference import gated_fusion, mhc
from dsa_ext.reference.fp8 import BLOCK
from dsa_ext.testing.tolerances.limits import (
    BF16_ROUNDING,
    FP8_SIMILARITY,
    FP32_ELEMENTWISE,
    FP32_RESOLUTION,
    FP32_SIMILARITY,
    SIMILARITY,
    SUM_OF_FP8_PRODUCTS,
    SUM_OF_PRODUCTS,
    TINY,
    Expected,
    overflows,
    wide,
)

#: Relative error of an fp32 factor that is split into two bf16 numbers for the tensor cores: it keeps 16 bits.
SPLIT = 2.0**-16


def rounded(name: str, value: Tensor, noise: Tensor, free: Tensor | None = None, terms: int = 1) -> Expected:
    """A bf16 result that is rounded once. `noise` bounds the |error| of an fp32 sum of `terms` terms."""
    return Expected(
        name,
        value,
        bound=BF16_ROUNDING * value.abs() + noise + TINY,
        noise=noise * max(1, terms) ** -0.5 + TINY,
        similarity=SIMILARITY,
        roundings=1,
        free=overflows(value, noise) if free is None else free | overflows(value, noise),
        loose=torch.ones_like(value, dtype=torch.bool),
    )


def single(name: str, value: Tensor, noise: Tensor, free: Tensor | None = None, terms: int = 1) -> Expected:
    """The same for an fp32 result."""
    expected = rounded(name, value, noise, free, terms)
    expected.bound = FP32_ELEMENTWISE * value.abs() + noise + TINY
    expected.similarity, expected.roundings = FP32_SIMILARITY, 0
    return expected


# ---- gated fusion


def _shares(args: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of fine and of coarse, and the bound of the |error| of both."""
    fine_share, coarse_share = gated_fusion.shares(args["fine"], args["gate"])
    return fine_share, coarse_share, FP32_ELEMENTWISE * fine_share * coarse_share + TINY


def gated_fusion_fwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    fine, coarse = args["fine"].abs(), args["coarse"].abs()
    fine_share, coarse_share, off = _shares(args)
    noise = 4 * FP32_RESOLUTION * (fine_share * fine + coarse_share * coarse) + off * (fine + coarse)
    return [rounded("out", reference.gated_fusion_fwd(**args), noise)]


def gated_fusion_bwd(args: dict[str, Any]) -> list[Expected]:
    expected_dgate = rounded if args["gate"].dtype == torch.bfloat16 else single
    args = wide(args)
    dfine, dcoarse, dgate = reference.gated_fusion_bwd(**args)
    fine_share, coarse_share, off = _shares(args)
    dout = args["dout"].abs()
    terms = (dout * (args["fine"].abs() + args["coarse"].abs())).sum(-1)
    noise = (SUM_OF_PRODUCTS * (fine_share * coarse_share)[..., 0] + TINY) * terms
    return [
        rounded("dfine", dfine, off * dout),
        rounded("dcoarse", dcoarse, off * dout),
        expected_dgate("dgate", dgate, noise, overflows(terms), dout.shape[-1]),
    ]


# ---- fp8_gemm


def fp8_gemm(args: dict[str, Any]) -> list[Expected]:
    a, a_s, b, b_s = (wide(args)[name] for name in ("a", "a_s", "b", "b_s"))
    rows = b_s.repeat_interleave(BLOCK, 0)[: len(b)]

    def scaled(x: Tensor, scales: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, BLOCK)) * scales[..., None]).flatten(-2) if x.shape[-1] else x

    value = scaled(a, a_s) @ scaled(b, rows).mT
    magnitude = scaled(a.abs(), a_s.abs()) @ scaled(b.abs(), rows.abs()).mT
    # Intermediate results: the sum of a block's products, and the product of both scales.
    products = a.abs().amax() * b.abs().amax() * BLOCK if a.numel() and b.numel() else magnitude.new_zeros(())
    scales = a_s.abs() @ rows.abs().mT if a_s.numel() and rows.numel() else torch.zeros_like(magnitude)
    noise = SUM_OF_FP8_PRODUCTS * magnitude + TINY * (1 + products.nan_to_num(0, 0, 0))
    expected = rounded("out", value, noise, overflows(magnitude, scales), a.shape[1])
    expected.similarity = FP8_SIMILARITY
    return [expected]


# ---- hyper-connections


def _gate(sums: Tensor, noise: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """scale * sigmoid(sums), and the bound of its |error|."""
    s = sums.sigmoid()
    off = (s * (1 - s) * noise.clamp(max=30).expm1()).clamp(max=1)
    return scale * s, scale * off


def mhc_pre_fwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    x, phi, alpha, bias, gamma = (args[name] for name in ("x", "phi", "alpha", "bias", "gamma"))
    h_in, h_post, h_res, inv_rms, h_mix, h_pre = reference.mhc_pre_fwd(**args)
    streams, flat = x.shape[2], x.flatten(2)
    scaled = (phi if gamma is None else phi * gamma).abs()
    mean = flat.square().mean(-1) + args["eps"]
    free = overflows(mean * flat.shape[-1]) | (mean < 1e-30)
    inv_noise = (FP32_ELEMENTWISE + TINY / mean) * inv_rms
    mix_noise = SPLIT * (flat.abs() @ scaled.mT) + TINY * (flat.abs().sum(-1, keepdim=True) + 1)
    free_mix = free[..., None] | overflows(flat.abs() @ scaled.mT)
    free_any = free_mix.any(-1, keepdim=True)
    t = h_mix * inv_rms[..., None]
    t_noise = mix_noise * inv_rms[..., None] + h_mix.abs() * inv_noise[..., None]
    parts = zip(alpha, mhc.split(t, streams), mhc.split(t_noise, streams), mhc.split(bias, streams), strict=True)
    sums, noises = [], []
    for a, part, noise, b in parts:
        sums.append(a * part + b)
        noises.append(a.abs() * noise + 4 * FP32_RESOLUTION * ((a * part).abs() + b.abs()))
    pre_noise, post_noise = _gate(sums[0], noises[0], 1.0)[1], _gate(sums[1], noises[1], 2.0)[1]
    rows = x.abs()
    # An infinite sum may become NaN when its factors are split in two, and with it all that is computed from it.
    free_any = free_any | h_mix.isinf().any(-1, keepdim=True)
    in_noise = ((pre_noise + 8 * FP32_RESOLUTION * h_pre)[..., None] * rows).sum(2) + TINY * rows.sum(2)
    terms = flat.shape[-1]
    return [
        rounded("h_in", h_in, in_noise, free_any),
        single("h_post", h_post, post_noise, free_any, terms),
        single("h_res", h_res, noises[2], free_any[..., None] | overflows(h_res), terms),
        single("inv_rms", inv_rms, inv_noise, free),
        single("h_mix", h_mix, mix_noise, free_mix, terms),
        single("h_pre", h_pre, pre_noise, free_any, terms),
    ]


def mhc_pre_bwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    x, phi, alpha, gamma, eps = (args[name] for name in ("x", "phi", "alpha", "gamma", "eps"))
    h_post, inv_rms, h_mix, h_pre = (args[name] for name in ("h_post", "inv_rms", "h_mix", "h_pre"))
    dx, dphi, dalpha, dbias, dgamma = reference.mhc_pre_bwd(**args)
    streams, upstream, flat = x.shape[2], args["dh_in"], x.flatten(2)
    scale = 1.0 if gamma is None else gamma.abs()

    # Gradients of the sums that the gates are functions of: their magnitudes and the bounds of their |error|.
    share = h_pre - eps
    products = (upstream[:, :, None] * x).abs().sum(-1)
    slope = (share * (1 - share)).abs()
    dpost = (args["dh_post"] * h_post * (1 - h_post / 2)).abs()
    magnitude = mhc.join(products * slope, dpost, args["dh_res"].abs())
    steep = (h_pre + share.abs()) * (1 + share.abs())
    dpre_noise = SUM_OF_PRODUCTS * products * slope + FP32_RESOLUTION * 4 * products * steep
    dpost_noise = 4 * FP32_RESOLUTION * (args["dh_post"] * h_post).abs()
    noise = mhc.join(dpre_noise, dpost_noise, 2 * FP32_RESOLUTION * args["dh_res"].abs()) + TINY

    each_alpha = mhc.join(
        *(a.abs().expand_as(part) for a, part in zip(alpha, mhc.split(magnitude, streams), strict=True))
    )
    mix_scale = inv_rms[..., None] * each_alpha
    mix, mix_noise = magnitude * mix_scale, noise * mix_scale + SPLIT * magnitude * mix_scale + TINY
    inner = mix @ phi.abs()
    scaled_noise = mix_noise @ phi.abs() + SPLIT * inner
    along = (magnitude * each_alpha * h_mix.abs()).sum(-1)
    along_noise = (noise * each_alpha * h_mix.abs()).sum(-1) + SUM_OF_PRODUCTS * along
    factor = inv_rms.abs() ** 3 / max(1, flat.shape[-1])
    off = (along_noise + FP32_ELEMENTWISE * along) * factor + along * TINY  # inv_rms^3 may be too small for fp32
    dx_noise = scale * scaled_noise + off[..., None] * flat.abs()
    dx_total = scale * inner + (along * factor)[..., None] * flat.abs()
    dx_noise = (dx_noise + 4 * FP32_RESOLUTION * dx_total).unflatten(2, (streams, -1))
    dx_noise = dx_noise + 4 * FP32_RESOLUTION * h_pre[..., None] * upstream[:, :, None].abs()
    tokens = x.shape[0] * x.shape[1]
    xs = (flat * scale).abs()
    over = overflows(products).any(-1) | overflows(dx_total, mix @ phi.abs()).any(-1) | overflows(along, inv_rms**3)
    some = over.any() if over.numel() else torch.zeros((), dtype=torch.bool, device=x.device)

    def token_sum(name: str, value: Tensor, off: Tensor, total: Tensor, terms: int = 1) -> Expected:
        return single(name, value, off + SUM_OF_PRODUCTS * total, some | overflows(total), tokens * terms)

    t = (h_mix * inv_rms[..., None]).abs()
    total_sums, noise_sums = (
        mhc.split((m * t).sum((0, 1)), streams) for m in (magnitude, noise + FP32_ELEMENTWISE * magnitude)
    )
    return [
        rounded("dx", dx, dx_noise, over[..., None, None] if over.numel() else None),
        token_sum("dphi", dphi, torch.einsum("bsm,bsc->mc", mix_noise, xs), torch.einsum("bsm,bsc->mc", mix, xs)),
        token_sum(
            "dalpha", dalpha, torch.stack([p.sum() for p in noise_sums]), torch.stack([p.sum() for p in total_sums])
        ),
        token_sum("dbias", dbias, noise.sum((0, 1)), magnitude.sum((0, 1))),
        Expected("dgamma", dgamma, dgamma, dgamma, None)
        if gamma is None
        else token_sum(
            "dgamma", dgamma, (flat.abs() * scaled_noise).sum((0, 1)), (flat.abs() * inner).sum((0, 1)), len(phi)
        ),
    ]


def _mixing(h_res: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """The normalized weights and the bound of their |error|: each step adds its rounding error to their logarithms."""
    steps = mhc.sinkhorn(h_res, iterations)
    mixing = steps[-1].exp()
    largest = torch.stack([h_res, *steps]).abs().nan_to_num(0, 0, 0).amax((0, -2, -1))[..., None, None]
    unsure = FP32_RESOLUTION * (1 + 2 * iterations) * (2 + largest)
    return mixing, mixing * unsure.clamp(max=30).expm1() + TINY


def mhc_post_fwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    x, y, h_post = (args[name].abs() for name in ("x", "y", "h_post"))
    value = reference.mhc_post_fwd(**args)
    mixing, off = _mixing(args["h_res"], args["iterations"])
    terms = mixing @ x + h_post[..., None] * y[:, :, None]
    noise = off.clamp(max=1) @ x + 4 * FP32_RESOLUTION * terms
    return [
        rounded(
            "out", value, noise, overflows(terms, args["h_res"].abs().amax((-2, -1))[..., None, None].expand_as(terms))
        )
    ]


def mhc_post_bwd(args: dict[str, Any]) -> list[Expected]:
    args = wide(args)
    dout, x, y, h_post = (args[name].abs() for name in ("dout", "x", "y", "h_post"))
    dx, dy, dh_post, dh_res = reference.mhc_post_bwd(**args)
    iterations = args["iterations"]
    mixing, off = _mixing(args["h_res"], iterations)
    dh_post_total = (dout * y[:, :, None]).sum(-1)
    products = dout @ x.mT
    # Each step subtracts from every element a share of a sum that is as large as the elements.
    terms = (mixing * products).sum((-2, -1))[..., None, None].expand_as(products)
    unsure = (off / mixing.clamp(min=TINY)).clamp(max=1).amax((-2, -1))[..., None, None]
    noise = (SUM_OF_PRODUCTS * (1 + 2 * iterations) ** 0.5 + 4 * unsure) * terms + TINY * products
    free = overflows(args["h_res"].abs().amax((-2, -1)), products.sum((-2, -1)))[..., None, None]
    dy_total = (h_post[..., None] * dout).sum(2)
    return [
        rounded(
            "dx", dx, (off.clamp(max=1) + 4 * FP32_RESOLUTION * mixing).mT @ dout, free | overflows(mixing.mT @ dout)
        ),
        rounded("dy", dy, 4 * FP32_RESOLUTION * dy_total, overflows(dy_total)),
        single("dh_post", dh_post, SUM_OF_PRODUCTS * dh_post_total, overflows(dh_post_total), dout.shape[-1]),
        single("dh_res", dh_res, noise, free, 1),
    ]
