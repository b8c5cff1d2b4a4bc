"""tests/soak.py and its random calls, on the CPU: calls are legal, a planted error is found, and found again by its
seed, a hang ends the run, and calls are counted. tests/sanitized covers every operator."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sanitized
import soak
import torch
from callers import native
from torch import Tensor

from dsa_ext import ops, reference
from dsa_ext.testing.random_calls import TARGETS, Draw, make_call, modules

#: A composition of other operators has no checks of its own in the compiled library.
COMPOSED = ("indexer_dense_loss",)
SEEDS = range(12)


def test_every_operator_is_a_target() -> None:
    assert set(ops.OPERATORS) <= set(TARGETS)


@pytest.mark.parametrize("op", [op for op in ops.OPERATORS if op not in COMPOSED])
def test_calls_are_legal(op: str) -> None:
    """The only error of the compiled library is that of the device."""
    for seed in SEEDS:
        call = make_call(op, seed, "cpu")
        with pytest.raises(RuntimeError, match="must be on a CUDA device, got cpu"):
            native(op, **call.args)


@pytest.mark.parametrize("target", TARGETS)
def test_calls_are_right(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    soaked = soak.Soak(torch.device("cpu"), seconds_per_call=300)
    for seed in range(2 if target.startswith("nn.") else 4):
        soaked.call(target, seed)
    assert not soaked.failures, capsys.readouterr().out


def test_a_seed_is_a_call() -> None:
    """A seed always gives the same arguments; another seed gives others."""
    calls = [make_call("sparse_mla_bwd", seed, "cpu") for seed in (5, 5, 6)]
    texts = [call.describe() for call in calls]
    assert texts[0] == texts[1] != texts[2]
    for name, value in calls[0].args.items():
        other = calls[1].args[name]
        if isinstance(value, Tensor):
            assert value.stride() == other.stride()
            assert torch.equal(value.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name
        else:
            assert value == other


@pytest.mark.parametrize("rows", ["aligned", "dense", "free"])
def test_views_hold_the_same_values(rows: Any) -> None:
    layouts = set()
    for seed in range(300):
        draw = Draw(seed, "cpu")
        x = draw.normal(3, 1, 5, 64).bfloat16()
        view = draw.view(x, rows, repeat=False)
        assert torch.equal(view, x)
        strides = [stride for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1]
        assert rows == "free" or strides[-1] == 1
        assert rows != "aligned" or (view.storage_offset() % 8 == 0 and all(s % 8 == 0 for s in strides[:-1]))
        layouts.add(view.stride())
    assert len(layouts) > 50


def test_modules_with_an_error_that_is_small_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the bias of one gate is one number. Its error on the CPU is small in this call, which says little
    about that of another run."""
    call = make_call("nn.BlockSparseAttention", 329, "cpu")
    *others, bias = call.run(call.args)
    assert bias.shape == (1,)
    for sign in (-1, 1):
        call.judge((*others, bias + sign * 0.005), call.args)  # twice the mean error
        with pytest.raises(AssertionError, match=r"^gate_proj\.bias differs"):
            call.judge((*others, bias + sign * 0.03), call.args)  # twice the limit
    with pytest.raises(AssertionError, match=r"^gate_proj\.weight differs"):
        call.judge((*others[:-1], others[-1] * 1.2, bias), call.args)
    monkeypatch.setattr(modules, "_RUNS", 1)
    with pytest.raises(AssertionError, match=r"^gate_proj\.bias differs"):
        call.judge((*others, bias + 0.005), call.args)


def plant(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[..., None]) -> None:
    """Changes the operator on the CPU, but not the reference in float64 that judges it."""
    right = getattr(reference, op)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results, given = right(*args, **kwargs), (*args, *kwargs.values())
        if given[0].dtype != torch.float64:
            change(results, *given)
        return results

    monkeypatch.setattr(ops.OPERATORS[op], "reference", wrong)


