"""Shared by all benchmarks: arguments, timers, the peers' figures, cases and their result files, plots."""

import argparse
import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.stale import RESULTS, Kernels
from dsa_ext.testing.inputs import drift_indices
from dsa_ext.testing.progress import Progress
from dsa_ext.testing.timing import time_ms

BENCH = Path(__file__).resolve().parent
Case = dict[str, Any]
PEERS: dict[str, Any] = json.loads((BENCH / "peers_h200.json").read_text())
#: Limit of similarity_error between ours and a peer in PyTorch, which rounds to bf16 at other places.
PEER_SIMILARITY = 1e-4
#: Colors of our bars, the best peer's, and the others'.
COLOURS = ("#1f77b4", "#9aa5b1", "#d5b483")

try:
    from triton.testing import do_bench
except ImportError:  # not every build of torch includes triton
    do_bench = None

#: Seconds of rest before a graph runs, and for which it runs before it is timed.
REST, WARM_UP = 1.0, 0.3
TIMER = "triton.testing.do_bench, median" if do_bench else "CUDA events, L2 flushed, median"


def parse_arguments(doc: str) -> argparse.Namespace:
    """The arguments `only` and `out`. Without a Hopper GPU the program exits with an error."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with this in OP/NAME; writes no file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("needs a Hopper GPU (sm_90)")
    return args


def measure_all(
    op: str, specs: Iterable[Any], measure: Callable[[Any, dict[str, float]], Case], only: str
) -> list[Case]:
    """The cases of the specs whose OP/NAME contains `only`. `measure` also gets the times of the cases before it."""
    chosen = [spec for spec in specs if only in f"{op}/{spec.name}"]
    progress = Progress(total=len(chosen))
    times: dict[str, float] = {}
    cases = []
    for spec in chosen:
        cases.append(measure(spec, times))
        times[spec.name] = cases[-1]["ms"]
        progress.step(f"{op}: {spec.name}")
    return cases


def make_case(
    name: str,
    group: str,
    args: dict[str, Any],
    ms: float,
    *,
    tflops: float | None = None,
    peer: tuple[str, float] | None = None,
    err: dict[str, float] | None = None,
    **others: Any,
) -> Case:
    """One line of a result file. The peer's figure is in TFLOP/s if the case has `tflops`, else in milliseconds."""
    ratio = None
    if peer:
        ratio = tflops / peer[1] if tflops else peer[1] / ms
    return {
        "name": name,
        "group": group,
        "args": args,
        "ms": round(ms, 6),
        "tflops": round(tflops, 2) if tflops else None,
        "peer": peer[0] if peer else None,
        "peer_value": peer[1] if peer else None,
        "ratio": round(ratio, 4) if ratio else None,
        "err": err,
        **others,
    }


def run(
    op: str,
    doc: str,
    specs: Iterable[Any],
    measure: Callable[[Any, dict[str, float]], Case],
    plot: Callable[[list[Case], Path], None],
    timer: str = TIMER,
    operators: Sequence[str] = (),
) -> None:
    """The main function of a benchmark of `op`, or of several operators. `doc` is the docstring of its module."""
    args = parse_arguments(doc)
    report(op, measure_all(op, specs, measure, args.only), None if args.only else args.out, plot, timer, operators)


def time_versus(ms: float, name: str | None, times: Mapping[str, float]) -> dict[str, Any]:
    """Fields of a case: its time as a multiple of the time of the case `name`, if that was measured."""
    return {"time_vs": {name: round(ms / times[name], 3)}} if name in times else {}


def measure_ms(call: Callable[[], object]) -> float:
    """Median milliseconds of back-to-back calls, with the L2 flushed before each: the peers were measured this way."""
    if do_bench is None:
        return time_ms(call)
    return float(do_bench(call, return_mode="median"))


