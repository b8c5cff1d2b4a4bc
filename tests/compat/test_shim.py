"""The packages that `python -m dsa_ext.compat install-shim` writes, imported in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from dsa_ext.compat.shim import install


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    folder = tmp_path / "new/shim"
    command = [sys.executable, "-m", "dsa_ext.compat", "install-shim", folder]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(folder / name / "__init__.py") for name in ("flash_mla", "deep_gemm")]
    return folder


def run(program: str, *folders: Path) -> str:
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_exports(shim: Path) -> None:
    run(
        """
import deep_gemm, flash_mla
import dsa_ext.compat.deep_gemm, dsa_ext.compat.flash_mla
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits, get_num_sms

assert flash_mla_sparse_fwd is dsa_ext.compat.flash_mla.flash_mla_sparse_fwd
assert fp8_mqa_logits is dsa_ext.compat.deep_gemm.fp8_mqa_logits
for module, name in ((flash_mla, "flash_mla_sparse_bwd"), (deep_gemm, "fp8_gemm_nt")):
    try:
        getattr(module, name)
    except AttributeError as error:
        assert str(error) == f"dsa_ext.compat.{module.__name__} does not serve {name}", error
    else:
        raise AssertionError
for name in ("flash_mla", "deep_gemm"):
    names = {}
    exec(f"from {name} import *", names)
    assert names.keys() - {"__builtins__"} == set(getattr(dsa_ext.compat, name).__all__), names.keys()
""",
        shim,
    )


def test_selected_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dsa_ext.compat", "install-shim", str(tmp_path)]
    subprocess.run([*command, "flash_mla"], cwd=ROOT, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["flash_mla"]
    done = subprocess.run([*command, "flashmla"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "PACKAGE must be flash_mla or deep_gemm, got flashmla" in done.stderr


def test_installed_library_serves_the_rest(shim: Path, tmp_path: Path) -> None:
    package = tmp_path / "site/deep_gemm"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        "from . import utils\n\ndef fp8_gemm_nt(): return 'theirs'\n\ndef fp8_mqa_logits(): return 'theirs'\n"
        "\ndef get_num_sms(): return 'theirs'\n"
    )
    package.joinpath("utils.py").write_text("ceil_div = 'theirs'\n")
    run(
        """
import deep_gemm, deep_gemm.utils
import dsa_ext.compat.deep_gemm as ours
from deep_gemm.utils import ceil_div

assert deep_gemm.fp8_gemm_nt() == deep_gemm.utils.ceil_div == ceil_div == deep_gemm.get_num_sms() == "theirs"
assert deep_gemm.set_num_sms is ours.set_num_sms  # this one has none
assert deep_gemm.fp8_mqa_logits is ours.fp8_mqa_logits
assert deep_gemm.get_paged_mqa_logits_metadata is ours.get_paged_mqa_logits_metadata
""",
        shim,
        tmp_path / "site",
    )


def test_installed_library_that_fails(shim: Path, tmp_path: Path) -> None:
    package = tmp_path / "site/flash_mla"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text("import no_such_library\n")
    program = "import flash_mla; print(flash_mla.flash_mla_sparse_fwd, flash_mla.__file__)"
    printed = run(program, shim, tmp_path / "site")
    assert "cannot be imported (No module named 'no_such_library'): only what dsa_ext serves is available" in printed
    assert str(shim / "flash_mla/__init__.py") in printed


def test_files_of_others_stay(tmp_path: Path) -> None:
    paths = install(tmp_path)
    assert install(tmp_path) == paths
    paths[1].write_text("theirs = True\n")
    paths[0].unlink()
    with pytest.raises(FileExistsError, match=f"{re.escape(str(paths[1]))} is not a shim of dsa_ext"):
        install(tmp_path)
    assert paths[1].read_text() == "theirs = True\n"
    assert not paths[0].exists()
