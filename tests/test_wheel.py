"""Packaging: what `make wheel`, `make wheel-check` and an installation from source rest on."""

import ctypes
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from commands import needs_library, run, tool
from conftest import ROOT

import dsa_ext


@pytest.fixture
def build_wheel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("build_wheel")


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_library_links_for_an_old_glibc(build_wheel: ModuleType, tmp_path: Path) -> None:
    """Threads, dlopen, shared memory and the flag of a single thread, as the library and the CUDA runtime use them."""
    source, library = tmp_path / "uses.c", tmp_path / "uses.so"
    source.write_text(
        """#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/mman.h>
extern char __libc_single_threaded;
static void* thread(void* done) { sem_post(done); return done; }
int use(void) {
  pthread_t other;
  sem_t done;
  sem_init(&done, 0, 0);
  shm_unlink("/no such name");
  if (pthread_create(&other, 0, thread, &done) != 0) return 1;
  sem_wait(&done);
  pthread_join(other, 0);
  return dlsym(dlopen(0, RTLD_NOW), "use") == 0 ? __libc_single_threaded : 0;
}
"""
    )
    compiler = tool("gcc")
    readelf = tool("readelf")
    arguments = build_wheel.write_libraries(tmp_path / "glibc")
    libraries = ["-Wl,--as-needed", "-lpthread", "-ldl", "-lrt"]
    run(compiler, "-shared", "-fPIC", "-o", library, source, *arguments, *libraries)
    versions = {
        tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", run(readelf, "--version-info", library))
    }
    assert max(versions) <= build_wheel.OLDEST
    assert ctypes.CDLL(str(library)).use() == 0


def test_compiler_of_another_version(build_wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_wheel, "find_cuda_home", lambda: None)
    monkeypatch.setattr(build_wheel, "cuda_from_packages", lambda: Path("packages"))
    assert build_wheel.find_compiler("") == Path("packages")
    assert build_wheel.find_compiler(build_wheel.PACKAGED) == Path("packages")
    with pytest.raises(SystemExit, match=r"^CUDA 12\.8: no toolkit was found, and .* neither nvcc"):
        build_wheel.find_compiler("12.8")
    monkeypatch.setattr(build_wheel, "find_cuda_home", lambda: Path("toolkit"))
    monkeypatch.setattr(build_wheel, "nvcc_version", lambda home: "12.8")
    assert build_wheel.find_compiler("") == build_wheel.find_compiler("12.8") == Path("toolkit")
    assert build_wheel.find_compiler(build_wheel.PACKAGED) == Path("packages")


@pytest.mark.parametrize(("mode", "tag"), [("1", r"cp310-abi3-linux_\w+"), ("0", "py3-none-any")])
def test_wheel_tag(mode: str, tag: str, tmp_path: Path) -> None:
    environment = {**os.environ, "DSA_EXT_CUDA": mode}
    command = [sys.executable, "setup.py", "--name"]
    can_build = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if can_build.returncode != 0:
        pytest.skip(can_build.stderr.splitlines()[-1])
    build = ("build", "--build-base", tmp_path / "build", "bdist_wheel", "--dist-dir", tmp_path)
    run(sys.executable, "setup.py", "-q", *build, DSA_EXT_CUDA=mode)
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(rf"dsa_ext-{re.escape(dsa_ext.__version__)}-{tag}\.whl", wheel.name)
    contents = run(sys.executable, "-m", "zipfile", "-l", wheel)
    assert ("_C.abi3.so" in contents) == (mode == "1")
    assert "dsa_ext/py.typed" in contents


def test_bad_build_mode() -> None:
    environment = {**os.environ, "DSA_EXT_CUDA": "yes"}
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode != 0
    assert "DSA_EXT_CUDA must be auto, 1 or 0, got 'yes'" in done.stderr


def test_versions_agree(build_wheel: ModuleType) -> None:
    cutlass = re.findall(r"nvidia-cutlass==[\w.]+", read("pyproject.toml") + read("requirements-build.txt"))
    assert len(cutlass) == 2
    assert len(set(cutlass)) == 1
    for name in ("setup.py", "third_party/README.md"):
        assert cutlass[0] in read(name)
    compiler = re.search(r"nvidia-cuda-nvcc==(\d+\.\d+)", read(f"requirements-cuda-{build_wheel.PACKAGED}.txt"))
    assert compiler is not None
    assert compiler.group(1) == build_wheel.PACKAGED
    # The oldest torch is the one whose stable ABI the library is compiled for.
    target = re.search(r"TORCH_TARGET_VERSION=0x(\w\w)(\w\w)0{12}", read("setup.py"))
    assert target is not None
    oldest = importlib.import_module("check_wheel").oldest_torch()
    assert oldest == f"{int(target.group(1), 16)}.{int(target.group(2), 16)}"


def test_source_distribution_is_complete() -> None:
    patterns = re.findall(r"(?:recursive-include \w+|include) (.*)", read("MANIFEST.in"))
    suffixes = {word.removeprefix("*") for line in patterns for word in line.split()}
    for folder in ("csrc", "tools"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {path.suffix for path in files} <= suffixes
    # The licences of what is compiled into the library travel with it.
    assert '"third_party/README.md"' in read("pyproject.toml")


def test_release_calls_make() -> None:
    steps = re.findall(r"- run: (.*)", read(".github/workflows/release.yml"))
    targets = [match.group(1) for step in steps if (match := re.match(r"make ([\w-]+)", step))]
    assert targets == ["wheel", "wheel-check"]
    for target in targets:
        assert re.search(rf"^{target}:", read("Makefile"), flags=re.MULTILINE)


@needs_library
def test_smoke_test() -> None:
    printed = run(sys.executable, ROOT / "tools/smoke_test.py")
    assert torch.__version__ in printed
    assert printed.count(": passed") >= 3


def test_smoke_test_fails_without_the_library(tmp_path: Path) -> None:
    """On an installation without the kernels: the check of a wheel must not pass."""
    script = (
        "import sys, dsa_ext._native as n; n.library = None; sys.argv = ['']; import smoke_test; smoke_test.library()"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tools')]}; {script}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "AssertionError: none: " in done.stderr
