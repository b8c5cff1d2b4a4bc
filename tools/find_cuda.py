"""Finds what compiling the kernels needs: a CUDA toolkit and the CUTLASS headers."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_cuda_home() -> Path | None:
    """The first CUDA toolkit with both the compiler and the headers; `nvcc` on PATH may be a mere wrapper script."""
    nvcc = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates += [str(Path(nvcc).resolve().parent.parent) if nvcc else None, "/usr/local/cuda"]
    for home in (Path(c) for c in candidates if c):
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            return home
    return None


def find_cutlass() -> Path | None:
    """The CUTLASS headers: CUTLASS_INCLUDE_DIR, third_party/cutlass, or the package nvidia-cutlass."""
    candidates = [ROOT / "third_party/cutlass/include"]
    if "CUTLASS_INCLUDE_DIR" in os.environ:
        candidates.insert(0, Path(os.environ["CUTLASS_INCLUDE_DIR"]))
    package = importlib.util.find_spec("cutlass_library")
    if package is not None and package.submodule_search_locations:
        candidates.append(Path(package.submodule_search_locations[0]) / "source/include")
    return next((path for path in candidates if (path / "cute/tensor.hpp").is_file()), None)


def nvcc_version(cuda_home: Path) -> str:
    """Major and minor version, such as 13.0."""
    text = subprocess.check_output([cuda_home / "bin/nvcc", "--version"], text=True)
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise RuntimeError(f"dsa_ext: cannot read the version of {cuda_home / 'bin/nvcc'} from {text!r}")
    return match.group(1)