def run(*args: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = soak.main([*args, "--device", "cpu"])
    return status, capsys.readouterr().out


def test_planted_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One element is wrong for some shapes: only these calls fail, and the printed seed reproduces one."""

    def change(results: tuple[Tensor, ...], q: Tensor, *_: Any) -> None:
        if q.numel() and q.shape[1] % 2:
            results[0].view(-1)[-1] += 1 + results[0].abs().max()

    target = "gated_fusion_bwd"
    with monkeypatch.context() as patch:
        plant(patch, target, lambda results, dout, fine, *_: change(results, fine))
        soaked = soak.Soak(torch.device("cpu"), seconds_per_call=300)
        for count in range(12):
            soaked.call(target, soak.seed_of(3, count))
        soaked.report()
        output = capsys.readouterr().out
        commands = re.findall(r"repeat: python tests/soak.py (.*) --device cpu", output)
        made, failed = map(int, re.findall(rf"^{target} +(\d+) +(\d+)", output, re.MULTILINE)[0])
        assert len(commands) == failed
        assert 0 < failed < made
        status, again = run(*commands[0].split(), capsys=capsys)
        assert status == 1
        assert re.findall(r"FAILED .*\n.*\n", again) == re.findall(r"FAILED .*\n.*\n", output)[:1]
        assert re.search(r"^all +1 +1", again, re.MULTILINE)
    assert run(*commands[0].split(), capsys=capsys)[0] == 0


def test_results_that_do_not_repeat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A last bit that changes from call to call is within all tolerances, but is found."""
    calls = iter(range(10**6))

    def change(results: Tensor, fine: Tensor, *_: Any) -> None:
        if next(calls) % 2 and results.numel():
            bits = results.view(-1)[:1].view(torch.int16)
            bits ^= 1

    monkeypatch.setattr(soak, "make_call", lambda *_: _call_of_ones())
    plant(monkeypatch, "gated_fusion_fwd", change)
    status, output = run("--op", "gated_fusion_fwd", "--seed", "1", capsys=capsys)
    assert status == 1
    assert "result 0 differs from call to call in 1 elements" in output


def _call_of_ones() -> Any:
    call = make_call("gated_fusion_fwd", 1, "cpu")
    ones = torch.ones(1, 2, 5, 64, dtype=torch.bfloat16)
    call.args = {"fine": ones, "coarse": ones.clone(), "gate": ones[..., 0].clone()}
    return call


def test_changed_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plant(monkeypatch, "gated_fusion_fwd", lambda _, fine, coarse, gate: gate.view(-1)[:1].add_(1))
    monkeypatch.setattr(soak, "make_call", lambda *_: _call_of_ones())
    status, output = run("--op", "gated_fusion_fwd", "--seed", "1", capsys=capsys)
    assert status == 1
    assert "the call changed gate" in output


def test_errors_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def change(*_: Any) -> None:
        raise RuntimeError("planted")

    plant(monkeypatch, "act_quant", change)
    status, output = run("--minutes", "0.03", "--op", "act_quant", "--seed", "0", capsys=capsys)
    assert status == 1
    made, failed = map(int, re.findall(r"^all +(\d+) +(\d+)", output, re.MULTILINE)[0])
    assert made == failed > 1
    assert output.count("RuntimeError: planted") == failed


def test_hang() -> None:
    """Exit status 2 and the seed, long before the hanging call would end."""
    program = """if True:
        import sys, time
        sys.path.insert(0, "tests")
        import soak
        from dsa_ext import reference
        reference.act_quant = lambda *_: time.sleep(600)
        soak.main(["--minutes", "1", "--op", "act_quant", "--seed", "0", "--device", "cpu", "--seconds-per-call", "2"])
    """
    root = Path(__file__).parent.parent
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert re.search(r"HANGS, more than 2 s: act_quant\(x=", ended.stdout)
    assert f"repeat: python tests/soak.py --op act_quant --seed {soak.seed_of(0, 0)} --device cpu" in ended.stdout


def test_sanitized_operators() -> None:
    """Every operator is among the calls that compute-sanitizer watches."""
    source = "".join(path.read_text() for path in Path(sanitized.__file__).parent.glob("*.py"))
    assert [op for op in ops.OPERATORS if f'"{op}"' not in source] == []


@pytest.mark.parametrize("part", ["act_quant", "block_select", "gated_fusion", "indexer_loss", "indexer_packed"])
def test_sanitized_part(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitized.calls, "on_gpu", lambda value: value)
    sanitized.PARTS[part]()
