"""Runs the cases of magnitudes.py for one operator, each within a time limit: python tests/magnitudes_worker.py OP

A kernel that hangs can only be stopped by ending its process. So `failures` runs this file in a process of its own, and
starts another one after the case that ended it.
"""

import argparse
import faulthandler
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

#: Seconds that a case may take; the first one also starts CUDA.
CASE_SECONDS, FIRST_SECONDS = 30.0, 180.0
#: Seconds that all cases of an operator may take: the last resort if the process does not end itself.
ALL_SECONDS = 600.0
#: After so many cases that ended their process, the remaining ones are skipped.
ENDS = 4


def failures(command: Sequence[str]) -> tuple[list[str], int]:
    """Error messages, and the number of finished cases. `command` takes --skip N and prints what `main` prints."""
    wrong: list[str] = []
    done, ends = 0, 0
    while ends < ENDS:
        try:
            process = subprocess.run(
                [*command, "--skip", str(done)], capture_output=True, text=True, timeout=ALL_SECONDS, errors="replace"
            )
            output, code, trace = process.stdout, process.returncode, process.stderr
        except subprocess.TimeoutExpired as expired:
            output, code, trace = (expired.stdout or b"").decode(), None, ""
        begun, lines = None, output.splitlines()
        for line in lines:
            report: dict[str, Any] = json.loads(line)
            if "begin" in report:
                begun = report["begin"]
                continue
            done, begun = done + 1, None
            if "error" in report:
                wrong.append(f"{report['end']}: {report['error']}")
        if code == 0:
            return wrong, done
        ends += 1
        hung = code is None or "Timeout (" in trace
        why = "did not end in time" if hung else f"ended its process with {code}: {trace[-1500:]}"
        if begun is not None or not lines:
            wrong.append(f"{begun or 'before the first case'}: {why}")
        done += begun is not None
        if not lines:
            break
    return [*wrong, f"gave up after {done} cases"], done


def main() -> None:
    from magnitudes import ORDINARY, cases, run

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=ORDINARY)
    parser.add_argument("--skip", type=int, default=0, help="how many of the first cases to leave out")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    limit = FIRST_SECONDS
    for number, case in enumerate(cases(args.op)):
        if number < args.skip:
            continue
        print(json.dumps({"begin": case.name}), flush=True)
        faulthandler.dump_traceback_later(limit, exit=True)
        limit = CASE_SECONDS
        try:
            outcome: dict[str, Any] = {"worst": run(args.op, case, args.device)}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:1000]}
            if "CUDA error" in outcome["error"]:  # after which the process can call no more kernels
                print(json.dumps({"end": case.name, **outcome}), flush=True)
                sys.exit(3)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"end": case.name, **outcome}), flush=True)


if __name__ == "__main__":
    main()
