"""Times dsa_ext.sparse_mla_decode in CUDA graphs; writes its results file, with the peer's figures, and plot.

Contexts of 32768 keys in pages of 64, 2048 keys selected, ascending, or fewer and then padding. Every graph has several
calls with other queries and lists. TFLOP/s count all selected keys; TB/s count their bytes once per token. Results are
checked on some tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import dsa_ext
from bench.common import PEERS, Case, drawing, grouped_bars, make_case, measure_rotating_ms, peer_figure, run
from dsa_ext.testing.tolerances import errors

OP = "sparse_mla_decode"
CONTEXT, TOPK, PAGE, COLUMNS = 32768, 2048, 64, 576


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    group: str
    batch: int
    tokens: int
    heads: int
    packed: bool = True
    keys: int = TOPK  # of a list; the rest is padding
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        kind = "fp8" if self.packed else "bf16"
        name = f"{kind}_h{self.heads}_b{self.batch}_n{self.tokens}"
        return name + f"_k{self.keys}" * (self.keys < TOPK) + "_invariant" * self.batch_invariant


def specs() -> Iterator[Spec]:
    for heads in (128, 64, 32, 16):
        for batch, tokens in ((1, 1), (2, 2), (8, 1), (32, 1), (64, 1), (64, 2), (128, 1), (128, 2)):
            yield Spec(f"fp8, {heads} heads", batch, tokens, heads)
    for batch in (1, 32, 128):
        yield Spec("fp8, 128 heads", batch, 1, 128, batch_invariant=True)
        for heads in (128, 16):
            yield Spec("bf16", batch, 1, heads, packed=False)
    for heads in (128, 16):
        for batch in (8, 32, 128):
            yield Spec(f"fp8, {heads} heads, 512 keys and padding", batch, 1, heads, keys=512)


def make_cache(batch: int, packed: bool, context: int = CONTEXT) -> Tensor:
    """The keys of the contexts are repeated: they need not differ, only lie apart."""
    rows = torch.randn(context, COLUMNS, device="cuda").bfloat16()
    rows = dsa_ext.pack_kv_fp8(rows) if packed else rows
    return rows.expand(batch, -1, -1).reshape(batch * context // PAGE, PAGE, 1, -1)


def make_lists(spec: Spec) -> Tensor:
    rows = spec.batch * spec.tokens
    ids = torch.rand(rows, CONTEXT, device="cuda").topk(spec.keys).indices.sort().values
    first = torch.arange(spec.batch, device="cuda")[:, None, None] * CONTEXT
    lists = (ids.view(spec.batch, spec.tokens, spec.keys) + first).int()
    return torch.nn.functional.pad(lists, (0, TOPK - spec.keys), value=-1)


def peer_of(spec: Spec, flop: int) -> tuple[str, float] | None:
    """FlashMLA with the same caches, in TFLOP/s."""
    key, case = f"flashmla_h{spec.heads}", f"b{spec.batch}_n{spec.tokens}"
    figure = PEERS[OP]["figures"].get(key)
    if figure is None or case not in figure["values"] or not spec.packed or spec.batch_invariant or spec.keys < TOPK:
        return None
    return peer_figure(OP, key, case, flop)


def measure(spec: Spec, _times: dict[str, float]) -> Case:
    torch.manual_seed(1)
    cache = make_cache(spec.batch, spec.packed)
    shape = (spec.batch, spec.tokens, spec.heads, COLUMNS)
    sets = [
        (torch.randn(shape, device="cuda").bfloat16(), make_lists(spec)) for _ in range(2 if spec.batch > 32 else 8)
    ]

    def call(inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return dsa_ext.sparse_mla_decode(inputs[0], cache, inputs[1], batch_invariant=spec.batch_invariant)

    out, lse = call(sets[0])
    some = slice(None, None, max(1, spec.batch // 2))
    args = {"q": sets[0][0][some], "kv_cache": cache, "indices": sets[0][1][some]}
    found = errors(OP, (out[some], lse[some]), args)
    found.check()
    ms = measure_rotating_ms(call, sets)
    flop = 2 * spec.batch * spec.tokens * spec.heads * spec.keys * (COLUMNS + 512)
    key_bytes = spec.batch * spec.tokens * spec.keys * cache.shape[-1] * cache.element_size()
    letters = {"B": spec.batch, "N": spec.tokens, "H": spec.heads, "K": TOPK, "context": CONTEXT, "page": PAGE}
    return make_case(
        spec.name,
        spec.group,
        {**letters, "keys": spec.keys, "packed": spec.packed, "batch_invariant": spec.batch_invariant},
        ms,
        tflops=flop / ms / 1e9,
        peer=peer_of(spec, flop),
        err={"similarity": found.similarity},
        tbps=round(key_bytes / ms / 1e9, 3),
    )


def label(case: Case) -> str:
    args = case["args"]
    lines = [f"{args['B']}", f"x {args['N']}"]
    lines += ["inv."] if args["batch_invariant"] else []
    return "\n".join(lines if args["packed"] else [*lines, f"H={args['H']}"])


def plot(cases: list[Case], path: Path) -> None:
    """One panel per number of heads: the time of every batch, and the peer's where it is known. `inv.` is
    batch_invariant."""
    groups = list(dict.fromkeys(case["group"] for case in cases))
    with drawing(path, 4.5 * len(groups), len(groups)) as row:
        for axis, group in zip(row if len(groups) > 1 else [row], groups, strict=True):
            chosen = [case for case in cases if case["group"] == group]
            series = {"dsa_ext": [case["ms"] * 1e3 for case in chosen]}
            if any(case["peer"] for case in chosen):
                series["FlashMLA"] = [case["ms"] * 1e3 * (case["ratio"] or 0) for case in chosen]
            grouped_bars(axis, [label(case) for case in chosen], series)
            axis.set(title=f"{group}, B x N", ylabel="us")
            axis.legend(loc="upper left", fontsize=8)


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot, "CUDA graph of several calls, median", [OP])
