"""Installs what requirements-dev.txt and requirements-build.txt list and this Python lacks.

In a virtual environment of the repository the pinned versions are installed; in a Python of the user's, only what is
missing altogether, and where that fails (no network, say) the targets of the Makefile go on with what there is.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def missing(file: Path, any_version: bool) -> list[str]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    requirements = [line for line in lines if line and not line.startswith("#")]
    return [line for line in requirements if not satisfied(*line.split("=="), any_version)]


def satisfied(name: str, pinned: str, any_version: bool) -> bool:
    try:
        # A local part such as +cpu does not matter.
        return version(name).split("+")[0] == pinned or any_version
    except PackageNotFoundError:
        return False


def main() -> int:
    own_environment = Path(sys.prefix) == ROOT / ".venv"
    for name, options in (("requirements-dev.txt", []), ("requirements-build.txt", ["--no-deps"])):
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
    sys.exit(main())
