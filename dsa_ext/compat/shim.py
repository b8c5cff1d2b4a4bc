"""Packages `flash_mla` and `deep_gemm` that export the functions of this package.

Where the library itself is installed too, its functions that are not served here remain available under its name.
Modules within it are not touched.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path

NAMES = ("flash_mla", "deep_gemm")
#: Served functions that remain those of an installed library: its other functions, such as GEMMs, obey them.
_THEIRS = ("get_num_sms", "set_num_sms")
_MARK = "on dsa_ext, written by `python -m dsa_ext.compat install-shim`"
_SOURCE = f'''"""{{name}} {_MARK}."""

from dsa_ext.compat import shim

shim.load(__name__, __path__)
'''


def install(folder: Path, names: Sequence[str] = NAMES) -> list[Path]:
    """Writes packages of these names into `folder`, which then has to be first on PYTHONPATH. Returns the files.

    Raises:
        FileExistsError: a file there is not a shim. Nothing was written.
    """
    paths = [folder / name / "__init__.py" for name in names]
    for path in paths:
        if path.exists() and _MARK not in path.read_text(errors="replace"):
            raise FileExistsError(f"{path} is not a shim of dsa_ext: give another folder")
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_SOURCE.format(name=path.parent.name))
    return paths


def load(name: str, path: list[str]) -> None:
    """Called while the package `name` of a shim in `path` is imported: makes it the library that is installed, if there
    is one, with the functions served here in place of its own, except for `_THEIRS`."""
    served = importlib.import_module(f"dsa_ext.compat.{name}")
    shim = sys.modules[name]
    spec = _installed(name, path)
    is_theirs = spec is not None and _import(spec)
    if not is_theirs:
        sys.modules[name] = shim
        shim.__getattr__ = served.__getattr__  # type: ignore[method-assign]
        shim.__all__ = served.__all__  # type: ignore[attr-defined]
    for function in served.__all__:
        if not (is_theirs and function in _THEIRS and hasattr(sys.modules[name], function)):
            setattr(sys.modules[name], function, getattr(served, function))


def _installed(name: str, path: list[str]) -> ModuleSpec | None:
    """The package of this name that would be imported if there were no shim."""
    shims = {Path(folder).resolve().parent for folder in path}
    spec = PathFinder.find_spec(name, [folder for folder in sys.path if Path(folder).resolve() not in shims])
    return spec if spec is not None and spec.loader is not None else None


def _import(spec: ModuleSpec) -> bool:
    """Imports the package of `spec` in place of the shim. Returns False if this fails."""
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # built for another torch, CUDA or GPU
        text = f"{spec.origin} cannot be imported ({error}): only what dsa_ext serves is available as {spec.name}"
        warnings.warn(text, stacklevel=2)
        return False
    return True
