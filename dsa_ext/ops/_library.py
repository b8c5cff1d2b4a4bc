"""Registration of the operators with PyTorch: the torch.library fragment, the error for a missing kernel, autograd, the
deterministic switch and autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from dsa_ext import _native
from dsa_ext.ops._checks import check_are_tensors, describe, dtype_name, fail

#: Schemas are defined here, in Python, so that a pure-Python install has the operators too; the compiled library adds
#: the CUDA implementations.
library = torch.library.Library("dsa", "DEF")

_NO_TRANSFORMS = "the gradient transforms of torch.func are not supported, use torch.autograd"
_AUTOCAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def explain_missing_cuda(op: str) -> None:
    """If the compiled library is missing, or too old to have `op`, makes CUDA calls of `op` raise an explanation."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"dsa::{op}", "CUDA"):
        return

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise _native.missing_kernels_error(op)

    library.impl(op, missing, "CUDA")


def use_autograd_function(op: str, function: type[torch.autograd.Function]) -> None:
    """Registers `function` as the autograd implementation of `op`. It gets the dispatch keys below autograd and the
    arguments, except trailing ones that equal their defaults: the dispatcher leaves these out."""
    # torch.library.register_autograd does the same at more than twice the cost per call.
    _above_devices(op, function.apply)


