"""examples/video.py with smaller sizes: tokens are boxes, the loss falls, picture and table are written."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "video.py"))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's sizes and device are those of a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_tokens_are_boxes(example: dict[str, Any]) -> None:
    order = example["box_order"]((8, 12, 4))
    assert len({tuple(place) for place in order.tolist()}) == 8 * 12 * 4
    for block in order.split(64):
        assert (block.amax(0) - block.amin(0)).tolist() == [3, 3, 3]
        assert (block.amin(0) % 4 == 0).all()
    clip = torch.arange(4 * 8 * 8 * 3).view(4, 8, 8, 3)
    assert torch.equal(example["to_tokens"](clip, 2)[5], clip[0, 2:4, 2:4].flatten())


@pytest.mark.usefixtures("without_gpu")
def test_video(example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--rows 8 --columns 12 --layers 1 --steps 40 --topk 3"
    args = example["parse_arguments"](f"{sizes} --picture {tmp_path / 'video.png'}".split())
    losses, stages = example["run"](args)

    assert losses[0] > 0.9
    assert sum(losses[-5:]) / 5 < 0.6
    assert list(stages.times) == ["projections", "pooling", "coarse", "selection", "fine", "fusion"]
    assert all(milliseconds > 0 for milliseconds in stages.times.values())
    assert stages.selected.shape == (12, 12)
    torch.testing.assert_close(stages.selected.sum(-1), torch.full((12,), 3.0))
    assert args.picture.stat().st_size > 10_000
    example["print_report"](losses, stages, args)
    assert "768 tokens in 12 blocks" in capsys.readouterr().out


def test_bad_sizes(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example["parse_arguments"](["--rows", "10"])
    assert "--frames, --rows and --columns must be multiples of 4" in capsys.readouterr().err


@pytest.mark.gpu
def test_video_on_a_gpu(example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps, with the sizes for a GPU."""
    args = example["parse_arguments"](["--steps", "20", "--picture", str(tmp_path / "video.png")])
    assert (args.device.type, args.places, args.heads) == ("cuda", (16, 28, 52), 12)
    losses, stages = example["run"](args)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(stages.selected.sum(-1), torch.full((364,), 36.0))
    assert args.picture.stat().st_size > 10_000
    example["print_report"](losses, stages, args)
    assert "Without a Hopper GPU" not in capsys.readouterr().out
