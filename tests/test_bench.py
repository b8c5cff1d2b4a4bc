"""The benchmarks without a GPU: results cover all cases and can be drawn; what they are compared with."""

import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

BENCH = Path(__file__).resolve().parent.parent / "bench"
#: Modules by the names of their files.
MODULES = {path.stem: f"bench.{path.parent.name}.{path.stem}" for path in sorted(BENCH.glob("*/bench_*.py"))}
PEERS = json.loads((BENCH / "peers_h200.json").read_text())
FIGURES = {
    (op, key): figure for op, part in PEERS.items() if "figures" in part for key, figure in part["figures"].items()
}
#: Sizes that suit a CPU, for the benchmarks whose peer is PyTorch.
SIZES: dict[str, dict[str, int]] = {
    "bench_block_select": {"q_blocks": 3, "blocks": 40},
    "bench_coarse_attn": {"queries": 64, "keys": 50},
    "bench_gated_fusion": {"tokens": 200},
    "bench_indexer_loss": {"slots": 30},
}


def result_of(op: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((BENCH / "results/h200" / f"{op}.json").read_text())
    return result


@pytest.fixture(params=MODULES)
def benchmark(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(MODULES[request.param])


def parts(benchmark: ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """For each operator, its cases and how they are drawn."""
    if hasattr(benchmark, "BENCHMARKS"):
        for op, (specs, _, plot) in benchmark.BENCHMARKS.items():
            yield op, specs, plot
    else:
        yield benchmark.OP, benchmark.specs, benchmark.plot


def test_results_are_complete_and_can_be_drawn(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for op, specs, plot in parts(benchmark):
        cases = result_of(op)["cases"]
        names = [spec.name for spec in specs()]
        assert len(set(names)) == len(names)
        # The forward of sparse MLA also has a case that measures the host.
        assert [case["name"] for case in cases if case["group"] != "Host"] == names
        plot(cases, tmp_path / f"{op}.png")
        assert (tmp_path / f"{op}.png").stat().st_size > 10_000


def test_results_name_their_operators(benchmark: ModuleType) -> None:
    kernels = importlib.import_module("bench.stale").Kernels()
    for op, _, _ in parts(benchmark):
        result = result_of(op)
        assert result["operators"] == getattr(benchmark, "OPERATORS", [op])
        assert set(result["operators"]) <= set(kernels.operators)
        assert re.fullmatch("[0-9a-f]{64}|not recorded", result["kernels_sha256"])
        called = {name for case in result["cases"] for name in case.get("operators_ms", {})} - {"matmul", "attention"}
        assert called <= set(result["operators"])


def test_new_results_carry_the_hash_of_their_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    common, stale = importlib.import_module("bench.common"), importlib.import_module("bench.stale")
    monkeypatch.setattr(common, "machine", lambda: {"gpu": "a GPU"})
    for name, operators in (("indexer_loss", []), ("mhc", ["mhc_post_fwd", "mhc_post_bwd"])):
        common.report(name, [], tmp_path, lambda cases, path: None, operators=operators)
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["operators"] == (operators or [name])
        assert result["kernels_sha256"] == stale.Kernels().sha256(result["operators"])
    assert stale.stale_results(stale.Kernels(), tmp_path) == []


class CpuGenerator(torch.Generator):
    """A generator on the CPU, for any device."""

    def __new__(cls, _device: str) -> "CpuGenerator":
        return super().__new__(cls, "cpu")


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU, in a dtype that every CPU multiplies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if kwargs.get("dtype") == torch.bfloat16:
            kwargs["dtype"] = torch.float32
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("faster", ["plain", "compiled"])
def test_pytorch_is_a_peer_as_it_is_and_compiled(name: str, faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio is to the faster one; both are recorded. Both are timed as our operator is: the call, or the call
    through autograd."""
    benchmark, common = importlib.import_module(MODULES[name]), importlib.import_module("bench.common")
    monkeypatch.setattr(benchmark, "ROWS", 64, raising=False)
    gradients = torch.autograd.grad
    monkeypatch.setattr(torch, "Generator", CpuGenerator)
    monkeypatch.setattr(torch, "compile", lambda function, **options: partial(function))  # the mode cannot be compiled
    through_autograd = []

    def grad(*args: Any, **options: Any) -> Any:
        through_autograd.append(True)
        return gradients(*args, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    timed: list[bool] = []

    def measure_ms(call: Callable[[], object]) -> float:
        """Our operator takes 1 ms, the peers take 2 and 3 ms."""
        through_autograd.clear()
        call()
        timed.append(bool(through_autograd))
        return (1.0, 2.0, 3.0)[len(timed) - 1] if faster == "plain" else (1.0, 3.0, 2.0)[len(timed) - 1]

    monkeypatch.setattr(benchmark, "measure_ms", measure_ms)
    monkeypatch.setattr(common, "measure_ms", measure_ms)
    compared = 0
    for spec in dict.fromkeys(replace(spec, name="", group="", **SIZES[name]) for spec in benchmark.specs()):
        timed.clear()
        with OnCpu():
            case = benchmark.measure(spec, {})
        assert case["ms"] == 1
        if case["peer"] is None:
            assert timed == [False]
            continue
        compared += 1
        assert len(timed) == 3
        assert len(set(timed)) == 1
        plain, compiled_peer = case["peers_ms"]
        assert compiled_peer == f"{plain}, compiled"
        assert set(case["peers_ms"].values()) == {2.0, 3.0}
        assert case["peer"] == (plain if faster == "plain" else compiled_peer)
        assert case["ratio"] == pytest.approx(2, rel=0.05), "of rounded TFLOP/s"
    assert compared > 0


def test_figures_of_peers() -> None:
    for name, peer in PEERS["peers"].items():
        assert set(peer) - {"note"} == {"source", "version", "commit"}, name
        assert all(isinstance(value, str) and value for value in peer.values()), name
    assert PEERS["peers"]["cuDNN frontend"]["version"] == "1.32"
    assert len(FIGURES) > 20
    for place, figure in FIGURES.items():
        assert set(figure) - {"note"} == {"peer", "method", "unit", "values"}, place
        assert figure["peer"] in PEERS["peers"], place
        assert figure["method"] in PEERS["methods"], place
        assert figure["unit"] in ("TFLOP/s", "ms", "us"), place
        assert figure["values"], place
        assert all(value > 0 for value in figure["values"].values()), place
    assert {figure["peer"] for figure in FIGURES.values()} == set(PEERS["peers"])
    assert {figure["method"] for figure in FIGURES.values()} == set(PEERS["methods"])


def test_rested_figures_stand_beside_those_that_are_compared() -> None:
    """After a pause the GPU has a higher clock than under load."""
    figures = PEERS["sparse_mla_fwd"]["figures"]
    cases = {case["name"]: case for case in result_of("sparse_mla_fwd")["cases"]}
    for heads in (128, 64):
        compared, rested = figures[f"flashmla_h{heads}"], figures[f"flashmla_h{heads}_rested"]
        assert (compared["method"], rested["method"]) == ("in turn", "rested")
        assert set(compared["values"]) <= set(rested["values"])
        for s_kv, value in compared["values"].items():
            case = cases[f"h{heads}_skv{s_kv}"]
            assert (case["peer"], case["peer_value"]) == ("FlashMLA", value)
    rested_cases = {name for name, case in cases.items() if case["peer"] == "FlashMLA, rested"}
    assert rested_cases == {"h128_skv32768_s512", "h64_skv32768_s512"}


def test_what_was_timed_in_an_unknown_way_is_not_compared() -> None:
    unknown = {figure["peer"] for figure in FIGURES.values() if figure["method"] == "not recorded"}
    assert unknown == {"reference pipeline"}
    for path in (BENCH / "results/h200").glob("*.json"):
        for case in json.loads(path.read_text())["cases"]:
            assert case["peer"] not in unknown, case["name"]
    cases = {case["name"]: case for case in result_of("block_sparse_pipeline")["cases"]}
    assert cases["decode_99_graph"]["not_compared_ms"] == {"reference pipeline": 0.633}
    assert cases["decode_99_graph"]["ratio"] is None
