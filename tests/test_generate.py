"""examples/generate.py: greedy generation equals full recomputation; bytes are drawn by their probabilities."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(EXAMPLES)
    return runpy.run_path(str(EXAMPLES / "generate.py"))


def run(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    example["main"]()


def train(checkpoint: Path, *arguments: str) -> None:
    variables = runpy.run_path(str(EXAMPLES / "train.py"))
    args = variables["parse_arguments"]([*arguments, "--checkpoint", str(checkpoint)])
    variables["save"](variables["train"](args)[0], args)


@pytest.mark.parametrize("streams", [1, 2])
def test_generation(
    example: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    streams: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    steps = "--dense-steps 20 --warmup-steps 5 --sparse-steps 5 --measure-every 1000 --length 96"
    train(tmp_path / "model.pt", *steps.split(), "--streams", str(streams))
    arguments = ["--sequences", "3", "--tokens", "20", "--chunk", "17"]
    run(example, monkeypatch, "--checkpoint", str(tmp_path / "model.pt"), *arguments)
    printed = capsys.readouterr().out
    assert "3 sequences with prompts of 12, 30, 48 bytes, 16 keys per query." in printed
    assert "60 of 60 greedy bytes are the best ones of a full recomputation" in printed


@pytest.mark.gpu
def test_generation_on_a_gpu(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a CUDA graph of the steps; ends with an error if greedy bytes are not those of a full recomputation."""
    train(tmp_path / "model.pt", "--dense-steps", "20", "--warmup-steps", "3", "--sparse-steps", "3")
    arguments = ["--sequences", "5", "--tokens", "40", "--chunk", "700"]
    run(example, monkeypatch, "--checkpoint", str(tmp_path / "model.pt"), *arguments)
    assert "of 200 greedy bytes are the best ones of a full recomputation" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [1, 64, 90, 127])
def test_prompts_leave_room(example: dict[str, Any], tokens: int) -> None:
    arguments = example["parse_arguments"](["--sequences", "3", "--tokens", str(tokens)])
    prompts = example["choose_prompts"](arguments, 128)
    assert all(1 <= len(prompt) <= 128 - tokens for prompt in prompts)
    assert len(prompts[-1]) == min(64, 128 - tokens)


def test_drawn_bytes(example: dict[str, Any]) -> None:
    """With top-p 0.8 the fewest that sum to it, in proportion to their probabilities at the temperature."""
    p = torch.tensor([0.5, 0.05, 0.3, 0.15])
    torch.manual_seed(0)
    for temperature in (1.0, 0.5):
        drawn = example["sample"](p.log().expand(20_000, 4) * temperature, temperature, 0.8)
        shares = torch.bincount(drawn, minlength=4) / len(drawn)
        torch.testing.assert_close(shares, torch.tensor([0.625, 0, 0.375, 0]), rtol=0, atol=0.02)
    assert example["sample"](p.log()[None], 0, 0.8).tolist() == [0]
    assert example["sample"](p.log()[None], 1.0, 1e-3).tolist() == [0]
