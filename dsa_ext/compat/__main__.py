"""`python -m dsa_ext.compat install-shim DIR` writes the packages `flash_mla` and `deep_gemm`, see docs/compat.md."""

import argparse
from pathlib import Path

from dsa_ext.compat.shim import install

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dsa_ext.compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("install-shim", help="write the packages flash_mla and deep_gemm to a folder")
    command.add_argument("folder", type=Path, metavar="DIR", help="is created; put it first on PYTHONPATH")
    for path in install(parser.parse_args().folder):
        print(path)
