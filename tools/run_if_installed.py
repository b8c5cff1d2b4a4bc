"""`run_if_installed.py TOOL ARGUMENTS`: runs a tool of this Python's environment, or says that it is not installed."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def main(tool: str, *arguments: str) -> int:
    try:
        distribution(tool)
    except PackageNotFoundError:
        print(f"{tool} is not installed: skipped")
        return 0
    print(tool, *arguments[:3], flush=True)
    return subprocess.run([Path(sys.executable).parent / tool, *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
