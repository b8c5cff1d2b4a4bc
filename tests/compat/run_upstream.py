"""Runs the tests of FlashMLA and DeepGEMM, from checkouts of these repositories, on dsa_ext.compat.

    python tests/compat/run_upstream.py --flash-mla FOLDER --deep-gemm FOLDER

FOLDER is a checkout at the commit that docs/integrations/compat.md names. Cases are theirs, and so are inputs,
references and tolerances. Timings are left out. A case that is not served is counted with its reason. Without a Hopper
GPU, and with --device cpu, small cases run on the CPU implementation. The exit status is 1 if a case fails.
"""

import argparse
import ast
import contextlib
import importlib
import io
import json
import os
import random
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dsa_ext.compat import deep_gemm, flash_mla  # noqa: E402


@dataclass
class Table:
    """The outcome of one test of another library."""

    name: str
    seconds: float  # after which no case is started
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    not_served: Counter[str] = field(default_factory=Counter)
    not_run: int = 0
    _began: float = field(default_factory=time.monotonic)

    def run(self, case: Any, reason: str | None, test: Callable[[], bool]) -> None:
        """Runs a case; `reason` says why it is not served."""
        if reason is not None:
            self.not_served[reason] += 1
            return
        if time.monotonic() - self._began > self.seconds:
            self.not_run += 1
            return
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                passed, text = test(), printed.getvalue()
        except Exception as error:
            passed, text = False, f"{printed.getvalue()}{type(error).__name__}: {error}"
        if passed:
            self.passed += 1
        else:
            self.failed.append(f"{case}\n{text}")

    def as_dict(self) -> dict[str, Any]:
        counts = {"passed": self.passed, "failed": len(self.failed), "not run": self.not_run}
        return {"test": self.name, **counts, "not served": dict(self.not_served)}


