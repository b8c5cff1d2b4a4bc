"""Random legal calls of every operator, of the functions with their gradients, and of the modules, for tests/soak.py.

The name of the target, a seed and the type of the device determine a call.
"""

from collections.abc import Callable

import torch

from dsa_ext._public import functions_of
from dsa_ext.ops import OPERATORS
from dsa_ext.testing.random_calls import block_sparse, fp8, indexer, indexer_paged, mhc, modules, sparse_mha, sparse_mla
from dsa_ext.testing.random_calls.call import Args, Call, operator_call
from dsa_ext.testing.random_calls.draw import Draw

__all__ = ["TARGETS", "Call", "Draw", "make_call"]


def _target(name: str) -> str:
    """The target of a function of a family: functional_x makes calls of functional.x."""
    return name.replace("_", ".", 1)


def _call_maker(op: str, make_args: Callable[[Draw], Args]) -> Callable[[Draw], Call]:
    return lambda draw: operator_call(op, make_args(draw), draw)


#: All targets by name: the operators of torch.ops.dsa, then functional.*, then nn.*
TARGETS: dict[str, Callable[[Draw], Call]] = {}
_FAMILIES = [
    functions_of(vars(family)) for family in (sparse_mla, sparse_mha, indexer, indexer_paged, block_sparse, fp8, mhc)
]
for _functions in _FAMILIES:
    TARGETS |= {op: _call_maker(op, make_args) for op, make_args in _functions.items() if op in OPERATORS}
TARGETS |= indexer.CALLS | indexer_paged.CALLS
for _functions in _FAMILIES:
    TARGETS |= {_target(name): make for name, make in _functions.items() if name.startswith("functional_")}
TARGETS |= modules.CALLS


def make_call(target: str, seed: int, device: torch.device | str) -> Call:
    """The call of `target` that `seed` determines."""
    return TARGETS[target](Draw(seed, device))
