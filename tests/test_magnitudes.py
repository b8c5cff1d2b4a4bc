"""The tolerances at every magnitude, with the CPU implementations in fp32; a case that hangs is a failure."""

import sys
from pathlib import Path

import magnitudes_worker
import pytest
from magnitudes import ORDINARY, cases, run


@pytest.mark.parametrize("op", ORDINARY)
def test_cases_on_the_cpu(op: str) -> None:
    wrong, spread, hidden = [], 0, 0
    for case in cases(op, variants=False):
        spread, hidden = spread + case.spreads, hidden + (case.hidden is not None)
        try:
            run(op, case, "cpu")
        except Exception as error:
            wrong.append(f"{case.name}: {type(error).__name__}: {error}"[:500])
    assert not wrong, "\n".join(wrong)
    # A case with NaN in elements that are not read needs one in which they are read.
    assert spread or not hidden or op in ("topk_select", "indexer_topk", "indexer_topk_paged")


WORKER = """
import argparse, faulthandler, json, os, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--skip", type=int)
for number in range(parser.parse_args().skip, 5):
    print(json.dumps({"begin": f"case {number}"}), flush=True)
    faulthandler.dump_traceback_later(0.5, exit=True)
    if number == 1:
        time.sleep(100)
    if number == 3:
        os._exit(7)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"end": f"case {number}", **({"error": "wrong"} if number == 4 else {"worst": 0})}), flush=True)
"""


def test_a_case_that_hangs_is_a_failure_and_the_others_go_on(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    wrong, done = magnitudes_worker.failures([sys.executable, str(worker)])
    assert done == 5
    assert wrong[0] == "case 1: did not end in time"
    assert wrong[1].startswith("case 3: ended its process with 7")
    assert wrong[2:] == ["case 4: wrong"]


def test_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not end itself."""
    worker = tmp_path / "worker.py"
    worker.write_text('import time; print(\'{\\"begin\\": \\"stuck\\"}\', flush=True); time.sleep(100)')
    monkeypatch.setattr(magnitudes_worker, "ALL_SECONDS", 2.0)
    monkeypatch.setattr(magnitudes_worker, "ENDS", 1)
    wrong, done = magnitudes_worker.failures([sys.executable, str(worker)])
    assert wrong == ["stuck: did not end in time", "gave up after 1 cases"]
    assert done == 1


def test_a_worker_that_cannot_start() -> None:
    wrong, done = magnitudes_worker.failures([sys.executable, "-c", "raise SystemExit(2)"])
    assert wrong[0].startswith("before the first case: ended its process with 2")
    assert done == 0