def stub(name: str, **attributes: Any) -> None:
    """A module in place of one that the tests import but that is not installed or not built."""
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
        return
    module = types.ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def on_cpu() -> None:
    """Lets code that names CUDA devices run on the CPU."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(torch.cuda, name, lambda *_: None)
    deep_gemm.set_num_sms(132)
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.max_memory_allocated = torch.cuda.max_memory_reserved = lambda *_: 0  # type: ignore[assignment]
    for name in ("randn", "rand", "randint", "randperm", "arange", "zeros", "empty", "full", "tensor"):
        setattr(torch, name, _without_device(getattr(torch, name)))


def _without_device(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **{name: "cpu" if name == "device" else value for name, value in options.items()})

    return call


# ---- FlashMLA


def import_flash_mla_tests(checkout: Path, name: str) -> Any:
    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(checkout / "tests"))
    stub("triton", jit=lambda function: function)
    stub("rich")
    stub("rich.console")
    stub("rich.table")
    module = importlib.import_module(name)
    if not hasattr(sys.modules["triton"], "language"):
        del sys.modules["triton"]  # so that torch does not find it
    if not hasattr(module.lib.TestParam, "untimed"):
        module.lib.TestParam.untimed = True
        create = module.lib.TestParam.__init__

        def untimed(self: Any, *args: Any, **options: Any) -> None:
            create(self, *args, **options)
            self.num_runs = 0

        module.lib.TestParam.__init__ = untimed
    return module


@contextlib.contextmanager
def their_defaults(device: str) -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")


def listed_cases(module: Any) -> list[Any]:
    """The value of `testcases` in the part of a script that runs if it is the main one."""
    tree = ast.parse(Path(module.__file__).read_text())
    (main,) = [node for node in tree.body if isinstance(node, ast.If)]
    names = [node.targets[0].id for node in main.body if isinstance(node, ast.Assign)]  # type: ignore[attr-defined]
    wanted = [
        node
        for node, name in zip([n for n in main.body if isinstance(n, ast.Assign)], names, strict=True)
        if "case" in name and name != "failed_cases"
    ]
    namespace = dict(vars(module))
    exec(compile(ast.Module(wanted, []), module.__file__, "exec"), namespace)
    cases: list[Any] = namespace["testcases"]
    return cases


def is_small(p: Any) -> bool:
    rows = p.s_q * (p.decode.b if p.decode else 1)
    return rows * p.h_q * p.topk <= 2**21 and p.s_kv * (p.decode.b if p.decode else 1) <= 2**14


def flash_mla_prefill(checkout: Path, device: str, seconds: float) -> Table:
    table = Table("FlashMLA test_flash_mla_sparse_prefill.py", seconds)
    module = import_flash_mla_tests(checkout, "test_flash_mla_sparse_prefill")
    with their_defaults(device):
        for p in listed_cases(module):
            reason = None if device == "cuda" or is_small(p) else "too large for the CPU"
            table.run(p, reason, lambda p=p: module.run_test(p))  # type: ignore[misc]
    return table


def flash_mla_decoding(checkout: Path, device: str, seconds: float) -> Table:
    table = Table("FlashMLA test_flash_mla_sparse_decoding.py", seconds)
    module = import_flash_mla_tests(checkout, "test_flash_mla_sparse_decoding")

    def reason(p: Any) -> str | None:
        if p.decode.extra_topk is not None:
            return "extra_k_cache"
        if p.d_qk == 512:
            return "the layout of 584 bytes"
        return None if device == "cuda" or is_small(p) else "too large for the CPU"

    with their_defaults(device):
        for p in (case.to_test_param() for case in module.gen_testcase()):
            table.run(p, reason(p), lambda p=p: module.test_flash_mla(p).is_correct)  # type: ignore[misc]
    return table


# ---- DeepGEMM


def import_deep_gemm_tests(checkout: Path) -> Any:
    package = types.ModuleType("deep_gemm")
    package.__path__ = [str(checkout / "deep_gemm")]
    vars(package).update({name: getattr(deep_gemm, name) for name in deep_gemm.__all__})
    sys.modules["deep_gemm"] = package

    # Their library, of which these tests need no function.
    library = types.ModuleType("deep_gemm._C")
    library.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules["deep_gemm._C"] = library
    os.environ["DG_USE_NVIDIA_TOOLS"] = "1"  # their switch that leaves timings out
    sys.path.insert(0, str(checkout / "tests"))
    return importlib.import_module("test_attention")


def deep_gemm_logits(name: str, checkout: Path, device: str, seconds: float) -> Table:
    """`name` is "prefill" or "paged". Their function gets one case at a time, through its function that draws some."""
    test = {"prefill": "test_mqa_logits", "paged": "test_paged_mqa_logits"}[name]
    table = Table(f"DeepGEMM test_attention.py, {test}", seconds)
    module = import_deep_gemm_tests(checkout)
    cases: list[tuple[Any, ...]] = []

    def collect(_: str, every: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        cases.extend(every)
        return []

    module.sample_mqa_cases = collect
    with contextlib.redirect_stdout(io.StringIO()):
        getattr(module, test)()
    if device == "cpu":
        cases = [small_case(name, case) for case in random.Random(0).sample(cases, 8)]
    for case in cases:
        head_dim = case[8] if name == "prefill" else case[11]
        reason = f"head_dim {head_dim}" if head_dim == 32 else None
        module.sample_mqa_cases = lambda *_, case=case: [case]
        torch.manual_seed(0)
        random.seed(0)

        def run() -> bool:
            getattr(module, test)()
            return True

        table.run(case, reason, run)
    return table


def small_case(name: str, case: tuple[Any, ...]) -> tuple[Any, ...]:
    if name == "prefill":  # queries and keys
        return (*case[:5], 32, 128, *case[7:])
    return (*case[:7], 3, *case[8:-1], 100)  # sequences and their mean length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash-mla", type=Path, metavar="FOLDER", help="checkout of FlashMLA")
    parser.add_argument("--deep-gemm", type=Path, metavar="FOLDER", help="checkout of DeepGEMM")
    parser.add_argument("--only", choices=TESTS, action="append", help="run this test only")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="per test, after which no case is started")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome to a file as well")
    options = parser.parse_args()
    if options.device == "cpu":
        on_cpu()
    tables = []
    for name, (library, test) in TESTS.items():
        checkout = getattr(options, library)
        if checkout is None or (options.only and name not in options.only):
            continue
        table = test(checkout.resolve(), options.device, options.seconds)
        tables.append(table)
        print(json.dumps(table.as_dict()), flush=True)
        for text in table.failed[:5]:
            print(text)
    if options.json:
        options.json.write_text(json.dumps([table.as_dict() for table in tables], indent=1) + "\n")
    return int(any(table.failed or not table.passed for table in tables))


TESTS: dict[str, tuple[str, Callable[[Path, str, float], Table]]] = {
    "sparse_prefill": ("flash_mla", flash_mla_prefill),
    "sparse_decoding": ("flash_mla", flash_mla_decoding),
    "mqa_logits": ("deep_gemm", lambda *args: deep_gemm_logits("prefill", *args)),
    "paged_mqa_logits": ("deep_gemm", lambda *args: deep_gemm_logits("paged", *args)),
}

if __name__ == "__main__":
    sys.exit(main())
