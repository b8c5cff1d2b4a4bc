"""The benchmarks without a GPU: the results kept here are of all their cases, and can be drawn."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("bench_*.py"))


@pytest.fixture(params=NAMES)
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(request.param)


def parts(benchmark: ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """Of each operator its cases and how they are drawn."""
    if hasattr(benchmark, "BENCHMARKS"):
        for op, (specs, _, plot) in benchmark.BENCHMARKS.items():
            yield op, specs, plot
    else:
        yield benchmark.OP, benchmark.specs, benchmark.plot


def test_results_are_complete_and_can_be_drawn(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for op, specs, plot in parts(benchmark):
        cases = json.loads((BENCH / "results/h200" / f"{op}.json").read_text())["cases"]
        names = [spec.name for spec in specs()]
        assert len(set(names)) == len(names)
        # The forward of sparse MLA also has one that is of the host.
        assert [case["name"] for case in cases if case["group"] != "Host"] == names
        plot(cases, tmp_path / f"{op}.png")
        assert (tmp_path / f"{op}.png").stat().st_size > 10_000
