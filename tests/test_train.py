"""examples/train.py with fewer steps: losses fall, and the indexers learn to select what attention prefers."""

import math
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "train.py"))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's sizes and device are those of a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_gpu")
def test_training(example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--length 64 --topk 8 --batch 4 --hidden 64 --dense-steps 60 --warmup-steps 40 --sparse-steps 30"
    args = example["parse_arguments"](f"{sizes} --measure-every 1000 --picture {tmp_path / 'training.png'}".split())
    _, history = example["train"](args)
    first, last = slice(10), slice(-10, None)

    assert history.mean(history.language, "dense", last) < history.mean(history.language, "dense", first) - 0.5
    assert history.mean(history.language, "sparse", last) < history.mean(history.language, "dense", first) - 0.5
    assert history.mean(history.indexer, "warmup", last) < 0.7 * history.mean(history.indexer, "warmup", first)
    assert all(
        math.isnan(value) == (phase == "dense") for value, phase in zip(history.indexer, history.phases, strict=True)
    )
    (before, after) = history.selections[0], history.selections[130]
    assert after[0] > before[0] + 0.1, "attention on the selected keys"
    assert after[1] > before[1] + 0.1, "of the best keys, selected"

    example["draw"](history, args.picture)
    assert args.picture.stat().st_size > 10_000
    example["print_report"](args, history)
    assert "warmup" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_training_with_hyper_connections(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--streams 2 --length 32 --topk 4 --batch 4 --dense-steps 30 --warmup-steps 10 --sparse-steps 10"
    args = example["parse_arguments"](f"{sizes} --measure-every 1000".split())
    _, history = example["train"](args)
    first, last = slice(5), slice(-5, None)
    assert history.mean(history.language, "dense", last) < history.mean(history.language, "dense", first) - 0.5
    assert history.mean(history.language, "sparse", last) < history.mean(history.language, "dense", first) - 0.5
    assert history.mean(history.indexer, "warmup", last) < history.mean(history.indexer, "warmup", first)
    example["print_report"](args, history)
    assert "2 layers, 2 streams, 4 heads" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_held_out_text_is_not_trained_on(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random files, in which no eight bytes occur twice: those of the held-out windows are not in the training text."""
    for name in ("README.md", "bench/NOTES.md", "docs/index.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(random.Random(name).randbytes(3000))
    trained_on: list[Tensor] = []
    measured: list[tuple[Tensor, float]] = []
    variables, loss = example["train"].__globals__, example["Model"].loss
    batches = variables["batches"]

    def recorded_loss(model: torch.nn.Module, windows: Tensor) -> float:
        measured.append((windows, loss(model, windows)))
        return measured[-1][1]

    monkeypatch.setitem(variables, "REPOSITORY", tmp_path)
    monkeypatch.setitem(variables, "batches", lambda text, args: trained_on.append(text) or batches(text, args))
    monkeypatch.setattr(example["Model"], "loss", recorded_loss)
    sizes = "--layers 1 --hidden 64 --length 16 --topk 4 --dense-steps 1 --warmup-steps 1 --sparse-steps 1"
    _, history = example["train"](example["parse_arguments"](sizes.split()))

    assert [value for _, value in history.held_out] == [value for _, value in measured] != []
    (text,) = (bytes(part.tolist()) for part in trained_on)
    assert len(text) > 6000
    for windows, _ in measured:
        for window in map(bytes, windows.tolist()):
            assert not any(window[i : i + 8] in text for i in range(len(window) - 7))


@pytest.mark.usefixtures("without_gpu")
def test_training_on_two_ranks(example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun with two processes prints the same losses and shares of selected keys as one process."""
    sizes = "--length 64 --topk 8 --batch 2 --hidden 64 --dense-steps 3 --warmup-steps 2 --sparse-steps 2"
    arguments = [*sizes.split(), "--picture", str(tmp_path / "training.png")]
    arguments += ["--checkpoint", str(tmp_path / "model.pt")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "train.py")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ranks = subprocess.run([sys.executable, *torchrun, *arguments], env=environment, capture_output=True, text=True)
    assert ranks.returncode == 0, ranks.stderr
    assert "2 ranks" in ranks.stdout
    weights = example["load"](tmp_path / "model.pt", torch.device("cpu"))[0].state_dict()
    args = example["parse_arguments"](arguments)
    model, history = example["train"](args)
    example["print_report"](args, history)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0.05, atol=0.05)

    def rows(report: str) -> list[list[str]]:
        """The table, without the times."""
        return [line.split()[:-2] for line in report.splitlines() if line.startswith(("dense", "warmup", "sparse"))]

    expected = rows(capsys.readouterr().out)
    assert len(expected) == 3
    for got_row, row in zip(rows(ranks.stdout), expected, strict=True):
        for got, value in zip(got_row, row, strict=True):
            if value[-1] == "%":  # printed whole, and equal models may round to neighbours
                assert int(got[:-1]) == pytest.approx(int(value[:-1]), abs=2)
            elif value[-1].isdigit():
                assert float(got) == pytest.approx(float(value), rel=0.02, abs=0.02)
            else:
                assert got == value


@pytest.mark.gpu
@pytest.mark.parametrize("streams", [1, 4])
def test_training_on_a_gpu(
    example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], streams: int
) -> None:
    """A few steps of each phase, with the sizes for a GPU."""
    steps = f"--streams {streams} --dense-steps 20 --warmup-steps 3 --sparse-steps 3"
    args = example["parse_arguments"](f"{steps} --picture {tmp_path / 'training.png'}".split())
    assert (args.device.type, args.length, args.heads) == ("cuda", 4096, 64)
    _, history = example["train"](args)

    assert history.phases == ["dense"] * 20 + ["warmup"] * 3 + ["sparse"] * 3
    assert all(math.isfinite(value) for value in history.language + history.indexer[20:])
    assert history.language[-1] < history.language[0]
    assert list(history.selections) == [0, 20, 23, 26]
    assert all(0 < share <= 1.001 for pair in history.selections.values() for share in pair)

    example["draw"](history, args.picture)
    assert args.picture.stat().st_size > 10_000
    example["print_report"](args, history)
    assert "Without a Hopper GPU" not in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_bad_arguments(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example["parse_arguments"](["--topk", "64"])
    assert "--topk must be below half of --length, 128, got 64" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example["parse_arguments"](["--streams", "3"])
    assert "--streams must be 1, 2 or 4, got 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        example["parse_arguments"](["--streams", "2", "--hidden", "64"])
    assert "--hidden must be a multiple of 128 for several streams, got 64" in capsys.readouterr().err
