"""Fixtures of all tests; GPU tests are skipped, with the reason, where there is no Hopper GPU."""

import gc
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsa_ext.testing.inputs import INT32_MAX

ROOT = Path(__file__).parent.parent


def _no_gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device: torch.cuda.is_available() is False"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        return f"needs a Hopper GPU (sm_90), got sm_{major}{minor}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of the processes of pytest-xdist
        items.sort(key=lambda item: item.get_closest_marker("long") is None)
    reason = _no_gpu_reason()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def skip_unless_free(gigabytes: float) -> None:
    """Skips the test when less GPU memory is free: other processes may use the same GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes:g} GB of GPU memory, {free:.1f} GB are free")


@pytest.fixture(autouse=True)
def gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests marked `gpu_memory(gigabytes)`: so much memory is free before the test. Much memory is freed after any
    test, since the tests of other processes may need it."""
    marker = request.node.get_closest_marker("gpu_memory")
    if marker is not None:
        skip_unless_free(*marker.args)
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 4e9:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest, gpu_memory: None) -> None:
    """Before a GPU test, fills the free memory of the allocator, so that elements that no kernel writes are noticed.
    The bits are NaN in every floating-point dtype, and an invalid id."""
    if request.node.get_closest_marker("gpu"):
        blocks = [torch.full((2**17,), INT32_MAX, dtype=torch.int32, device="cuda") for _ in range(64)]
        blocks.append(torch.full((2**27,), INT32_MAX, dtype=torch.int32, device="cuda"))


@pytest.fixture
def deterministic_algorithms() -> Iterator[None]:
    """torch.use_deterministic_algorithms, without its filling of uninitialized memory."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(scope="session")
def host_functions(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The pure host functions of csrc/, built into a Python module without torch or CUDA."""
    pybind11 = pytest.importorskip("pybind11")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the host functions of csrc/ with")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = tmp_path_factory.mktemp("host_functions") / f"host_functions{suffix}"
    includes = [f"-I{path}" for path in (ROOT / "csrc", pybind11.get_include(), sysconfig.get_path("include"))]
    source = ROOT / "tests/host_functions.cpp"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", *includes]
    built = subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    spec = importlib.util.spec_from_file_location("host_functions", target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["host_functions"] = module
    spec.loader.exec_module(module)
    return module
