"""Builds dsa_ext: a pure-Python package and, where nvcc and CUTLASS are found, the kernels in dsa_ext/_C.abi3.so.

The library uses the LibTorch stable ABI and no Python symbols, so one file serves every torch >= 2.11 and
CPython >= 3.10, and it can be compiled with a CPU build of torch on a machine without a GPU.

Environment: DSA_EXT_CUDA = auto | 1 | 0, CUDA_HOME, CUTLASS_INCLUDE_DIR, MAX_JOBS; DSA_EXT_LOCAL_VERSION is appended to
the version (0.1.0+cu128).
"""

import copy
import os
import shutil
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from setuptools import setup

# An isolated build sees only its own packages: let it find the torch that is installed instead of fetching a second.
sys.path.append(sysconfig.get_path("purelib"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "dsa_ext: install PyTorch 2.11 or later first; the build uses the torch that is installed"
    raise SystemExit(message) from None
from find_cuda import ROOT, find_cuda_home, find_cutlass, nvcc_version
from torch.utils import cpp_extension

MIN_NVCC = (12, 8)
GIGABYTES_PER_JOB = 3  # 1.9 measured
SECONDS_PER_REPORT = 15

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


def parallel_jobs() -> int:
    """As many as there are processors, and as memory allows: a compiler takes at most GIGABYTES_PER_JOB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(memory / GIGABYTES_PER_JOB)))


def lasting_path(headers: Path) -> Path:
    """The headers, copied into build/ when they are in the temporary environment of an isolated build.

    A path that differs from build to build would make ninja compile everything again.
    """
    installed = Path(sysconfig.get_path("purelib")) in headers.parents
    if installed or ROOT in headers.parents or "CUTLASS_INCLUDE_DIR" in os.environ:
        return headers
    copied = ROOT / "build/cutlass"
    if not copied.is_dir():
        unfinished = copied.with_name(f"cutlass.{os.getpid()}")
        shutil.copytree(headers, unfinished)
        unfinished.rename(copied)
    return copied


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
    os.environ.setdefault("MAX_JOBS", str(parallel_jobs()))

    sources = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu"))
    include = cuda_home / "include"
    return cpp_extension.CppExtension(
        "dsa_ext._C",
        sources,
        include_dirs=[str(p) for p in (ROOT / "csrc", lasting_path(cutlass), include, include / "cccl")],
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


class Progress(threading.Thread):
    """Says every few seconds how many files are compiled: on the terminal, because pip hides what a build prints."""

    def __init__(self, objects: Path, files: int) -> None:
        super().__init__(daemon=True)
        self.objects, self.files, self.begin = objects, files, time.time()
        self.finished = threading.Event()
        try:
            self.output = open("/dev/tty", "w")  # noqa: SIM115
        except OSError:
            self.output = sys.stderr

    def say(self, text: str) -> None:
        print(f"dsa_ext: {text}", file=self.output, flush=True)

    def run(self) -> None:
        self.say(f"compiling with {os.environ['MAX_JOBS']} jobs; a full build compiles {self.files} files")
        while not self.finished.wait(SECONDS_PER_REPORT):
            compiled = sum(file.stat().st_mtime >= self.begin for file in self.objects.rglob("*.o"))
            self.say(f"{compiled} files compiled after {time.time() - self.begin:.0f} s")


class BuildKernels(cpp_extension.BuildExtension):  # type: ignore[misc]
    """Keeps the objects in build/obj: an editable install would otherwise compile everything anew in a temp folder."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(ROOT / "build/obj")

    def build_extensions(self) -> None:
        # The base class adds flags to the extensions at each call; one process may call it twice, and a command line
        # that differs makes ninja compile again.
        self.extensions = copy.deepcopy(self.extensions)
        progress = Progress(Path(self.build_temp), sum(len(extension.sources) for extension in self.extensions))
        if self.extensions:
            progress.start()
        try:
            super().build_extensions()
        finally:
            progress.finished.set()


kernels = extensions()
options: dict[str, dict[str, str]] = {"bdist_wheel": {"py_limited_api": "cp310"}} if kernels else {}
if "DSA_EXT_LOCAL_VERSION" in os.environ:
    options["egg_info"] = {"tag_build": f"+{os.environ['DSA_EXT_LOCAL_VERSION']}"}
setup(ext_modules=kernels, cmdclass={"build_ext": BuildKernels}, options=options)
