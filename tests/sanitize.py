"""Small calls of every operator and of every variant of the kernels, under compute-sanitizer, one part at a time.

    python tests/sanitize.py [--only NAME ..] [--tool memcheck racecheck]     each part under each tool
    python tests/sanitize.py --run NAME                                       the calls of one part, without a tool

Each part takes less than two minutes: its calls are small, and their results are checked on the CPU, so that the tool
runs little but the kernels. memcheck finds accesses outside of each tensor, not only outside of the allocator's blocks:
every tensor is an allocation of its own. racecheck recognizes only barriers as synchronization. It reports the words
that CTAs of mhc_pre_fwd and mhc_pre_bwd send each other and poll as races, and what lanes of sparse_mha have read
before one of them arrives for its warp, behind __syncwarp; so these parts are skipped.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time

from sanitized import PARTS

from dsa_ext.testing.progress import Progress

TOOLS = ("memcheck", "racecheck")
#: Parts that a tool skips.
LEFT_OUT = {"memcheck": (), "racecheck": ("mhc_pre_fwd", "mhc_pre_bwd", "sparse_mha")}
#: Seconds after which a part counts as hanging.
LIMIT = 600


def run_under(tool: str, part: str, sanitizer: str) -> str | None:
    """Runs a part under a tool; returns the output if the tool or the part reports errors, else None."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", sys.executable, __file__, "--run", part]
    environment = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {})}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"did not end in {LIMIT} s"
    return (done.stdout + done.stderr)[-20_000:] if done.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", choices=PARTS, metavar="NAME", help="the calls of this part, in this process")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=f"parts: {', '.join(PARTS)}"
    )
    parser.add_argument("--tool", nargs="+", choices=TOOLS, default=TOOLS)
    default = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    parser.add_argument("--sanitizer", default=default, metavar="PATH")
    args = parser.parse_args()
    if args.run is not None:
        PARTS[args.run]()
        return 0
    if shutil.which(args.sanitizer) is None:
        parser.error(f"no compute-sanitizer at {args.sanitizer}: it is part of the CUDA toolkit, see --sanitizer")
    jobs = [(tool, part) for tool in args.tool for part in args.only if part not in LEFT_OUT[tool]]
    progress, wrong = Progress(len(jobs)), []
    for tool, part in jobs:
        begin = time.monotonic()
        found = run_under(tool, part, args.sanitizer)
        took = f"{tool} {part}: {time.monotonic() - begin:.0f} s"
        if found is not None:
            wrong.append(f"{tool} {part}")
            print(f"\n{took}, ERRORS\n{found}", flush=True)
        progress.step(took)
    print(f"{len(jobs) - len(wrong)} of {len(jobs)} parts are free of errors" + "".join(f"\n  not {w}" for w in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
