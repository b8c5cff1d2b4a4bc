"""Writes README.md's result tables from bench/results/h200/*.json; `--check` only says whether they are up to date.

A table stands between `<!-- results: OP -->` and `<!-- end of results -->`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "bench/results/h200"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

Case = dict[str, Any]


def time(ms: float) -> str:
    return f"{ms * 1e3:.1f} µs" if ms < 0.5 else f"{ms:.2f} ms"


def peer(case: Case, figure: str) -> str:
    return f"{figure} ({case['peer']})"


def peer_time(case: Case) -> str:
    """A peer that fails is told by its failure."""
    if case["peer"] and not case["tflops"]:
        return peer(case, time(case["peer_value"]))
    failure: str = case.get("peer_failure", "")
    return failure


def gigabytes(mb: float) -> str:
    return f"{mb / 1e3:.2f} GB"


def given(key: str, form: Callable[[Any], str]) -> Callable[[Case], str]:
    """A cell that is empty where the case has no such field."""
    return lambda case: form(case[key]) if key in case else ""


def times_of(peers: dict[str, float]) -> str:
    return ", ".join(f"{time(ms)} ({name})" for name, ms in peers.items())


def slower_peers(case: Case) -> str:
    """Those that were measured too, while the ratio is to the fastest."""
    return times_of({name: ms for name, ms in case.get("peers_ms", {}).items() if name != case["peer"]})


def versus(case: Case) -> str:
    return ", ".join(f"{value:.2f} x `{name}`" for name, value in case.get("time_vs", {}).items())


#: Heading and cell of each column; a column that is empty in every row is left out. A peer's figure is its TFLOP/s if
#: the case has some, else its milliseconds.
COLUMNS: dict[str, Callable[[Case], str]] = {
    "case": lambda case: f"`{case['name']}`",
    "time": lambda case: time(case["ms"]),
    "forward": given("forward_ms", time),
    "backward": given("backward_ms", time),
    "glue": given("glue", "{:.1%}".format),
    "TFLOP/s": lambda case: f"{case['tflops']:.0f}" if case["tflops"] else "",
    "TB/s": given("tbps", "{:.2f}".format),
    "peer's TFLOP/s": lambda case: peer(case, f"{case['peer_value']:.0f}") if case["peer"] and case["tflops"] else "",
    "peer's time": peer_time,
    "ratio": lambda case: f"**{case['ratio']:.2f}**" if case["ratio"] else "",
    "slower peer": slower_peers,
    "beside, how it was timed is not recorded": given("not_compared_ms", times_of),
    "time beside": versus,
    "memory beside results": given("extra_mb", "{:.0f} MB".format),
    "peak memory": given("peak_mb", gigabytes),
    "peer's peak memory": given("peer_peak_mb", gigabytes),
    "error": lambda case: f"{case['err']['similarity']:.1e}" if "similarity" in (case["err"] or {}) else "",
}


def table(cases: list[Case]) -> list[str]:
    columns = {name: [cell(case) for case in cases] for name, cell in COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return ["| " + " | ".join(row) + " |" for row in rows]


def block(op: str) -> str:
    path = ROOT / RESULTS / f"{op}.json"
    if not path.exists():
        return "| case | time | TFLOP/s |\n| --- | --- | --- |\n| no results yet | | |\n"
    result = json.loads(path.read_text())
    lines = [
        f"{result['gpu']}, driver {result['driver']}, CUDA {result['cuda']}, torch {result['torch']}; "
        f"{result['timer']}; kernels `{result['kernels_sha256'][:12]}`.",
        "",
        f"![Speed of {op} beside its peers]({RESULTS}/{op}.png)",
    ]
    groups = dict.fromkeys(case["group"] for case in result["cases"])
    for group in groups:
        lines += ["", f"{group}:", "", *table([case for case in result["cases"] if case["group"] == group])]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if README.md is out of date")
    args = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = BLOCK.sub(lambda match: match[1] + block(match[2]) + match[3], old)
    if not args.check:
        readme.write_text(new)
    elif new != old:
        print("README.md differs from the result files: run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
