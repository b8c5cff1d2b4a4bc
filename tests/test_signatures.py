"""The signatures at the head of each page of docs/ are those of the code."""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import ROOT

import dsa_ext
import dsa_ext.nn

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SIGNATURE = re.compile(r"^([A-Za-z_][\w.]*)\((.*?)\)(?=\s*(?:->|$))", re.MULTILINE | re.DOTALL)
#: Whose arguments are described in words.
IN_WORDS = {"torch.ops.dsa.sparse_mla_max_fwd"}

Arguments = list[tuple[str, Any]]  # names, and defaults or inspect.Parameter.empty


def signatures() -> Iterator[Any]:
    """Page, name and text between the parentheses, of what stands in blocks without a language."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for language, block in FENCE.findall(page.read_text()):
            for name, arguments in SIGNATURE.findall(block) if not language else []:
                path = page.relative_to(ROOT / "docs")
                yield pytest.param(name, " ".join(arguments.split()), id=f"{path}-{name}")


def written(arguments: str) -> Arguments:
    function = ast.parse(f"def f({arguments}): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    args = function.args
    names = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    required = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    defaults = [None] * required + [*args.defaults, *args.kw_defaults]
    return [
        (name.arg, inspect.Parameter.empty if default is None else eval(ast.unparse(default)))
        for name, default in zip(names, defaults, strict=True)
    ]


def actual(name: str) -> Arguments:
    *path, last = name.split(".")
    if path == ["torch", "ops", "dsa"]:
        schema = getattr(torch.ops.dsa, last).default._schema
        return [
            (a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in schema.arguments
        ]
    # Names without a module are those of modules, and their methods.
    is_function = path[:1] == ["dsa_ext"]
    found: Any = dsa_ext if is_function else dsa_ext.nn
    for part in [*path[is_function:], last]:
        found = getattr(found, part)
    return [(p.name, p.default) for p in inspect.signature(found).parameters.values()]


@pytest.mark.parametrize(("name", "arguments"), list(signatures()))
def test_signature(name: str, arguments: str) -> None:
    if name in IN_WORDS:
        return
    assert written(arguments) == actual(name)
