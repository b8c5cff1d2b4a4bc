"""Builds dsa_ext: a pure-Python package and, where nvcc and CUTLASS are found, the kernels in dsa_ext/_C.abi3.so.

The library uses the LibTorch stable ABI and no Python symbols, so one file serves every torch >= 2.11 and
CPython >= 3.10, and it can be compiled with a CPU build of torch on a machine without a GPU.

Environment: DSA_EXT_CUDA = auto | 1 | 0, CUDA_HOME, CUTLASS_INCLUDE_DIR, MAX_JOBS.
"""

import copy
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup

# An isolated build sees only its own packages: let it find the torch that is installed instead of fetching a second.
sys.path.append(sysconfig.get_path("purelib"))

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
MIN_NVCC = (12, 8)

CXX_FLAGS = ["-O3", "-std=c++20", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
CXX_FLAGS += ["-fvisibility=hidden", "-fvisibility-inlines-hidden"]
NVCC_FLAGS = [
    *CXX_FLAGS[:4],
    "-gencode=arch=compute_90a,code=sm_90a",
    "--expt-extended-lambda",
    "--expt-relaxed-constexpr",
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-lineinfo",
    "-Xptxas=-v",
    "-Xcompiler=-fvisibility=hidden,-fvisibility-inlines-hidden",
]
# libtorch must stay in DT_NEEDED: on CUDA builds it brings libtorch_cuda, and with it the stream, into scope.
LINK_FLAGS = ["-ltorch_cpu", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
LINK_FLAGS += ["-lcudart_static", "-lpthread", "-ldl", "-lrt", "-Wl,--exclude-libs,ALL", "-s"]


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
    text = subprocess.check_output([cuda_home / "bin/nvcc", "--version"], text=True)
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise RuntimeError(f"dsa_ext: cannot read the version of {cuda_home / 'bin/nvcc'} from {text!r}")
    return match.group(1)


def kernel_extension(cuda_home: Path, cutlass: Path) -> Any:
    """The extension dsa_ext._C. It is a CppExtension because CUDAExtension links a CUDA build of torch."""
    version = nvcc_version(cuda_home)
    if tuple(int(part) for part in version.split(".")) < MIN_NVCC:
        raise RuntimeError(f"dsa_ext: nvcc must be at least {MIN_NVCC[0]}.{MIN_NVCC[1]}, got {version} in {cuda_home}")
    # A CPU torch leaves both unset; without the version, no dependency files are written for .cu files.
    cpp_extension.CUDA_HOME = str(cuda_home)
    torch.version.cuda = version
    os.environ["DSA_EXT_NVCC"] = os.environ.get("PYTORCH_NVCC", str(cuda_home / "bin/nvcc"))
    os.environ["PYTORCH_NVCC"] = f"sh {ROOT / 'tools/nvcc_with_report.sh'}"
    os.environ.setdefault("MAX_JOBS", "2")

    sources = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu"))
    include = cuda_home / "include"
    return cpp_extension.CppExtension(
        "dsa_ext._C",
        sources,
        include_dirs=[str(p) for p in (ROOT / "csrc", cutlass, include, include / "cccl")],
        library_dirs=[str(cuda_home / lib) for lib in ("lib64", "lib") if (cuda_home / lib).is_dir()],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
        extra_link_args=LINK_FLAGS,
        py_limited_api=True,
    )


def extensions() -> list[Any]:
    mode = os.environ.get("DSA_EXT_CUDA", "auto")
    if mode not in ("auto", "1", "0"):
        raise RuntimeError(f"dsa_ext: DSA_EXT_CUDA must be auto, 1 or 0, got {mode!r}")
    if mode == "0":
        return []
    cuda_home, cutlass = find_cuda_home(), find_cutlass()
    if cuda_home is not None and cutlass is not None:
        return [kernel_extension(cuda_home, cutlass)]
    missing = [] if cuda_home else ["a CUDA toolkit (bin/nvcc and include/cuda_runtime.h; set CUDA_HOME)"]
    missing += [] if cutlass else ["the CUTLASS headers (pip install --no-deps nvidia-cutlass==4.2.0.0)"]
    if mode == "1" or torch.version.cuda is not None:
        raise RuntimeError(
            f"dsa_ext: the CUDA kernels need {' and '.join(missing)}. DSA_EXT_CUDA=0 installs without the kernels."
        )
    return []


class BuildKernels(cpp_extension.BuildExtension):  # type: ignore[misc]
    """Keeps the objects in build/obj: an editable install would otherwise compile everything anew in a temp folder."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(ROOT / "build/obj")

    def build_extensions(self) -> None:
        # The base class adds flags to the extensions at each call; one process may call it twice, and a command line
        # that differs makes ninja compile again.
        self.extensions = copy.deepcopy(self.extensions)
        super().build_extensions()


kernels = extensions()
setup(
    ext_modules=kernels,
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if kernels else {},
)
