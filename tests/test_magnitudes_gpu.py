"""Every kernel with numbers of every magnitude, and with NaN and Inf in every argument, each within a time limit."""

import sys
from pathlib import Path

import pytest
from magnitudes import ORDINARY, cases
from magnitudes_worker import failures

pytestmark = [pytest.mark.gpu, pytest.mark.long]


@pytest.mark.parametrize("op", ORDINARY)
def test_cases(op: str) -> None:
    worker = Path(__file__).parent / "magnitudes_worker.py"
    wrong, done = failures([sys.executable, str(worker), op])
    assert not wrong, f"{len(wrong)} of {done} cases:\n" + "\n".join(wrong)
    assert done == sum(1 for _ in cases(op))