def measure_rotating_ms(call: Callable[[Any], object], inputs: Sequence[Any]) -> float:
    """Milliseconds per call in a CUDA graph of one call per input: the time of a short kernel in the middle of others.

    Together the inputs should be several times as large as the L2. Unlike after a flush, the L2 is not full of modified
    data that must be written back before other data can be cached. The chip rests first, because several seconds of
    work lower its clock, and a time would depend on the cases before it. Then the graph runs for a while: right after a
    rest, clocks and power are not yet those of a program that goes on.
    """
    call(inputs[0])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kept = [call(value) for value in inputs]
    time.sleep(REST)
    started = time.monotonic()
    while time.monotonic() - started < WARM_UP:
        graph.replay()
        torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(12):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / len(inputs))
    del kept
    return sorted(times)[len(times) // 2]


def peer_figure(op: str, key: str, case: str, flop: float | None = None) -> tuple[str, float]:
    """A peer's name and figure: TFLOP/s if recorded as such or if `flop` of the call is given, else milliseconds."""
    figure = PEERS[op]["figures"][key]
    value = float(figure["values"][case])
    if figure["unit"] != "TFLOP/s":
        ms = round(value / 1e3, 6) if figure["unit"] == "us" else value
        value = round(flop / ms / 1e9, 2) if flop else ms
    return figure["peer"] + ", rested" * (figure["method"] == "rested"), value


def pytorch_peers(name: str, function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """`function`, written in PyTorch, in eager mode and compiled by torch.compile for the sizes of its first call."""
    torch._dynamo.reset()  # otherwise sizes that differ from earlier calls become dynamic
    return {name: function, f"{name}, compiled": torch.compile(function, fullgraph=True, dynamic=False)}


def measure_peers(calls: dict[str, Callable[[], object]]) -> tuple[tuple[str, float], dict[str, float]]:
    """The fastest peer with its milliseconds, and the times of all: the field `peers_ms` of a case."""
    times = {name: round(measure_ms(call), 6) for name, call in calls.items()}
    return min(times.items(), key=lambda peer: peer[1]), times


def csrc_sha256() -> str:
    """Hash of the kernels' sources: for each file of csrc/ in sorted order, its relative path, NUL, and contents."""
    csrc = BENCH.parent / "csrc"
    digest = hashlib.sha256()
    for path in sorted(path for path in csrc.rglob("*") if path.is_file()):
        digest.update(str(path.relative_to(csrc)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
    }


def write_results(op: str, cases: Sequence[Case], folder: Path, timer: str, operators: Sequence[str]) -> Path:
    """Writes <op>.json with one line per case, so that a new measurement makes a readable diff."""
    hashes = {"csrc_sha256": csrc_sha256(), "kernels_sha256": Kernels().sha256(operators)}
    head = {"op": op, **machine(), "timer": timer, "operators": operators, **hashes}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join("  " + json.dumps(case) for case in cases)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{op}.json"
    path.write_text("\n".join(["{", *lines, ' "cases": [', rows, " ]", "}"]) + "\n")
    return path


def causal_indices(seq: int, topk: int, generator: torch.Generator) -> Tensor:
    """For each query the ascending ids of up to `topk` random keys at or before its own, then padding."""
    rows = []
    for begin in range(0, seq, 1024):
        position = torch.arange(begin, min(begin + 1024, seq), device="cuda")[:, None]
        keys = torch.rand(len(position), seq, generator=generator, device="cuda")
        ids = keys.masked_fill(torch.arange(seq, device="cuda") > position, -1).topk(topk).indices
        rows.append(ids.masked_fill(ids > position, seq).sort().values)
    indices = torch.cat(rows)
    return indices.masked_fill(indices == seq, -1).int()[None, :, None]


def arranged(indices: Tensor, s_kv: int, ids: str) -> Tensor:
    """Random lists [B, S, G, K] as they are ("random"), in "ascending" order, or lists that "drift" in their place."""
    if ids == "drift":
        return drift_indices(indices.shape, s_kv, torch.Generator(indices.device).manual_seed(1))
    return indices.sort(-1).values.contiguous() if ids == "ascending" else indices


def report(
    op: str,
    cases: Sequence[Case],
    folder: Path | None,
    plot: Callable[[Any, Path], None],
    timer: str = TIMER,
    operators: Sequence[str] = (),
) -> None:
    """Prints one line per case. If `folder` is given, writes the result file and the plot there."""
    units = {"tflops": "TFLOP/s", "tbps": "TB/s", "extra_mb": "MB"}
    for case in cases:
        rates = "".join(f"{case[key]:9.2f} {unit}" for key, unit in units.items() if case.get(key) is not None)
        ratio = f"{case['ratio']:8.3f} x {case['peer']}" if case["ratio"] else ""
        glue = f"{case['glue']:8.1%} glue" if "glue" in case else ""
        versus = "".join(f"{value:8.3f} x time of {name}" for name, value in case.get("time_vs", {}).items())
        print(f"{case['name']:<36}{case['ms']:>11.4f} ms{rates}{ratio}{glue}{versus}")
    if folder is not None:
        path = write_results(op, cases, folder, timer, operators or [op])
        plot(cases, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png').name}")


def pyplot() -> Any:
    """matplotlib.pyplot, set up to draw only into files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


@contextmanager
def drawing(path: Path, width: float, axes: int = 1) -> Iterator[Any]:
    """The axes of a figure: an array of several in a row, or the only one. Leaving the block writes the figure."""
    plt = pyplot()
    figure, row = plt.subplots(1, axes, figsize=(width, 4.2), constrained_layout=True)
    yield row
    figure.savefig(path, dpi=100)
    plt.close(figure)


def grouped_bars(
    axis: Any, labels: Sequence[str], series: dict[str, Sequence[float]], *, number: str = "{:.0f}"
) -> None:
    """Grouped bars: one group per label, one color per series, the value on top of each bar. 0 stands for no bar."""
    width = 0.8 / len(series)

    def text_of(value: float) -> str:
        return number.format(value) if value else ""

    for place_in_group, ((name, values), colour) in enumerate(zip(series.items(), COLOURS, strict=False)):
        places = [place + (place_in_group - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axis.bar_label(axis.bar(places, values, width, label=name, color=colour), fmt=text_of, fontsize=8)
    axis.set_xticks(range(len(labels)), labels)
    axis.legend(loc="lower right", fontsize=8)
