"""examples/finetune_hf.py with few steps: the model learns, and so do the indexers."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = runpy.run_path(str(EXAMPLES / "finetune_hf.py"))
    picture = tmp_path / "finetune.png"
    args = example["parse_arguments"](["--steps", "25", "--picture", str(picture)])
    progress = example["Progress"](total=2 * args.steps)
    history, baseline = (example["train"](args, progress, loss_coeff) for loss_coeff in (1.0, 0.0))
    assert history.held_out[25] < history.held_out[0] - 1
    assert all(0 <= loss < 1 for loss in history.indexer)
    example["draw"](history, baseline, args.picture)
    assert picture.stat().st_size > 1000
