"""Times dsa::block_select and PyTorch's sort or topk of the same scores, plain and compiled; writes its results.

The peers only order the scores: they neither count the blocks to keep nor list them by id. Scores are probabilities of
coarse attention with 12 heads. Some rows of every case are compared with the reference before it is timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import dsa_ext
from bench.common import Case, drawing, grouped_bars, make_case, measure_ms, measure_peers, pytorch_peers, run

OP = "block_select"
HEADS = 12


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    name: str
    q_blocks: int
    blocks: int
    mode: Literal["gini_tau", "top_tau", "topk"] = "gini_tau"
    dtype: torch.dtype = torch.float32

    def options(self) -> dict[str, Any]:
        return {"topk": self.blocks // 4} if self.mode == "topk" else {}


def specs() -> Iterator[Spec]:
    for mode in ("gini_tau", "top_tau", "topk"):
        yield Spec("23296 tokens", f"4368x364_{mode}", 364, 364, mode)
    yield Spec("23296 tokens", "4368x364_gini_tau_bf16", 364, 364, dtype=torch.bfloat16)
    yield Spec("One block of queries", "12x364_gini_tau", 1, 364)
    yield Spec("One block of queries", "12x2048_gini_tau", 1, 2048)
    yield Spec("One block of queries", "12x16384_gini_tau", 1, 16384)
    for mode in ("gini_tau", "topk"):
        yield Spec("131072 tokens", f"24576x2048_{mode}", 2048, 2048, mode)


@torch.inference_mode()
def measure(spec: Spec, _times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    scores = torch.randn(1, HEADS, spec.q_blocks, spec.blocks, generator=generator, device="cuda")
    scores = (3 * scores).softmax(-1).to(spec.dtype)
    index, num = dsa_ext.block_select(scores, spec.mode, **spec.options())
    some = slice(0, None, 29)
    expected = dsa_ext.block_select(scores[:, :, some].cpu(), spec.mode, **spec.options())
    torch.testing.assert_close((index[:, :, some].cpu(), num[:, :, some].cpu()), expected, rtol=0, atol=0)

    def ordered(x: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = x.topk(spec.blocks // 4) if spec.mode == "topk" else x.sort(descending=True, stable=True)
        return values, ids

    name = "torch.topk" if spec.mode == "topk" else "torch.sort"
    peers = {name: partial(call, scores) for name, call in pytorch_peers(name, ordered).items()}
    for call in peers.values():
        values, ids = call()
        assert torch.equal(values, scores.gather(-1, ids))
        assert torch.equal(values, scores.sort(descending=True).values[..., : values.shape[-1]])
    ms = measure_ms(lambda: dsa_ext.block_select(scores, spec.mode, **spec.options()))
    peer, peers_ms = measure_peers(peers)
    return make_case(
        spec.name,
        spec.group,
        {"B": 1, "H": HEADS, "Mq": spec.q_blocks, "Mkv": spec.blocks, "mode": spec.mode},
        ms,
        peer=peer,
        err={"differing_rows": 0},
        peers_ms=peers_ms,
    )


def plot(cases: list[Case], path: Path) -> None:
    with drawing(path, 11) as axis:
        series = {"dsa_ext": [1e3 * c["ms"] for c in cases], "torch": [1e3 * c["peer_value"] for c in cases]}
        grouped_bars(axis, [case["name"].replace("_", "\n", 1) for case in cases], series)
        axis.set(title="block_select beside torch.sort or torch.topk", ylabel="µs", yscale="log")
        axis.legend(loc="upper left")


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
