"""A linear layer with an fp8 weight, for inference."""

import torch
from torch import Tensor, nn

from dsa_ext import functional
from dsa_ext.nn.projections import replacement_of, type_name
from dsa_ext.ops._checks import check_sizes, describe
from dsa_ext.reference.fp8 import BLOCK


class FP8Linear(nn.Module):
    """`nn.Linear` for inference with weight and input in fp8: both with block scales, see :func:`dsa_ext.fp8_gemm`.

    Buffers: `weight` [out_features, in_features], float8_e4m3fn; `weight_scale` [ceil(out_features / 128),
    in_features / 128], its rows padded to a multiple of 4; `bias` [out_features], bf16, or None.

    Args:
        linear: the layer to convert, without hooks and with the forward of nn.Linear. Its in_features must be a
            multiple of 128.
        round_scale: whether the scales of weight and input are powers of two.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, *, round_scale: bool = False) -> None:
        super().__init__()
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"FP8Linear: linear must be an nn.Linear, got {type_name(linear)}")
        replacement = replacement_of(linear)
        if replacement is not None:  # it would be lost
            raise ValueError(f"FP8Linear: linear must be a plain nn.Linear, got {replacement}: {type_name(linear)}")
        if not linear.weight.is_floating_point():
            raise ValueError(f"FP8Linear: the weight must be floating-point, got {describe(linear.weight)}")
        check_sizes("FP8Linear", in_features=linear.in_features, out_features=linear.out_features)
        self.in_features, self.out_features, self.round_scale = linear.in_features, linear.out_features, round_scale
        weight, scale = functional.prepare_weight(linear.weight.float(), round_scale)
        self.register_buffer("weight", weight)
        # Stored with its padding: a view without it would lose the padding when it is copied to another device.
        self.register_buffer("weight_scale", scale.as_strided((scale.shape[0], scale.stride(0)), scale.stride()))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features], bf16 or fp32, to [..., out_features], bf16."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError("FP8Linear: it has no gradients, call under torch.no_grad()")
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(f"FP8Linear: x must be [..., {self.in_features}], got {list(x.shape)}")
        rows, scales = functional.act_quant(x.reshape(-1, self.in_features), round_scale=self.round_scale)
        weight_scale = self.weight_scale[:, : self.in_features // BLOCK]
        out = functional.fp8_gemm(rows, scales, self.weight, weight_scale)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], self.out_features)
