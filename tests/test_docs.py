"""The Python examples of the documentation run, one page after the other, on the CPU where there is no GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: Pages whose examples are no programs of their own, and why.
LEFT_OUT = {
    "docs/add-an-operator.md": "files of an operator, see test_add_operator.py",
    "docs/guide/several-gpus.md": "needs several ranks, see distributed/test_guide.py",
    "docs/indexer/indexer_dense_loss.md": "a definition",
    "docs/integrations/megatron.md": "needs Megatron-core",
}


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found if BLOCK.search(path.read_text())]


def test_pages_that_are_left_out_exist() -> None:
    assert set(LEFT_OUT) < set(pages())


@pytest.mark.parametrize("page", [page for page in pages() if page not in LEFT_OUT])
def test_examples_of_a_page(page: str) -> None:
    """All of a page share their names: later ones may use what earlier ones define."""
    names: dict[str, Any] = {"__name__": "example"}
    with torch.random.fork_rng(), torch.set_grad_enabled(True):
        torch.manual_seed(0)
        for block in BLOCK.findall((ROOT / page).read_text()):
            exec(compile(block, page, "exec"), names)
