"""What files may contain and include, read from the sources: the layers of csrc/, its families, the length of files."""

import re
from pathlib import Path

import pytest
from conftest import ROOT

CSRC, MOST_LINES = ROOT / "csrc", 420


def sources(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


FILES = sources(CSRC)
FAMILIES = sorted(path.name for path in (CSRC / "ops").iterdir() if path.is_dir())
OPS = sorted(path.parent.relative_to(CSRC / "ops").as_posix() for path in CSRC.glob("ops/*/*/op.cpp"))
#: A folder, and the folders whose files its own may include.
MAY_INCLUDE = {"sm90/": (), "tiles/": ("sm90/",), "torch/": ()}
MAY_INCLUDE |= {f"ops/{family}/": ("ops/shared/", "tiles/", "sm90/", "torch/") for family in FAMILIES}


def included(name: str) -> set[str]:
    """The files of csrc/ that a file includes, by a path from its own folder or from csrc/."""
    paths = re.findall(r'^#include "(.+)"', FILES[name], flags=re.MULTILINE)
    near = {path: (Path(name).parent / path).as_posix() for path in paths}
    return {near[path] if near[path] in FILES else path for path in paths}


def reached(name: str) -> set[str]:
    """`name`, and all files of csrc/ that it includes, directly or through others."""
    found = new = {name}
    while new:
        new = set().union(*map(included, new)) - found
        found = found | new
    return found


def containing(pattern: str) -> set[str]:
    found = {name for name, text in FILES.items() if re.search(pattern, text, flags=re.MULTILINE)}
    assert found, f"the pattern {pattern} finds nothing"
    return found


def test_only_csrc_torch_includes_torch() -> None:
    assert not [name for name in containing("^#include <torch/") if not name.startswith("torch/")]


def test_only_csrc_sm90_has_inline_ptx() -> None:
    assert not [name for name in containing(r"\basm( volatile)?\s*\(") if not name.startswith("sm90/")]


def test_host_code_includes_no_cute() -> None:
    cute = containing("^#include <(cute|cutlass)/")
    assert not [name for name in FILES if name.endswith(".cpp") and reached(name) & cute]


def test_device_code_includes_no_torch() -> None:
    torch = containing("^#include <torch/")
    assert not [name for name in FILES if name.endswith((".cu", ".cuh")) and reached(name) & torch]


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_layers_and_families(folder: str) -> None:
    others = {(name, other) for name in FILES if name.startswith(folder) for other in included(name)}
    assert not [pair for pair in others if not pair[1].startswith((folder, *MAY_INCLUDE[folder]))]


@pytest.mark.parametrize("op", OPS)
def test_every_operator_has_its_tests(op: str) -> None:
    family, name = op.split("/")
    assert not [end for end in (".py", "_gpu.py") if not (ROOT / f"tests/{family}/test_{name}{end}").is_file()]


@pytest.mark.parametrize("folder", ["csrc", "dsa_ext", "tests", "bench"])
def test_files_are_short(folder: str) -> None:
    lengths = {name: len(text.splitlines()) for name, text in sources(ROOT / folder).items()}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
