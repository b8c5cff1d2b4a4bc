"""What every benchmark shares: the timer, the peers' figures, the result file, plots."""

import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsa_ext.testing.timing import time_ms

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results" / "h200"
PEERS: dict[str, Any] = json.loads((BENCH / "peers_h200.json").read_text())
#: Colours of our bars, the best peer's, and the others'.
COLOURS = ("#1f77b4", "#9aa5b1", "#d5b483")

try:
    from triton.testing import do_bench
except ImportError:  # not every torch brings triton
    do_bench = None

TIMER = "triton.testing.do_bench, median" if do_bench else "CUDA events, L2 flushed, median"


def measure_ms(call: Callable[[], object]) -> float:
    """Median milliseconds, back to back with the L2 flushed: as the peers were measured."""
    if do_bench is None:
        return time_ms(call)
    return float(do_bench(call, return_mode="median"))


def peer_figure(op: str, key: str, case: str) -> float:
    return float(PEERS[op][key][case])


def csrc_sha256() -> str:
    """Names the kernels' sources: over each file of csrc/ in sorted order, relative path, NUL, contents."""
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


def write_results(op: str, cases: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Writes <op>.json: one line a case, so that a new measurement reads well in a diff."""
    head = {"op": op, **machine(), "timer": TIMER, "csrc_sha256": csrc_sha256()}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    rows = ",\n".join("  " + json.dumps(case) for case in cases)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{op}.json"
    path.write_text("\n".join(["{", *lines, ' "cases": [', rows, " ]", "}"]) + "\n")
    return path


def causal_indices(seq: int, topk: int, generator: torch.Generator) -> Tensor:
    """For each query up to `topk` random keys of those at or before it, ascending, then padding."""
    rows = []
    for begin in range(0, seq, 1024):
        position = torch.arange(begin, min(begin + 1024, seq), device="cuda")[:, None]
        keys = torch.rand(len(position), seq, generator=generator, device="cuda")
        ids = keys.masked_fill(torch.arange(seq, device="cuda") > position, -1).topk(topk).indices
        rows.append(ids.masked_fill(ids > position, seq).sort().values)
    indices = torch.cat(rows)
    return indices.masked_fill(indices == seq, -1).int()[None, :, None]


def report(op: str, cases: Sequence[dict[str, Any]], folder: Path | None, plot: Callable[[Any, Path], None]) -> None:
    """Prints a line a case and, where there is a folder, writes the result file and the plot there."""
    for case in cases:
        ratio = f"{case['ratio']:8.3f} x {case['peer']}" if case["ratio"] else ""
        versus = "".join(f"{value:8.3f} x time of {name}" for name, value in case.get("time_vs", {}).items())
        print(f"{case['name']:<36}{case['ms']:>11.4f} ms{case['tflops'] or 0:>9.1f} TFLOP/s{ratio}{versus}")
    if folder is not None:
        path = write_results(op, cases, folder)
        plot(cases, path.with_suffix(".png"))
        print(f"wrote {path} and {path.with_suffix('.png').name}")


def grouped_bars(axis: Any, labels: Sequence[str], series: dict[str, Sequence[float]]) -> None:
    """Bars side by side: one group a label, one colour a series, the value on top of each bar."""
    width = 0.8 / len(series)
    for number, ((name, values), colour) in enumerate(zip(series.items(), COLOURS, strict=False)):
        places = [place + (number - (len(series) - 1) / 2) * width for place in range(len(labels))]
        axis.bar_label(axis.bar(places, values, width, label=name, color=colour), fmt="{:.0f}", fontsize=8)
    axis.set_xticks(range(len(labels)), labels)
    axis.legend(loc="lower right", fontsize=8)
