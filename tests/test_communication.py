"""The communication model of the guide to several GPUs, against the bytes that were counted in simulated steps."""

import json
from typing import Any

import pytest
from conftest import ROOT

from bench.distributed import communication
from bench.distributed.communication import DIVIDED, KEYS, NVLINK, REPLICATED, collectives_ms, predicted_ms, sent_bytes
from dsa_ext.nn import SparseMLA

GUIDE, WAYS = "docs/guide/several-gpus.md", ("tensor", "context")


def text_of(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def cases_of(op: str) -> dict[str, dict[str, Any]]:
    return {case["name"]: case for case in json.loads((ROOT / f"bench/results/h200/{op}.json").read_text())["cases"]}


def test_weights() -> None:
    layer = SparseMLA(7168, 128, device="meta")
    sizes = {name: p.numel() for name, p in layer.named_parameters() if p.dim() == 2}
    divided = sum(sizes[f"{name}.weight"] for name in ("q_b_proj", "kv_b_proj", "o_proj"))
    assert (divided, sum(sizes.values())) == (DIVIDED, DIVIDED + REPLICATED)


@pytest.mark.parametrize("tokens", [32768, 131072])
@pytest.mark.parametrize("ranks", [2, 8])
def test_simulated_steps(tokens: int, ranks: int) -> None:
    cases = cases_of("simulated_rank")
    name = f"s{tokens}_p{ranks}"
    assert collectives_ms("tensor", tokens, ranks) == pytest.approx(cases[f"{name}_tensor"]["collectives_ms"], rel=2e-3)
    keys = sent_bytes("context", tokens, ranks)[KEYS] / NVLINK / 1e6
    assert keys == pytest.approx(cases[f"{name}_context"]["collectives_ms"], rel=2e-3)


def test_figures_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    guide = text_of(GUIDE)
    communication.main()
    assert " ".join(capsys.readouterr().out.split()) in guide
    steps = [(32768, "32768 tokens"), (131072, "131072")]
    takes = " and ".join(f"{collectives_ms('tensor', tokens, 8):.1f} ms at {words}" for tokens, words in steps)
    outputs = [sent_bytes("tensor", tokens, 8)[communication.OUTPUTS] / NVLINK / 1e6 for tokens, _ in steps]
    assert f"`tensor` takes {takes}, of which {outputs[0]:.1f} and {outputs[1]:.1f} ms are" in guide


@pytest.fixture
def four() -> dict[int, list[float]]:
    """By tokens, how many times four GPUs are as fast as one, along tensor and context."""
    cases = cases_of("distributed")
    return {seq: [cases[f"s{seq}_p4_{way}"]["speedup"] for way in WAYS] for seq in (32768, 131072)}


def test_speedups_in_texts(four: dict[int, list[float]]) -> None:
    short, long = four.values()
    words = (
        f"four are {long[1]:.1f} times as fast as one with `context` and {long[0]:.1f} times with `tensor` at 131072"
    )
    assert f"{words} tokens, {short[1]:.1f} and {short[0]:.1f} times at 32768" in text_of(GUIDE)
    assert f"on four H200s {short[1]:.1f} and {long[1]:.1f} times as fast as on one" in text_of("README.md")
    words = f"{short[0]:.2f} and {long[0]:.2f} times as fast as on one (32768 and 131072 tokens) along `tensor`, and"
    assert f"{words} {short[1]:.2f} and {long[1]:.2f} times along `context`" in text_of("CHANGELOG.md")


def test_speedups_relative_to_one_gpu_alone(four: dict[int, list[float]]) -> None:
    together, alone = cases_of("distributed"), cases_of("simulated_rank")
    wholes = {seq: alone[f"s{seq}_whole"]["ms"] for seq in four}
    short, long = ([x * wholes[seq] / together[f"s{seq}_whole"]["ms"] for x in four[seq]] for seq in four)
    words = "{:.1f} and {:.1f} times as fast at 131072 tokens, {:.1f} and {:.1f} times at 32768"
    assert words.format(*reversed(long), *reversed(short)) in text_of(GUIDE)
    page = text_of("docs/results/sparse_mla.md")
    assert "One GPU alone takes [{:.0f} and {:.0f} ms]".format(*wholes.values()) in page
    words = "four are {:.1f} and {:.1f} times as fast with `context`, {:.1f} and {:.1f} times with `tensor`"
    assert words.format(short[1], long[1], short[0], long[0]) in page


def test_predictions_in_the_guide() -> None:
    cases, guide = cases_of("distributed"), text_of(GUIDE)
    late = {name: case["ms"] - case["predicted_ms"] for name, case in cases.items() if "predicted_ms" in case}
    words = "{:.0f} ms with `tensor` and {:.0f} with `context` on two GPUs, {:.0f} and {:.0f} on four"
    words = words.format(*(late[f"s32768_p{ranks}_{way}"] for ranks in (2, 4) for way in WAYS))
    long = [ms for name, ms in late.items() if name.startswith("s131072")]
    assert f"at 32768 tokens {words}, and at 131072 tokens {min(long):.0f} to {max(long):.0f} ms" in guide
    wholes = {seq: cases[f"s{seq}_whole"]["ms"] for seq in (32768, 131072)}
    short, long = ([ms / predicted_ms(ms, way, seq, 8) for way in WAYS] for seq, ms in wholes.items())
    words = "{:.1f} times as fast as on one with `tensor` and {:.1f} times with `context` at 32768 tokens"
    assert f"{words.format(*short)}, {long[0]:.1f} and {long[1]:.1f} times at 131072" in guide
