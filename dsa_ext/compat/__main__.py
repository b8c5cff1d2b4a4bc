"""`python -m dsa_ext.compat install-shim DIR [flash_mla] [deep_gemm]` writes packages of these names to a folder.

See docs/integrations/compat.md.
"""

import argparse
from pathlib import Path

from dsa_ext.compat.shim import NAMES, install

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dsa_ext.compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("install-shim", help="write the packages flash_mla and deep_gemm to a folder")
    command.add_argument("folder", type=Path, metavar="DIR", help="is created; put it first on PYTHONPATH")
    which = f"{' or '.join(NAMES)}; both if none is named"
    command.add_argument("packages", nargs="*", default=list(NAMES), metavar="PACKAGE", help=which)
    args = parser.parse_args()
    for name in args.packages:
        if name not in NAMES:
            command.error(f"PACKAGE must be {' or '.join(NAMES)}, got {name}")
    for path in install(args.folder, args.packages):
        print(path)