def differentiable_once(op: str) -> None:
    """Registers `op`, whose results are gradients, with autograd such that differentiating these is an error."""
    redispatch = getattr(torch.ops.dsa, op).default.redispatch

    def with_gradient(keyset: torch._C.DispatchKeySet, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            gradients = redispatch(keyset, *args)
        return not_differentiable_again(op, gradients, *args)

    _above_devices(op, with_gradient)


def without_gradient(op: str) -> None:
    """Registers `op` with autograd as an operator whose results never require a gradient."""
    redispatch = getattr(torch.ops.dsa, op).default.redispatch

    def with_gradient(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return redispatch(keyset, *args)

    _above_devices(op, with_gradient)


def _above_devices(op: str, with_gradient: Callable[..., Any]) -> None:
    """Registers `with_gradient` as what `op` calls if a gradient is required; otherwise `op` redispatches directly."""
    redispatch = getattr(torch.ops.dsa, op).default.redispatch
    any_requires_grad = torch._C._any_requires_grad
    transforms_active = torch._C._are_functorch_transforms_active

    def autograd(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        keyset = keyset & torch._C._after_autograd_keyset
        try:
            if forward_ad._current_level >= 0:
                refuse_tangents(op, args)
            if torch.is_grad_enabled() and any_requires_grad(*args):
                if transforms_active():
                    fail(op, _NO_TRANSFORMS)
                return with_gradient(keyset, *args)
            return redispatch(keyset, *args)
        except (AttributeError, RuntimeError):
            # The dispatcher passes None for a tensor on, and a CUDA implementation cannot say which argument it is.
            check_are_tensors(op, args)
            raise

    library.impl(op, autograd, "Autograd", with_keyset=True)


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active. An operator then has to be called
    through the dispatcher, where it becomes a loop or an error, and code around it has to be plain formulas, since
    these do not take the autograd functions of this package."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_reentrant_checkpointing(indexer_tensors: tuple[Tensor, ...]) -> None:
    """Raises an error if an indexer learns in a forward pass that a backward pass repeats after one without gradients:
    the loss that the first one did not return has no gradient then, for which autograd takes 1."""
    if is_compiling() or torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return
    reentrant = torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # of checkpointing that is not
    if reentrant and any(t.requires_grad for t in indexer_tensors):
        raise RuntimeError(
            "SparseMLA: reentrant checkpointing cannot train the indexer, since its first forward pass returns no "
            "indexer_loss; call torch.utils.checkpoint with use_reentrant=False"
        )


def refuse_batched_gradients(where: str, *gradients: Tensor | None) -> None:
    """Raises an error in the backward pass of a function that writes to its memory, if autograd runs it for several
    gradients at once."""
    if not is_compiling() and any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
        raise RuntimeError(f"{where}: batched gradients (is_grads_batched=True) are not supported")


def refuse_tangents(op: str, args: tuple[Any, ...]) -> None:
    """Raises an error if an argument has a tangent, that of forward-mode differentiation."""
    for arg in args:
        if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            fail(op, "forward-mode differentiation (jvp) is not supported")


def refuse_derivatives(op: str, args: tuple[Any, ...]) -> None:
    """Raises an error if a transform of torch.func, or forward-mode differentiation, asks for derivatives of a function
    that detaches its arguments: they would be 0."""
    refuse_tangents(op, args)
    if torch._C._are_functorch_transforms_active() and torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
        fail(op, _NO_TRANSFORMS)


def refuse_cache_in_transforms(where: str) -> None:
    """Raises an error in a transform of torch.func: a cache is memory that is written in place."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{where}: a cache cannot be used in the transforms of torch.func, such as vmap")


class _NotDifferentiableAgain(torch.autograd.Function):
    """Returns the first `count` tensors unchanged, as results of all tensors; its backward is an error."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        ctx.op = op
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        fail(
            ctx.op,
            "second derivatives (create_graph=True) are not supported",
        )


def not_differentiable_again(op: str, gradients: tuple[Any, ...], *sources: Any) -> tuple[Any, ...]:
    """Gradients that depend on `sources`: if autograd records a graph, differentiating them again is an error."""
    if not torch.is_grad_enabled():
        return gradients
    result: tuple[Any, ...] = _NotDifferentiableAgain.apply(op, len(gradients), *gradients, *sources)  # type: ignore[no-untyped-call]
    return result


def follow_deterministic_switch(op: str) -> None:
    """Makes torch.use_deterministic_algorithms imply `deterministic`, the last argument of `op`.

    The switch is read at the BackendSelect key, just before the dispatcher reaches a device's implementation. Every
    call passes there, also from another operator, under torch.inference_mode and from a compiled graph.
    """
    overload = getattr(torch.ops.dsa, op).default
    defaults = tuple(argument.default_value for argument in overload._schema.arguments)
    redispatch = overload.redispatch
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def select(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled():
            args = (*args, *defaults[len(args) :])
            args = (*args[:-1], True)
        return redispatch(keyset & below, *args)

    library.impl(op, select, "BackendSelect", with_keyset=True)


def as_autocast(tensor: Any) -> Any:
    """What autocast, if it is enabled, passes to an operator in place of a tensor that it casts."""
    if tensor is None or tensor.dtype not in _AUTOCAST_DTYPES:
        return tensor
    return tensor.bfloat16() if autocast_dtype(tensor) == torch.bfloat16 else tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """That of autocast on the tensor's device; None if it is not enabled there."""
    device = tensor.device.type
    is_enabled = device in ("cuda", "cpu") and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_enabled else None


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """For gradients: what the forward has saved is cast, and autocast may have been enabled since."""
    return nullcontext() if autocast_dtype(tensor) is None else torch.autocast(tensor.device.type, enabled=False)


def check_input(module: str, x: Any, weight: Tensor | None, columns: int | None = None, name: str = "x") -> None:
    """Raises an error if x is no tensor; not [B, S, columns] or of another dtype than the weight [out, columns] by
    which the module multiplies it, as far as these are given; or under autocast, which casts both, in another dtype
    than bf16, which no operator takes."""
    if columns is None and weight is not None:
        columns = weight.shape[1]
    if not isinstance(x, Tensor) or (columns is not None and (x.dim() != 3 or x.shape[2] != columns)):
        expected = "a tensor" if columns is None else f"[B, S, {columns}]"
        raise ValueError(f"{module}: {name} must be {expected}, got {describe(x)}")
    dtype = autocast_dtype(x)
    if dtype not in (None, torch.bfloat16):
        raise RuntimeError(f"{module}: autocast must use bfloat16, got {dtype_name(dtype)}")
    if weight is None:
        return
    if dtype is None and x.dtype != weight.dtype:
        raise ValueError(f"{module}: {name} must be {dtype_name(weight.dtype)} like the parameters, got {describe(x)}")
    # What autocast does not cast.
    if not x.is_floating_point() or (x.dtype == torch.float64) != (weight.dtype == torch.float64):
        expected = "float64" if weight.dtype == torch.float64 else "float32 or bfloat16"
        raise ValueError(f"{module}: {name} must be {expected} like the parameters, got {describe(x)}")


def follow_autocast(op: str, *names: str) -> None:
    """Makes torch.autocast cast the arguments `names` of `op` to bf16, as it does for scaled_dot_product_attention.
    Under another autocast dtype, which no operator takes, they are unchanged.

    Nothing within the operator is cast: arguments that must be fp32 remain fp32, and the CPU implementation computes in
    its documented precision.
    """
    overload = getattr(torch.ops.dsa, op).default
    cast = {i for i, argument in enumerate(overload._schema.arguments) if argument.name in names}

    def register(key: torch._C.DispatchKey) -> None:
        keys = torch._C.DispatchKeySet(key)

        def autocast(*args: Any) -> Any:
            args = tuple(as_autocast(arg) if i in cast else arg for i, arg in enumerate(args))
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return overload(*args)

        library.impl(op, autocast, key.name)

    register(torch._C.DispatchKey.AutocastCUDA)
    register(torch._C.DispatchKey.AutocastCPU)
