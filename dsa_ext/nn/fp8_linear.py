"""A linear layer with an fp8 weight, for inference."""

import torch
from torch import Tensor, nn

from dsa_ext import functional
from dsa_ext.nn.projections import replacement_of, type_name
from dsa_ext.ops._checks import check_sizes, describe
from dsa_ext.reference.fp8 import BLOCK

#: Rows of scales begin at multiples of 16 bytes.
_SCALE_COLUMNS = 4


class FP8Linear(nn.Module):
    """`nn.Linear` for inference with weight and input in fp8: both with block scales, see :func:`dsa_ext.fp8_gemm`.

    Buffers: `weight` [out_features, in_features], float8_e4m3fn; `weight_scale` [ceil(out_features / 128), in_features
    / 128, rounded up to a multiple of 4], fp32, the factor of each block of 128 x 128; `bias` [out_features], bf16, or
    None.

    Args:
        linear: the layer to convert, without hooks and with the forward of nn.Linear. Its in_features must be a
            multiple of 128. For a weight in fp8 there is :meth:`from_quantized`.
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
        if linear.weight.itemsize == 1:  # its scales would be lost
            hint = ": use from_quantized" if linear.weight.dtype == torch.float8_e4m3fn else ""
            raise ValueError(f"FP8Linear: the weight must not be quantized yet, got {describe(linear.weight)}{hint}")
        check_sizes("FP8Linear", in_features=linear.in_features, out_features=linear.out_features)
        self._set(*functional.prepare_weight(linear.weight.float(), round_scale), linear.bias, round_scale)

    @classmethod
    def from_quantized(
        cls, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None, *, round_scale: bool = False
    ) -> "FP8Linear":
        """From a weight that is quantized already, as in checkpoints of DeepSeek-V3: there `weight_scale` is called
        `weight_scale_inv`, and is also what a block is multiplied by. A contiguous weight is not copied.

        Args:
            weight: [out_features, in_features], float8_e4m3fn, in_features a multiple of 128.
            weight_scale: the factor of each block of 128 x 128 [ceil(out_features / 128), in_features / 128], fp32 or
                float8_e8m0fnu.
            bias: [out_features].
            round_scale: whether the scales of the input are powers of two.
        """
        given = {"weight": weight, "weight_scale": weight_scale} | ({} if bias is None else {"bias": bias})
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"FP8Linear: {name} must be a tensor, got {type(tensor).__name__}")
            if tensor.device != weight.device:
                expected = f"on the device of weight, {weight.device}"
                raise ValueError(f"FP8Linear: {name} must be {expected}, got {tensor.device}")
        if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2 or weight.shape[1] % BLOCK != 0:
            expected = f"float8_e4m3fn [out_features, multiple of {BLOCK}]"
            raise ValueError(f"FP8Linear: weight must be {expected}, got {describe(weight)}")
        check_sizes("FP8Linear", out_features=weight.shape[0], in_features=weight.shape[1])
        shape = (-(-weight.shape[0] // BLOCK), weight.shape[1] // BLOCK)
        if weight_scale.dtype not in (torch.float32, torch.float8_e8m0fnu) or weight_scale.shape != shape:
            expected = f"float32 or float8_e8m0fnu {list(shape)}"
            raise ValueError(f"FP8Linear: weight_scale must be {expected}, got {describe(weight_scale)}")
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
            raise ValueError(f"FP8Linear: bias must be floating-point [{weight.shape[0]}], got {describe(bias)}")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set(weight, weight_scale.float(), bias, round_scale)
        return layer

    def _set(self, weight: Tensor, scale: Tensor, bias: Tensor | None, round_scale: bool) -> None:
        self.out_features, self.in_features = weight.shape
        self.round_scale = round_scale
        self.register_buffer("weight", weight.detach().contiguous())
        # With its padding: a view without it would lose the padding when it is copied to another device.
        padded = nn.functional.pad(scale.detach(), (0, -scale.shape[1] % _SCALE_COLUMNS))
        self.register_buffer("weight_scale", padded.contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().bfloat16())

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"round_scale={self.round_scale}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_features], bf16 or fp32, to [..., out_features], bf16."""
        if not isinstance(x, Tensor):
            raise TypeError(f"FP8Linear: x must be a tensor, got {type(x).__name__}")
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
