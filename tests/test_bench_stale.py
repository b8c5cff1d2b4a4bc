"""bench/stale.py: which files of csrc/ an operator's results belong to, and which results are stale."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: Two operators. The second includes the first one's kernel, and sums that another folder defines.
FILES = {
    "ops/one/op.cpp": '#include "ops/one/params.h"\n#include "torch/abi.h"\nm.impl("one", f);\n',
    "ops/one/params.h": "const char* launch();\n",
    "ops/one/launch.cu": '#include "kernel.cuh"\n#include "params.h"\nlaunch one\n',
    "ops/one/kernel.cuh": '#include <cute/tensor.hpp>\n#include "sm90/tma.cuh"\nkernel one\n',
    "ops/two/op.cpp": '#include "ops/one/params.h"\n#include "shared/sums/buffers.h"\nm.impl(\n    "two", f);\n',
    "shared/sums/buffers.h": "allocate();\n",
    "shared/sums/buffers.cpp": '#include "shared/sums/buffers.h"\nallocate\n',
    "shared/sums/launch.cu": '#include "details.cuh"\nlaunch sums\n',
    "shared/sums/details.cuh": '#include "shared/sums/buffers.h"\n',
    "sm90/tma.cuh": "copy\n",
    "sm90/unused.cuh": "nothing\n",
    "torch/abi.h": "check\n",
    "torch/abi.cpp": '#include "torch/abi.h"\ncheck\n',
}
OF_ONE = {
    "ops/one/op.cpp",
    "ops/one/params.h",
    "ops/one/launch.cu",
    "ops/one/kernel.cuh",
    "sm90/tma.cuh",
    "torch/abi.h",
    "torch/abi.cpp",
}
OF_TWO = {
    "ops/two/op.cpp",
    "ops/one/params.h",
    "ops/one/launch.cu",
    "ops/one/kernel.cuh",
    "sm90/tma.cuh",
    "shared/sums/buffers.h",
    "shared/sums/buffers.cpp",
    "shared/sums/launch.cu",
    "shared/sums/details.cuh",
}


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("stale")


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "csrc"


def hashes(stale: ModuleType, csrc: Path) -> dict[str, str]:
    kernels = stale.Kernels(csrc)
    return {op: kernels.sha256([op]) for op in kernels.operators}


def move(csrc: Path, old: str, new: str) -> None:
    """Moves a folder, and adapts the lines that include its files."""
    (csrc / new).parent.mkdir(parents=True, exist_ok=True)
    (csrc / old).rename(csrc / new)
    for path in csrc.rglob("*.*"):
        path.write_text(path.read_text().replace(f'#include "{old}/', f'#include "{new}/'))


def test_files_of_an_operator(stale: ModuleType, csrc: Path) -> None:
    kernels = stale.Kernels(csrc)
    assert kernels.operators == ["one", "two"]
    for op, names in (("one", OF_ONE), ("two", OF_TWO)):
        assert {path.relative_to(csrc).as_posix() for path in kernels.files(op)} == names
    with pytest.raises(LookupError, match="three"):
        kernels.files("three")


@pytest.mark.parametrize("name", FILES)
def test_an_edit_changes_the_operators_that_include_the_file(stale: ModuleType, csrc: Path, name: str) -> None:
    before = hashes(stale, csrc)
    (csrc / name).write_text(FILES[name] + "more\n")
    after = hashes(stale, csrc)
    assert {op for op in before if before[op] != after[op]} == {
        op for op, names in (("one", OF_ONE), ("two", OF_TWO)) if name in names
    }


@pytest.mark.parametrize(("old", "new"), [("ops/one", "ops/family/one"), ("shared/sums", "sums"), ("sm90", "ptx/sm90")])
def test_folders_do_not_matter(stale: ModuleType, csrc: Path, old: str, new: str) -> None:
    before = hashes(stale, csrc)
    move(csrc, old, new)
    assert (csrc / new).is_dir()
    assert hashes(stale, csrc) == before


def test_folders_of_the_real_kernels_do_not_matter(stale: ModuleType, tmp_path: Path) -> None:
    csrc = Path(shutil.copytree(ROOT / "csrc", tmp_path / "csrc"))
    before = hashes(stale, csrc)
    for folder in sorted(path.name for path in (csrc / "ops").iterdir()):
        move(csrc, f"ops/{folder}", f"families/{folder[0]}/{folder}")
    move(csrc, "sm90", "families/ptx")
    assert hashes(stale, csrc) == before


def test_every_file_belongs_to_an_operator(stale: ModuleType) -> None:
    """Otherwise the rule that finds the files of an operator misses some."""
    kernels = stale.Kernels()
    assert "sparse_mla_fwd" in kernels.operators
    found = set().union(*map(kernels.files, kernels.operators))
    assert {path for path in (ROOT / "csrc").rglob("*") if path.is_file()} == found


@pytest.fixture
def results(stale: ModuleType, csrc: Path, tmp_path: Path) -> Path:
    """A folder with an up-to-date result of each operator."""
    folder = tmp_path / "results"
    folder.mkdir()
    kernels = stale.Kernels(csrc)
    for name, operators in (("one", ["one"]), ("two", ["two"]), ("both", ["two", "one"])):
        result = {"op": name, "operators": operators, "kernels_sha256": kernels.sha256(operators)}
        (folder / f"{name}.json").write_text(json.dumps(result))
    return folder


def test_stale_results(stale: ModuleType, csrc: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stale.main(csrc, results) == 0
    assert capsys.readouterr().out == ""

    (csrc / "torch/abi.h").write_text("check more\n")
    assert stale.main(csrc, results) == 1
    listed = re.findall(r"^(\w+)\.json", capsys.readouterr().out, re.MULTILINE)
    assert listed == ["both", "one"]


@pytest.mark.parametrize(
    "change",
    [{"kernels_sha256": "0" * 64}, {"kernels_sha256": "not recorded"}, {"operators": ["gone"]}, {"operators": []}],
)
def test_a_result_with_other_kernels_is_stale(
    stale: ModuleType, csrc: Path, results: Path, change: dict[str, object]
) -> None:
    path = results / "two.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert stale.stale_results(stale.Kernels(csrc), results) == ["two.json"]


def test_a_result_without_kernels_is_stale(stale: ModuleType, csrc: Path, results: Path) -> None:
    (results / "two.json").write_text(json.dumps({"op": "two"}))
    assert stale.stale_results(stale.Kernels(csrc), results) == ["two.json"]


def test_it_needs_nothing_but_python() -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "bench/stale.py")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stderr == ""
    assert ended.returncode == (1 if ended.stdout else 0)
