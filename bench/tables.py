"""Writes the parts of the documentation that come from the result files: tables, headline figures, README.md's picture.

Pages are README.md and docs/results/*.md. A generated block of a page is between `<!-- results: NAME -->` and
`<!-- end of results -->`; NAME is that of a file bench/results/h200/NAME.json, `headlines`, or `transformers_steps`.
`--check` changes nothing and fails if the pages or the picture are out of date.
"""

import argparse
import hashlib
import json
import math
import os.path
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "bench/results/h200"
PICTURE = "docs/results/peers.svg"
#: The group of bench_transformers.py that README.md shows.
TRAINING_STEPS = "Training step"
BLOCK = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)

Case = dict[str, Any]

#: Operator, case and sentence of each headline figure. The sentence is filled with the fields of the case, the range of
#: ratios to the same peer, and the peer's name without the way in which it was timed.
HEADLINES = (
    (
        "sparse_mla_fwd",
        "h128_skv131072",
        "Forward of sparse attention: **{tflops:.0f} TFLOP/s** with 4096 queries, 128 heads, 131072 keys and 2048 "
        "selected keys for each query; {ratio:.2f} times {peer} ({low:.2f} to {high:.2f} over all shapes that were "
        "compared).",
    ),
    (
        "sparse_mla_bwd",
        "h128_skv131072",
        "Its backward, 4096 queries: **{tflops:.0f} TFLOP/s**, {ratio:.2f} times {peer} ({low:.2f} to {high:.2f}).",
    ),
    (
        "indexer_logits",
        "h64_skv131072",
        "Indexer logits in fp8, 4096 queries, 64 heads: **{tflops:.0f} TFLOP/s**, {ratio:.2f} times {peer} "
        "({low:.2f} to {high:.2f}).",
    ),
    (
        "topk_select",
        "4096x131072",
        "Exact top-2048 of 131072 logits, 4096 rows: **{ms:.2f} ms**, {ratio:.2f} times {peer} "
        "({low:.2f} to {high:.2f}).",
    ),
    (
        "sparse_mla_decode",
        "fp8_h128_b1_n1",
        "Decoding from an fp8 cache, one token, 128 heads, 2048 selected keys: **{us:.1f} µs** in a CUDA graph, "
        "{ratio:.2f} times {peer}, measured in the same way without its planning kernel ({low:.2f} to {high:.2f}).",
    ),
    (
        "indexer_logits_paged",
        "h64_1x131072_n1",
        "Indexer logits from a paged cache in fp8, 131072 keys, 64 heads: **{us:.1f} µs** in a CUDA graph, "
        "{ratio:.2f} times {peer}, measured in the same way without its planning kernel ({low:.2f} to {high:.2f}).",
    ),
    (
        "sparse_mla_layer",
        "h128_s131072",
        "Training step of a layer of 128 heads on 131072 tokens: **{seconds:.2f} s**, {ratio:.2f} times dense "
        "attention by cuDNN ({low:.2f} to {high:.2f}: at 8192 tokens, packed or not, and with 16 heads up to "
        "32768, dense attention is faster).",
    ),
)


def time(ms: float) -> str:
    return f"{ms * 1e3:.1f} µs" if ms < 0.5 else f"{ms:.2f} ms"


def peer(case: Case, figure: str) -> str:
    return f"{figure} ({case['peer']})"


def peer_time(case: Case) -> str:
    """The time of the peer, or how it failed."""
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
    """The times of the other measured peers; the ratio is to the fastest."""
    return times_of({name: ms for name, ms in case.get("peers_ms", {}).items() if name != case["peer"]})


def versus(case: Case) -> str:
    return ", ".join(f"{value:.2f} x `{name}`" for name, value in case.get("time_vs", {}).items())


#: Heading and cell of each column; a column that is empty in every row is left out. A peer's figure is in TFLOP/s if
#: the case has `tflops`, else in milliseconds.
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
    "other figure, timing method not recorded": given("not_compared_ms", times_of),
    "peers' kernels for logits and attention": given(
        "peer_parts_ms", lambda peers: f"{time(sum(peers.values()))}: {times_of(peers)}"
    ),
    "relative time": versus,
    "predicted": given("predicted_ms", time),
    "collectives": given("collectives_ms", time),
    "speedup": given("speedup", "{:.2f}".format),
    "workspace": given("extra_mb", "{:.0f} MB".format),
    "peak memory": given("peak_mb", gigabytes),
    "peer's peak memory": given("peer_peak_mb", gigabytes),
    "error": lambda case: f"{case['err']['similarity']:.1e}" if "similarity" in (case["err"] or {}) else "",
}


