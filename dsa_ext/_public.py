"""What a module has to offer, so that no list of it is kept by hand."""

from collections.abc import Callable
from inspect import isfunction
from typing import Any


def functions_of(namespace: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """The public functions that the module with these globals defines itself, by name."""
    return {
        name: value
        for name, value in namespace.items()
        if isfunction(value) and value.__module__ == namespace["__name__"] and not name.startswith("_")
    }
