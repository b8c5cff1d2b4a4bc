"""Loads the compiled library, or records why it could not be loaded."""

import platform
from pathlib import Path

import torch

__version__ = "0.2.0.dev1"
_PACKAGE = Path(__file__).parent


def _load() -> tuple[Path | None, str]:
    path = _PACKAGE / "_C.abi3.so"
    if not path.is_file():
        return None, f"{path.name} was not built: no CUDA toolkit or headers were found, or DSA_EXT_CUDA=0 was set"
    try:
        torch.ops.load_library(path)
    except Exception as error:  # a library built for another system must not keep the CPU implementation from working
        return None, f"{path.name} did not load: {error}"
    return path, ""


#: The loaded library, or None; then `missing_reason` says why.
library, missing_reason = _load()


def missing_kernels_error(op: str) -> RuntimeError:
    """The error that a CUDA call raises when the library is missing, or is an older build without a kernel for `op`."""
    if library is not None:
        return RuntimeError(f"dsa::{op}: {library.name} has no CUDA kernel for this operator")
    return RuntimeError(f"dsa::{op}: dsa_ext is installed without its CUDA kernels, because {missing_reason}")


def build_info() -> dict[str, str]:
    """Versions, device, and which implementations are available; every value is a printable string."""
    info = {
        "dsa_ext": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "library": str(library) if library else f"none: {missing_reason}",
    }
    info["device"], hopper = _device()
    if library is None:
        info["kernels"] = f"unavailable: {missing_reason}"
    elif not hopper:
        info["kernels"] = "built for sm_90a, but there is no such GPU: the CPU implementation is available"
    else:
        info["kernels"] = "available (sm_90a)"
    return info


def _device() -> tuple[str, bool]:
    """Name and architecture of the current GPU, and whether the kernels run on it."""
    if not torch.cuda.is_available():
        return "no CUDA device", False
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor})", (major, minor) == (9, 0)