def table(cases: list[Case]) -> list[str]:
    columns = {name: [cell(case) for case in cases] for name, cell in COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return ["| " + " | ".join(row) + " |" for row in rows]


def block(name: str, page: Path) -> str:
    if name == "headlines":
        return headlines()
    path = ROOT / RESULTS / f"{name.removesuffix('_steps')}.json"
    if not path.exists():
        return "| case | time | TFLOP/s |\n| --- | --- | --- |\n| no results yet | | |\n"
    if name == "transformers_steps":
        return transformers_steps(json.loads(path.read_text())["cases"])
    result = json.loads(path.read_text())
    has_peer = any(case["peer"] for case in result["cases"])
    what = f"Speed of {name} relative to its peers" if has_peer else f"Measurements of {name}"
    lines = [
        f"{result['gpu']}, driver {result['driver']}, CUDA {result['cuda']}, torch {result['torch']}; "
        f"{result['timer']}; kernels `{result['kernels_sha256'][:12]}`.",
        "",
        f"![{what}]({Path(os.path.relpath(path, page.parent)).as_posix()[:-5]}.png)",
    ]
    groups = dict.fromkeys(case["group"] for case in result["cases"])
    for group in groups:
        lines += ["", f"{group}:", "", *table([case for case in result["cases"] if case["group"] == group])]
    return "\n".join(lines) + "\n"


def transformers_steps(cases: list[Case]) -> str:
    """Time and memory of a training step on the operators and with each implementation of transformers."""
    steps = [case for case in cases if case["group"] == TRAINING_STEPS]
    names = list(dict.fromkeys(name for case in steps for name in case.get("peers_ms", {})))
    rows = [["tokens", "dsa_ext", *(f"transformers, {name}" for name in names)], ["---"] * (2 + len(names))]
    for case in steps:
        ours = f"**{case['ms']:.0f} ms**, {gigabytes(case['peak_mb'])}"
        times, peaks = case.get("peers_ms", {}), case.get("peers_peak_mb", {})
        theirs = (f"{times[n]:.0f} ms, {gigabytes(peaks[n])}" if n in times else "out of memory" for n in names)
        rows.append([str(case["args"]["S"]), ours, *theirs])
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def library_of(case: Case) -> str:
    """The peer of a case, whether it was rested or not."""
    name: str = case["peer"]
    return name.removesuffix(", rested")


def headlines() -> str:
    lines = []
    for op, name, sentence in HEADLINES:
        cases = json.loads((ROOT / RESULTS / f"{op}.json").read_text())["cases"]
        case = next(case for case in cases if case["name"] == name)
        library = library_of(case)
        ratios = [other["ratio"] for other in cases if other["ratio"] and library_of(other) == library]
        times = {"seconds": case["ms"] / 1e3, "us": case["ms"] * 1e3}
        values = {**times, "low": min(ratios), "high": max(ratios)}
        lines.append("- " + sentence.format(**case, **values))
    return "\n".join(lines) + "\n"


def ratios() -> dict[str, tuple[list[str], list[float]]]:
    """For each result file that has ratios: its peers, and all its ratios."""
    found = {}
    for path in sorted((ROOT / RESULTS).glob("*.json")):
        cases = [case for case in json.loads(path.read_text())["cases"] if case["ratio"]]
        peers = dict.fromkeys(re.sub(r", (patched|rested|compiled)| \(inexact\)", "", case["peer"]) for case in cases)
        if cases:
            found[path.stem] = list(peers), [case["ratio"] for case in cases]
    return found


def draw(path: Path, digest: str) -> None:
    """Draws a bar for the geometric mean of each file's ratios, and a dot for each case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "dsa_ext"  # otherwise ids in the file are random
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text, not as paths
    rows = [(op, *found, math.exp(sum(map(math.log, found[1])) / len(found[1]))) for op, found in ratios().items()]
    rows.sort(key=lambda row: row[-1])
    figure, axis = plt.subplots(figsize=(9, 0.8 + 0.32 * len(rows)), constrained_layout=True)
    for place, (_, peers, values, mean) in enumerate(rows):
        axis.barh(place, mean - 1, left=1, height=0.62, color="#1f77b4" if mean >= 1 else "#9aa5b1")
        axis.plot(values, [place] * len(values), "o", color="black", markersize=3, alpha=0.5)
        axis.text(9, place, f"{mean:.2f}  {', '.join(peers)}", va="center", fontsize=8)
    axis.axvline(1, color="black", linewidth=1)
    ticks = [0.2, 0.5, 1, 2, 4, 8]
    axis.set(
        xscale="log", xlim=(0.17, 40), ylim=(-0.6, len(rows) - 0.4), xticks=[], xlabel="speed relative to the peer"
    )
    axis.minorticks_off()
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.set_yticks(range(len(rows)), [op for op, *_ in rows], fontsize=9)
    axis.set_title("H200: geometric mean of all cases with a peer (bar), each case (dot), peers", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": digest})
    plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def digest_of_ratios() -> str:
    """Hash of the picture's numbers. Its bytes depend on the version of matplotlib, so they are not compared."""
    return hashlib.sha256(json.dumps(ratios()).encode()).hexdigest()


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs/results").glob("*.md"))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a page or the picture is out of date"
    )
    args = parser.parse_args(arguments)
    outdated = []
    for page in pages():
        old = page.read_text()
        new = BLOCK.sub(lambda match, page=page: match[1] + block(match[2], page) + match[3], old)  # type: ignore[misc]
        if new != old:
            outdated.append(page)
            if not args.check:
                page.write_text(new)
    picture, digest = ROOT / PICTURE, digest_of_ratios()
    if not picture.exists() or digest not in picture.read_text():
        outdated.append(picture)
        if not args.check:
            draw(picture, digest)
    if args.check and outdated:
        names = ", ".join(path.relative_to(ROOT).as_posix() for path in outdated)
        print(f"out of date with the result files: {names}; run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
