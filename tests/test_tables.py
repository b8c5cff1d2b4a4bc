"""What the documentation says of the result files is what bench/tables.py makes of them."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TABLES = Path(__file__).parent.parent / "bench" / "tables.py"


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", TABLES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_result(root: Path, **values: Any) -> None:
    case = {"name": "one", "group": "A group", "ms": 1.25, "tflops": 500.4, "peer": "Peer", "peer_value": 400}
    case |= {"ratio": 1.251, "err": {"similarity": 2e-6}} | values
    head = {"gpu": "a GPU", "driver": "1", "cuda": "13.0", "torch": "2.11", "timer": "a timer"}
    head["kernels_sha256"] = "0" * 64
    path = root / "bench" / "results" / "h200" / "some_op.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"op": "some_op", **head, "cases": [case]}))


def test_pages_are_up_to_date(tables: ModuleType) -> None:
    text = "".join(page.read_text() for page in tables.pages())
    results = sorted(path.stem for path in (tables.ROOT / tables.RESULTS).glob("*.json"))
    assert sorted(re.findall(r"<!-- results: (?!headlines|transformers_steps)(\w+) -->", text)) == results
    assert "<!-- results: headlines -->" in (tables.ROOT / "README.md").read_text()
    assert tables.main(["--check"]) == 0


def test_readme_fits_on_a_few_screens(tables: ModuleType) -> None:
    assert len((tables.ROOT / "README.md").read_text().splitlines()) <= 200


def test_tables_follow_the_results(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    page = tmp_path / "docs/results/family.md"
    page.parent.mkdir(parents=True)
    page.write_text("before\n<!-- results: some_op -->\n<!-- end of results -->\nafter\n")
    (tmp_path / "README.md").write_text("no block\n")

    assert tables.main([]) == 0
    assert "no results yet" in page.read_text()
    assert tables.main(["--check"]) == 0

    write_result(tmp_path)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert "| `one` | 1.25 ms | 500 | 400 (Peer) | **1.25** | 2.0e-06 |" in page.read_text()
    assert "](../../bench/results/h200/some_op.png)" in page.read_text()
    assert page.read_text().startswith("before\n<!-- results: some_op -->\n")
    assert page.read_text().endswith("<!-- end of results -->\nafter\n")
    assert tables.main(["--check"]) == 0

    write_result(tmp_path, tflops=600.0)
    assert tables.main(["--check"]) == 1


def test_picture_follows_the_ratios(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("no block\n")
    write_result(tmp_path)
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    picture = tmp_path / tables.PICTURE
    assert "some_op" in picture.read_text()
    assert "1.25  Peer" in picture.read_text()
    assert tables.main(["--check"]) == 0
    write_result(tmp_path, ratio=2.0)
    assert tables.main(["--check"]) == 1


def test_headlines(tables: ModuleType) -> None:
    lines = tables.headlines().splitlines()
    assert len(lines) == len(tables.HEADLINES) == 7
    assert all(re.match(r"- .*\*\*[\d.]+ (TFLOP/s|µs|ms|s)\*\*", line) for line in lines)


def test_columns_without_values_are_left_out(tables: ModuleType) -> None:
    case = {"name": "one", "ms": 0.0125, "tflops": None, "peer": None, "ratio": None, "err": None}
    assert tables.table([case]) == ["| case | time |", "| --- | --- |", "| `one` | 12.5 µs |"]
    case["time_vs"] = {"other": 0.5}
    assert tables.table([case])[2] == "| `one` | 12.5 µs | 0.50 x `other` |"


def test_cases_without_flops(tables: ModuleType) -> None:
    """The peer's figure is then a time; selections are right or not, so that they have no error."""
    case = {"name": "one", "ms": 1.0, "tflops": None, "peer": "Peer", "peer_value": 0.25, "ratio": 0.25}
    case |= {"err": {"differing_rows": 0}, "tbps": 2.125, "extra_mb": 63.7}
    assert tables.table([case]) == [
        "| case | time | TB/s | peer's time | ratio | workspace |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `one` | 1.00 ms | 2.12 | 250.0 µs (Peer) | **0.25** | 64 MB |",
    ]


def test_several_peers(tables: ModuleType) -> None:
    """The ratio is to the fastest; a figure that was taken in an unknown way has none."""
    plain = {"tflops": None, "err": None, "ms": 1.0}
    case = plain | {"name": "one", "peer": "B", "peer_value": 2.0, "ratio": 2.0, "peers_ms": {"A": 3.0, "B": 2.0}}
    other = plain | {"name": "two", "peer": None, "ratio": None, "not_compared_ms": {"C": 4.0}}
    assert tables.table([case, other]) == [
        "| case | time | peer's time | ratio | slower peer | other figure, timing method not recorded |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `one` | 1.00 ms | 2.00 ms (B) | **2.00** | 3.00 ms (A) |  |",
        "| `two` | 1.00 ms |  |  |  | 4.00 ms (C) |",
    ]


def test_layers(tables: ModuleType) -> None:
    """Steps have two parts and a peak of memory; a peer whose memory does not suffice has no figures."""
    layer = {"tflops": None, "err": None, "ms": 3.0, "forward_ms": 1.0, "backward_ms": 2.0, "peak_mb": 1234.0}
    beside = {"peer": "Peer", "peer_value": 6.0, "ratio": 2.0, "peer_peak_mb": 2500.0, "glue": 0.048}
    alone = {"peer": None, "peer_value": None, "ratio": None, "peer_failure": "out of memory", "glue": -0.001}
    assert tables.table([{"name": "one", **layer, **beside}, {"name": "two", **layer, **alone}]) == [
        "| case | time | forward | backward | glue | peer's time | ratio | peak memory | peer's peak memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| `one` | 3.00 ms | 1.00 ms | 2.00 ms | 4.8% | 6.00 ms (Peer) | **2.00** | 1.23 GB | 2.50 GB |",
        "| `two` | 3.00 ms | 1.00 ms | 2.00 ms | -0.1% | out of memory |  | 1.23 GB |  |",
    ]


def test_steps_of_transformers(tables: ModuleType) -> None:
    step = {"name": "s1", "group": tables.TRAINING_STEPS, "ms": 10.4, "peak_mb": 1500}
    peaks = {"sdpa": 2000, "eager": 3000}
    cases = [
        {**step, "args": {"S": 1024}, "peers_ms": {"sdpa": 20.6, "eager": 30}, "peers_peak_mb": peaks},
        {**step, "args": {"S": 2048}, "peers_ms": {"sdpa": 50}, "peers_peak_mb": {"sdpa": 4e3}},
        {**step, "args": {"S": 4096}},
        {**step, "args": {"S": 4096}, "group": "another"},
    ]  # fmt: skip
    assert tables.transformers_steps(cases).splitlines() == [
        "| tokens | dsa_ext | transformers, sdpa | transformers, eager |",
        "| --- | --- | --- | --- |",
        "| 1024 | **10 ms**, 1.50 GB | 21 ms, 2.00 GB | 30 ms, 3.00 GB |",
        "| 2048 | **10 ms**, 1.50 GB | 50 ms, 4.00 GB | out of memory |",
        "| 4096 | **10 ms**, 1.50 GB | out of memory | out of memory |",
    ]
