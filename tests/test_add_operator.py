"""An operator costs a declaration, a reference, a public function, inputs, tolerances and a page: no list is edited."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_ext import ops

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

#: What is added to which file: at its end, or before its table by operator.
ADDED = {
    "dsa_ext/reference/fp8.py": '''

def negated(x: Tensor) -> Tensor:
    """See :func:`dsa_ext.negated`."""
    return -x
''',
    "dsa_ext/ops/fp8.py": """
Operator(
    "negated(Tensor x) -> Tensor",
    check=lambda a: None,
    fake=lambda a: a.x.new_empty(a.x.shape),
    reference=reference.negated,
    saves=("x",),
    backward=lambda saved, dout: {"x": -dout},
)
""",
    "dsa_ext/functional/fp8.py": '''

def negated(x: Tensor) -> Tensor:
    """Minus x."""
    result: Tensor = torch.ops.dsa.negated.default(x)
    return result
''',
    "dsa_ext/testing/calls.py": """

def negated(rows: int = 70) -> Args:
    return {"x": _normal(rows, 3).to(BF16)}


""",
    "dsa_ext/testing/tolerances/mixing.py": """

def negated(args: dict[str, Any]) -> list[Expected]:
    value = reference.negated(args["x"].double())
    return [Expected("result", value, bound=value.abs() * 2.0**-8, noise=value.abs() * 2.0**-8)]
""",
    "docs/fp8/negated.md": "# negated\n\n`torch.ops.dsa.negated(x)` is minus x.\n",
}
CHECK = """
import torch, dsa_ext
from dsa_ext.testing.calls import ORDINARY
from dsa_ext.testing.tolerances import OPS, check
assert "negated" in dsa_ext.__all__ and "negated" in dsa_ext.ops.OPERATORS
assert "negated" in ORDINARY and "negated" in OPS
x = torch.randn(70, 3, requires_grad=True)
assert torch.equal(torch.autograd.grad(dsa_ext.negated(x).sum(), x)[0], -torch.ones(70, 3))
args = ORDINARY["negated"]()
check("negated", torch.ops.dsa.negated(**args), args)
compiled = torch.compile(dsa_ext.negated, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(x), -x)
torch.library.opcheck(torch.ops.dsa.negated.default, (x,))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the Python files with a toy operator, without the compiled library."""
    folder = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in ("dsa_ext", "tests", "docs", "bench", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name, text in ADDED.items():
        path = folder / name
        old = path.read_text() if path.exists() else ""
        before, mark, after = old.partition("#: The functions above by operator.")
        path.write_text(before + text + mark + after)
    return folder


def run(checkout: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run([sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_new_operator_is_exported_and_works(checkout: Path) -> None:
    run(checkout, "-c", CHECK)


def test_tests_of_all_operators_find_it(checkout: Path) -> None:
    for file in ("tests/test_tolerances.py", "tests/test_layouts.py", "tests/test_modes.py"):
        assert "negated" in run(checkout, "-m", "pytest", "--collect-only", "-q", file), file


def undocumented(docs: Path, operators: list[str]) -> list[str]:
    pages = [path.read_text() for path in docs.rglob("*.md") if "results" not in path.parts]
    return [op for op in operators if not any(op in page for page in pages)]


def test_every_operator_is_documented(checkout: Path) -> None:
    assert undocumented(DOCS, list(ops.OPERATORS)) == []
    assert undocumented(checkout / "docs", [*ops.OPERATORS, "negated"]) == []
    assert undocumented(DOCS, ["negated"]) == ["negated"]
