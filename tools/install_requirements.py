"""Installs the packages of requirements-dev.txt and requirements-build.txt, or of the files named, that are missing.

In the repository's own virtual environment the pinned versions are installed. In any other Python only packages of
which no version is installed are added, and an old setuptools is replaced. If that fails (without a network, for
example), the targets of the Makefile continue with what there is.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_SETUPTOOLS = 77  # that of pyproject.toml: older ones cannot read it


def missing(file: Path, any_version: bool) -> list[str]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    requirements = [line for line in lines if line and not line.startswith("#")]
    return [line for line in requirements if not satisfied(*line.split("=="), any_version)]


def satisfied(name: str, pinned: str, any_version: bool) -> bool:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return False
    if name == "setuptools" and int(installed.split(".")[0]) < OLDEST_SETUPTOOLS:
        return False
    # A local part such as +cpu does not matter.
    return installed.split("+")[0] == pinned or any_version


def main(*names: str) -> int:
    own_environment = Path(sys.prefix) == ROOT / ".venv"
    for name in names or ("requirements-dev.txt", "requirements-build.txt"):
        options = ["--no-deps"] if name == "requirements-build.txt" else []
        packages = missing(ROOT / name, any_version=not own_environment)
        if not packages:
            continue
        print("Installing", *packages, flush=True)
        patience = [] if own_environment else ["--retries", "1", "--timeout", "10"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *patience, *options, *packages]
        failed = subprocess.run(command).returncode
        if failed and own_environment:
            return failed
        if failed:
            print("Not installed; going on without:", *packages)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
