"""Random legal calls of every operator, of the functions with their gradients, and of the modules: what tests/soak.py
makes. A call is a function of its target's name, a seed and the type of the device."""

from collections.abc import Callable

import torch

from dsa_ext.testing.random_calls import block_sparse, fp8, indexer, mhc, modules, sparse_mla
from dsa_ext.testing.random_calls.call import Args, Call, operator_call
from dsa_ext.testing.random_calls.draw import Draw

__all__ = ["TARGETS", "Call", "Draw", "make_call"]


def _of_operator(op: str, make_args: Callable[[Draw], Args]) -> Callable[[Draw], Call]:
    return lambda draw: operator_call(op, make_args(draw), draw)


#: What can be called, by name: the operators of torch.ops.dsa, then functional.*, then nn.*
TARGETS: dict[str, Callable[[Draw], Call]] = {}
for _family in (sparse_mla, indexer, block_sparse, fp8, mhc):
    TARGETS |= {op: _of_operator(op, make_args) for op, make_args in _family.OPERATORS.items()}
for _calls in (sparse_mla.CALLS, indexer.CALLS, block_sparse.CALLS, mhc.CALLS, modules.CALLS):
    TARGETS |= _calls


def make_call(target: str, seed: int, device: torch.device | str) -> Call:
    """The call of `target` that belongs to `seed`."""
    return TARGETS[target](Draw(seed, device))
