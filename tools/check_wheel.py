"""Installs the wheel in fresh virtual environments, with the oldest and the newest torch, and runs smoke_test.py there.

pip decides which build of torch that is; its settings (PIP_EXTRA_INDEX_URL, for one) apply. No GPU is needed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def oldest_torch() -> str:
    match = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert match is not None
    return match.group(1)


def symbols(library: Path, *options: str) -> set[str]:
    text = subprocess.check_output(["nm", "-D", *options, str(library)], text=True)
    return {line.split()[-1] for line in text.splitlines()}


def check_standard_library(packages: Path) -> None:
    """What is newer than the C++ library of the wheel's tag must come from torch, which exports it without a version.

    The linker takes it from there, and so auditwheel does not see it.
    """
    library = packages / "dsa_ext/_C.abi3.so"
    provided: set[str] = set()
    for file in (packages / "torch/lib").glob("lib*.so"):
        provided |= symbols(file, "--defined-only", "--without-symbol-versions")
    needed = {name for name in symbols(library, "--undefined-only") if "@" not in name and name.startswith("_Z")}
    missing = sorted(needed - provided)
    assert not missing, f"neither torch nor an old libstdc++ has {missing}"


def check(wheel: Path, torch: str, environment: Path) -> None:
    print(f"\n{torch}:", flush=True)
    shutil.rmtree(environment, ignore_errors=True)
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    # Only the environment's own packages count, not those of this checkout. torch warns where there is no numpy.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PYTHONWARNINGS"] = "ignore::UserWarning"
    subprocess.check_call([*pip, torch, str(wheel)], env=variables)
    packages = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    check_standard_library(Path(packages))
    smoke_test = shutil.copy(ROOT / "tools/smoke_test.py", environment)
    subprocess.check_call([python, smoke_test], cwd=environment, env=variables)
    shutil.rmtree(environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, nargs="?", help="by default the newest in dist/")
    parser.add_argument("--torch", nargs="+", default=[f"torch=={oldest_torch()}.*", "torch"], help="pip requirements")
    args = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("*-abi3-manylinux*.whl"), key=lambda path: path.stat().st_mtime)
    wheel = args.wheel or (wheels[-1] if wheels else None)
    if wheel is None:
        sys.exit("There is no wheel in dist/: `make wheel` builds it.")
    print(wheel)
    for i, torch in enumerate(args.torch):
        check(wheel.resolve(), torch, ROOT / f"build/wheel-check/{i}")


if __name__ == "__main__":
    main()
