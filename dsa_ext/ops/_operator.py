"""Declaration of an operator: its schema and its functions, in one place. Its registration follows from that.

The schema gives the operator's name, its arguments with their defaults, and its results. The functions of a declaration
take the arguments as one record: a named tuple with one field per argument, in the order of the schema.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dsa_ext.ops import _library
from dsa_ext.ops._checks import check_are_tensors

Args = Any  # a record: mypy does not know its fields
Results = Tensor | tuple[Tensor, ...]

#: All operators by name.
OPERATORS: dict[str, "Operator"] = {}


class Operator:
    """Declares torch.ops.dsa.<name>. The compiled library adds its CUDA implementation.

    Args:
        schema: as for torch.library.Library.define.
        check: raises an error if an argument is invalid, as far as its metadata shows. That a required tensor is not
            None has been checked before.
        fake: allocates the results.
        reference: the CPU implementation. Its parameters are names of arguments of the schema, and it gets only these.
        composite: instead of `reference`, an implementation that calls other operators, for every device.
        saves: names of the arguments and results, all tensors, that are saved for `backward`. The arguments that are
            not tensors are always saved.
        backward: takes a record of what is saved and one gradient per result (None for a result that has none), and
            returns gradients by argument name. Without it the results have no gradient. The results of an operator
            whose name ends with _bwd are gradients, and differentiating them again is an error.
        constant_results: names of the results that have no gradient even so.
        autograd: instead of `backward`, a torch.autograd.Function, which also gets the dispatch keys below autograd.
        cast: names of the arguments that torch.autocast casts to bf16.
        flops: takes a record of the arguments, with shapes for tensors, and returns the number of operations for
            torch.utils.flop_counter. Operators with matrix products have it.

    The last argument of an operator whose gradients may depend on the order of additions is `deterministic`.
    torch.use_deterministic_algorithms sets it where these are computed, in operators whose name ends with _bwd.
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
        #: The type of the record of the arguments. Its attribute `op` is the operator's name.
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
        if self.name.endswith("_bwd") and self.arguments[-1] == "deterministic":
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
        arguments = self.overload._schema.arguments
        required = [i for i, argument in enumerate(arguments) if str(argument.type) == "Tensor"]

        def checked(*args: Any, **options: Any) -> Results:
            record = self.bind(*args, **options)
            for i in required:
                if record[i] is None:
                    check_are_tensors(self.name, record)
            check(record)
            return compute(record)

        return checked

    def _autograd_function(
        self, saves: tuple[str, ...], backward: Callable[..., dict[str, Tensor | None]], constant: tuple[str, ...]
    ) -> type[torch.autograd.Function]:
        redispatch, defaults, names = self.overload.redispatch, self.defaults, self.arguments
        everything = [*names, *self.results]
        tensors_of = _selection([everything.index(name) for name in saves])
        types = [str(argument.type) for argument in self.overload._schema.arguments]
        options = [i for i, name in enumerate(names) if "Tensor" not in types[i]]
        options_of = _selection(options)
        saved = self._record([*saves, *(names[i] for i in options)], defaults=False)
        constants = [self.results.index(name) for name in constant]

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, keyset: torch._C.DispatchKeySet, *args: Any) -> Results:
                with torch._C._AutoDispatchBelowAutograd():
                    results: Results = redispatch(keyset, *args)
                known = args + defaults[len(args) :] + (results if isinstance(results, tuple) else (results,))
                ctx.save_for_backward(*tensors_of(known))
                ctx.options = options_of(known)
                if constants:
                    ctx.mark_non_differentiable(*[results[i] for i in constants])
                ctx.set_materialize_grads(False)
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
                found = backward(saved(*ctx.saved_tensors, *ctx.options), *gradients)
                return None, *map(found.get, names)

        return Function


def _selection(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that returns the items at these places, a microsecond faster than a list comprehension."""
    return itemgetter(*places) if len(places) > 1 else lambda items: tuple(items[i] for i in places)
