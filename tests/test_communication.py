"""The communication model of the guide to several GPUs, against the bytes that were counted in simulated steps."""

import json

import pytest
from conftest import ROOT

from bench.distributed import communication
from bench.distributed.communication import DIVIDED, KEYS, NVLINK, REPLICATED, collectives_ms, sent_bytes
from dsa_ext.nn import SparseMLA


def test_weights() -> None:
    layer = SparseMLA(7168, 128, device="meta")
    sizes = {name: p.numel() for name, p in layer.named_parameters() if p.dim() == 2}
    divided = sum(sizes[f"{name}.weight"] for name in ("q_b_proj", "kv_b_proj", "o_proj"))
    assert (divided, sum(sizes.values())) == (DIVIDED, DIVIDED + REPLICATED)


@pytest.mark.parametrize("tokens", [32768, 131072])
@pytest.mark.parametrize("ranks", [2, 8])
def test_simulated_steps(tokens: int, ranks: int) -> None:
    result = json.loads((ROOT / "bench/results/h200/simulated_rank.json").read_text())
    counted = {case["name"]: case["collectives_ms"] for case in result["cases"]}
    name = f"s{tokens}_p{ranks}"
    assert collectives_ms("tensor", tokens, ranks) == pytest.approx(counted[f"{name}_tensor"], rel=2e-3)
    keys = sent_bytes("context", tokens, ranks)[KEYS] / NVLINK / 1e6
    assert keys == pytest.approx(counted[f"{name}_context"], rel=2e-3)


def test_figures_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    guide = " ".join((ROOT / "docs/guide/several-gpus.md").read_text().split())
    communication.main()
    assert " ".join(capsys.readouterr().out.split()) in guide
    steps = [(32768, "32768 tokens"), (131072, "131072")]
    takes = " and ".join(f"{collectives_ms('tensor', tokens, 8):.1f} ms at {words}" for tokens, words in steps)
    outputs = [sent_bytes("tensor", tokens, 8)[communication.OUTPUTS] / NVLINK / 1e6 for tokens, _ in steps]
    assert f"`tensor` takes {takes}, of which {outputs[0]:.1f} and {outputs[1]:.1f} ms are" in guide


def test_speedups_in_texts() -> None:
    """Those of the guide, the README and the changelog, of four GPUs as measured and of eight as predicted."""
    guide, readme, changelog = (
        " ".join((ROOT / path).read_text().split())
        for path in ("docs/guide/several-gpus.md", "README.md", "CHANGELOG.md")
    )
    cases = {case["name"]: case for case in json.loads(communication.WHOLE.read_text())["cases"]}
    speedups = {name: case["speedup"] for name, case in cases.items() if "speedup" in case}
    short, long = ([speedups[f"s{tokens}_p4_{way}"] for way in ("tensor", "context")] for tokens in (32768, 131072))
    words = (
        f"four are {long[1]:.1f} times as fast as one with `context` and {long[0]:.1f} times with `tensor` at 131072"
    )
    assert f"{words} tokens, {short[1]:.1f} and {short[0]:.1f} times at 32768" in guide
    assert f"on four H200s {short[1]:.1f} and {long[1]:.1f} times as fast as on one" in readme
    words = f"{short[0]:.2f} and {long[0]:.2f} times as fast as on one (32768 and 131072 tokens) along `tensor`, and"
    assert f"{words} {short[1]:.2f} and {long[1]:.2f} times along `context`" in changelog
    of_eight = {}
    for tokens in (32768, 131072):
        ms = cases[f"s{tokens}_whole"]["ms"]
        predicted = [ms / 8 + collectives_ms(way, tokens, 8) for way in ("tensor", "context")]
        of_eight[tokens] = [ms / time for time in predicted]
    tensor, context = of_eight[32768]
    assert (
        f"{tensor:.1f} times as fast as on one with `tensor` and {context:.1f} times with `context` at 32768" in guide
    )
    assert "{:.1f} and {:.1f} times at 131072".format(*of_eight[131072]) in guide
