"""The package as a whole: registration, the compiled library, the versions of its tools."""

import contextlib
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import needs_library, run, tool
from conftest import ROOT, skip_unless_free

import dsa_ext
from dsa_ext import _native, ops
from dsa_ext.ops import _library


def test_operators_are_registered() -> None:
    for op in ops.OPERATORS:
        overload = getattr(torch.ops.dsa, op).default
        # A composition of other operators has one implementation for all devices, and no reference.
        has_reference = hasattr(ops.OPERATORS[op], "reference")
        devices = ("CPU", "CUDA", "Meta") if has_reference else ("CompositeExplicitAutograd",)
        for key in (*devices, "Autograd"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), key), (op, key)


def test_build_info() -> None:
    info = dsa_ext.build_info()
    assert info["torch"] == torch.__version__
    assert ("unavailable" in info["kernels"]) == (_native.library is None)
    printed = run(sys.executable, "-m", "dsa_ext")
    assert all(name in printed and value in printed for name, value in info.items())


@pytest.mark.parametrize(("library", "reason"), [(None, "was not built"), (b"not a library", "did not load: ")])
def test_import_without_kernels(tmp_path: Path, library: bytes | None, reason: str) -> None:
    shutil.copytree(ROOT / "dsa_ext", tmp_path / "dsa_ext", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if library is not None:
        (tmp_path / "dsa_ext/_C.abi3.so").write_bytes(library)
    script = """
import torch, dsa_ext
q, kv, indices = torch.randn(1, 2, 4, 576), torch.randn(1, 8, 1, 576), torch.zeros(1, 2, 1, 3, dtype=torch.int32)
assert dsa_ext.sparse_mla(q, kv, indices).isfinite().all()
try:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    torch.ops.dsa.sparse_mla_fwd.default.redispatch(keys, q, kv, indices)
except RuntimeError as error:
    print(error)
print(dsa_ext.build_info()["kernels"], dsa_ext.__file__)
"""
    printed = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert str(tmp_path) in printed, "the copy without the library was not the one imported"
    assert "dsa::sparse_mla_fwd: dsa_ext is installed without its CUDA kernels, because _C.abi3.so" in printed
    assert printed.count(reason) == 2


@needs_library
def test_error_of_an_operator_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.library._scoped_library("dsa", "FRAGMENT") as library:
        monkeypatch.setattr(_library, "library", library)
        library.define("without_a_kernel(Tensor x) -> Tensor")
        _library.explain_missing_cuda("without_a_kernel")
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
        with pytest.raises(
            RuntimeError, match=r"^dsa::without_a_kernel: _C\.abi3\.so has no CUDA kernel for this operator"
        ):
            torch.ops.dsa.without_a_kernel.default.redispatch(keys, torch.zeros(1))


@needs_library
def test_library_depends_on_the_stable_abi_alone() -> None:
    needed = run(tool("readelf"), "-d", _native.library or "")
    # On CUDA builds libtorch loads libtorch_cuda, which has the function of the current stream.
    assert "[libtorch.so]" in needed
    for library in ("libcuda", "libcudart", "libpython", "libtorch_python", "libtorch_cuda", "libc10_cuda"):
        assert library not in needed
    symbols = run(tool("readelf"), "--dyn-syms", "-W", _native.library or "")
    undefined = {
        line.split()[-1].split("@")[0] for line in symbols.splitlines() if " UND " in line and line.split()[7:]
    }
    assert any(name.startswith("aoti_torch_") for name in undefined)
    assert not [name for name in undefined if re.match(r"_?Py[A-Z_]|cu[A-Z]|cuda[A-Z]|_ZNK?\d*(2at|3c10)", name)]
    stream = next(line for line in symbols.splitlines() if "aoti_torch_get_current_cuda_stream" in line)
    assert " WEAK " in stream


@pytest.mark.parametrize(("free", "skipped"), [(11.9e9, True), (12.1e9, False)])
def test_large_tests_ask_for_free_memory(free: float, skipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80e9))
    reason = r"needs 12 GB of GPU memory, 11\.9 GB are free"
    with pytest.raises(pytest.skip.Exception, match=reason) if skipped else contextlib.nullcontext():
        skip_unless_free(12)


def test_versions_of_tools_agree() -> None:
    pinned = set(re.findall(r"^[\w-]+==[\w.]+$", (ROOT / "requirements-dev.txt").read_text(), flags=re.MULTILINE))
    hooks = set(re.findall(r"[\w-]+==[\w.]+", (ROOT / ".pre-commit-config.yaml").read_text()))
    assert {hook.split("==")[0] for hook in hooks} == {"ruff", "mypy", "clang-format", "torch"}
    assert hooks <= pinned
