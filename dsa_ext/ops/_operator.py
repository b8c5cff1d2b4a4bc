"""How an operator is declared: once, by its schema and what belongs to it. Everything else follows from that.

The schema gives the operator's name, its arguments with their defaults, and its results. Functions of a declaration
take the arguments as one record, a named tuple with a field for each argument, in the order of the schema.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext.ops import _library

Args = Any  # a record: mypy does not know its fields
Results = Tensor | tuple[Tensor, ...]

#: All operators by name.
OPERATORS: dict[str, "Operator"] = {}


class Operator:
    """Declares torch.ops.dsa.<name>. The compiled library adds its CUDA implementation.

    Args:
        schema: as for torch.library.Library.define.
        check: raises what is wrong with the arguments, as far as metadata shows it.
        fake: allocates the results.
        reference: the CPU implementation; it takes the arguments that it names, of those of the schema.
        composite: instead of `reference`, an implementation on top of other operators, for every device.
        saves: the tensors that `backward` needs, among arguments and results. It gets all other arguments as well.
        backward: takes a record of what is saved and a gradient for each result, None for one that has none, and
            returns gradients by the names of arguments. Without it results have no gradient; those of an operator whose
            name ends with _bwd are gradients, and to differentiate them again is an error.
        constant_results: those that have no gradient all the same.
        autograd: instead of `backward`, a torch.autograd.Function, which also gets the keys below autograd.
        cast: the arguments that torch.autocast casts to its dtype.
        flops: takes a record of the arguments, with shapes for tensors, and returns the number of operations for
            torch.utils.flop_counter.

    An argument `deterministic`, the last one, is implied by torch.use_deterministic_algorithms.
    """

    def __init__(
        self,
        schema: str,
        *,
        check: Callable[[Args], None],
        fake: Callable[[Args], Results],
        reference: Callable[..., Results] | None = None,
        composite: Callable[[Args], Results] | None = None,
        saves: tuple[str, ...] = (),
        backward: Callable[..., dict[str, Tensor | None]] | None = None,
        constant_results: tuple[str, ...] = (),
        autograd: type[torch.autograd.Function] | None = None,
        cast: tuple[str, ...] = (),
        flops: Callable[[Args], int] | None = None,
    ) -> None:
        self.name = schema.split("(")[0]
        _library.library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        self.overload = getattr(torch.ops.dsa, self.name).default
        self.arguments = [argument.name for argument in self.overload._schema.arguments]
        self.defaults = tuple(argument.default_value for argument in self.overload._schema.arguments)
        self.results = [result.name for result in self.overload._schema.returns]
        #: The record of the arguments, with `op`, the operator's name.
        self.bind = self._record(self.arguments)

        if composite is None:
            assert reference is not None
            composite, key = self._cpu(reference), "CPU"
            _library.explain_missing_cuda(self.name)
        else:
            key = "CompositeExplicitAutograd"
        #: The implementation for the CPU, or for every device.
        self.implementation = self._checked(check, composite)
        _library.library.impl(self.name, self.implementation, key)
        torch.library.register_fake(f"dsa::{self.name}", self._checked(check, fake), lib=_library.library)
        if autograd is None and backward is not None:
            autograd = self._autograd_function(saves, backward, constant_results)
        if autograd is not None:
            _library.use_autograd_function(self.name, autograd)
        elif self.name.endswith("_bwd"):
            _library.differentiable_once(self.name)
        else:
            _library.without_gradient(self.name)
        if self.arguments[-1] == "deterministic":
            _library.follow_deterministic_switch(self.name)
        _library.follow_autocast(self.name, *cast)
        if flops is not None:
            bind, count = self.bind, flops
            register_flop_formula(getattr(torch.ops.dsa, self.name))(
                lambda *args, out_shape=None, **options: count(bind(*args, **options))
            )
        OPERATORS[self.name] = self

    def _record(self, names: list[str], defaults: bool = True) -> Any:
        given = [
            d for a, d in zip(self.overload._schema.arguments, self.defaults, strict=True) if a.has_default_value()
        ]
        fields = namedtuple(self.name, names, defaults=given if defaults else None)  # type: ignore[misc]
        return type(self.name, (fields,), {"__slots__": (), "op": self.name})

    def _cpu(self, reference: Callable[..., Results]) -> Callable[[Args], Results]:
        places = [self.arguments.index(name) for name in inspect.signature(reference).parameters]
        self.reference = reference
        return lambda args: self.reference(*(args[i] for i in places))

    def _checked(self, check: Callable[[Args], None], compute: Callable[[Args], Results]) -> Callable[..., Results]:
        def checked(*args: Any, **options: Any) -> Results:
            record = self.bind(*args, **options)
            check(record)
            return compute(record)

        return checked

    def _autograd_function(
        self, saves: tuple[str, ...], backward: Callable[..., dict[str, Tensor | None]], constant: tuple[str, ...]
    ) -> type[torch.autograd.Function]:
        redispatch, defaults, names = self.overload.redispatch, self.defaults, self.arguments
        everything = [*names, *self.results]
        tensors = [everything.index(name) for name in saves]
        types = [str(argument.type) for argument in self.overload._schema.arguments]
        options = [i for i, name in enumerate(names) if "Tensor" not in types[i]]
        saved = self._record([*saves, *(names[i] for i in options)], defaults=False)
        constants = [self.results.index(name) for name in constant]

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> Results:
                with torch._C._AutoDispatchBelowAutograd():
                    results: Results = redispatch(keyset, *args)
                known = (*args, *defaults[len(args) :], *(results if isinstance(results, tuple) else (results,)))
                ctx.save_for_backward(*[known[i] for i in tensors])
                ctx.options = [known[i] for i in options]
                if constants:
                    ctx.mark_non_differentiable(*[results[i] for i in constants])
                ctx.set_materialize_grads(False)
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                found = backward(saved(*ctx.saved_tensors, *ctx.options), *gradients)
                return None, *[found.get(name) for name in names]

        return Function
