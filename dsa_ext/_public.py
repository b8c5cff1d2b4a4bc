"""The public functions of a module, collected from its definitions so that no list is maintained by hand."""

from collections.abc import Callable
from inspect import isfunction
from typing import Any


def functions_of(namespace: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Public functions by name, given the globals of a module: those that it defines, not those that it imports."""
    return {
        name: value
        for name, value in namespace.items()
        if isfunction(value) and value.__module__ == namespace["__name__"] and not name.startswith("_")
    }
