"""Sparse attention on real text, beside dense attention: what is kept, what it costs, how it looks.

The text is this repository's own documentation, read as bytes. A small MLA layer (mla_layer.py) turns it into queries
and keys, the lightning indexer's formula scores every key for every query, and `dsa_ext.sparse_mla` attends to the
best. The weights are seeded, not trained: the figures say what selection does to this layer, not to a trained model.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mla_layer import D_QK, D_V, SM_SCALE, MlaLayer
from torch import Tensor

import dsa_ext
from dsa_ext.testing.progress import Progress
from dsa_ext.testing.timing import time_ms

REPOSITORY = Path(__file__).resolve().parent.parent
MAP_SIZE = 512  # most pixels along one side of the picture
CHUNK = 128  # queries that dense attention and the indexer take at a time: bounds their memory

INDEXER, BEST, LATEST, RANDOM = "indexer", "best possible", "latest keys", "random keys"


@dataclass
class Comparison:
    """Dense attention of the whole text, and the keys that each way of selecting takes."""

    out: Tensor  # [S, H, d_v] fp32
    lse: Tensor  # [S, H] fp32
    selected: dict[str, Tensor]  # name -> ids [S, K] int32
    attention_map: Tensor  # averages over heads and over cells of the picture
    selected_map: Tensor


def chunks(length: int) -> Iterator[slice]:
    for first in range(0, length, CHUNK):
        yield slice(first, min(first + CHUNK, length))


def hidden_keys(run: slice, device: torch.device) -> Tensor:
    """[queries of run, keys up to its end]: which keys lie after the query."""
    keys = torch.arange(run.stop, device=device)
    return keys > keys[run, None]


def dense_chunk(q: Tensor, kv: Tensor, run: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Dense causal attention of the queries of `run`: out, lse, and probabilities [s, H, keys up to run's end]."""
    keys = kv[: run.stop]
    scores = (q[run] @ keys.T).float() * SM_SCALE
    scores.masked_fill_(hidden_keys(run, q.device)[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse[..., None]).exp_()
    return p.to(q.dtype) @ keys[:, :D_V], lse, p


def dense_attention(q: Tensor, kv: Tensor) -> Tensor:
    return torch.cat([dense_chunk(q, kv, run)[0] for run in chunks(len(q))])


def index_scores(q: Tensor, k: Tensor, weights: Tensor, run: slice) -> Tensor:
    """The lightning indexer: logits[s, t] = sum_h relu(q[s, h] . k[t]) * weights[s, h]."""
    return torch.einsum("sht,sh->st", (q[run] @ k[: run.stop].T).relu().float(), weights[run])


def select(scores: Tensor, run: slice, topk: int) -> Tensor:
    """Ids of the `topk` keys with the highest scores among those that a query sees: ascending, then -1."""
    values, ids = scores.masked_fill(hidden_keys(run, scores.device), -torch.inf).topk(min(topk, run.stop))
    ids = ids.masked_fill(values == -torch.inf, run.stop).sort().values
    ids = ids.masked_fill(ids == run.stop, -1).int()
    return torch.nn.functional.pad(ids, (0, topk - ids.shape[1]), value=-1)


def indexer_selection(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> Tensor:
    return torch.cat([select(index_scores(q, k, weights, run), run, topk) for run in chunks(len(q))])


def compare(
    q: Tensor, kv: Tensor, indexer: tuple[Tensor, Tensor, Tensor], topk: int, seed: int, progress: Progress
) -> Comparison:
    """Dense attention in fp32 on the values that the op is given, and every selection, chunk by chunk."""
    length, device = len(q), q.device
    draw = torch.Generator(device).manual_seed(seed)
    cell = 2 ** max(0, math.ceil(math.log2(length / MAP_SIZE)))

    def pooled(rows: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(rows, (0, length - rows.shape[1]))
        return torch.nn.functional.avg_pool2d(rows[None], cell, ceil_mode=True)[0]

    outs, lses, attention_rows, selected_rows = [], [], [], []
    selected: dict[str, list[Tensor]] = {INDEXER: [], BEST: [], LATEST: [], RANDOM: []}
    for run in chunks(length):
        out, lse, p = dense_chunk(q, kv, run)
        mean_p = p.mean(1)
        outs.append(out)
        lses.append(lse)
        scores = {
            INDEXER: index_scores(*indexer, run),
            BEST: mean_p,
            LATEST: torch.arange(run.stop, device=device).float().expand(mean_p.shape),
            RANDOM: torch.rand(mean_p.shape, generator=draw, device=device),
        }
        for name, score in scores.items():
            selected[name].append(select(score, run, topk))
        ids = selected[INDEXER][-1].long()
        marks = torch.zeros(len(ids), length + 1, device=device).scatter_(1, ids.where(ids >= 0, length), 1)
        attention_rows.append(pooled(mean_p))
        selected_rows.append(pooled(marks[:, :length]))
        progress.step("dense attention and selections")
    return Comparison(
        out=torch.cat(outs),
        lse=torch.cat(lses),
        selected={name: torch.cat(ids) for name, ids in selected.items()},
        attention_map=torch.cat(attention_rows),
        selected_map=torch.cat(selected_rows),
    )


def count_pairs(length: int, topk: int) -> int:
    """Pairs of a query and a key that it reads, when it reads at most `topk` of those it sees."""
    return sum(min(position + 1, topk) for position in range(length))


def sparse_attention(q: Tensor, kv: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = dsa_ext.sparse_mla(q[None], kv[None, :, None], ids[None, :, None], sm_scale=SM_SCALE, return_lse=True)
    return out[0], lse[0]


def measure_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return time_ms(call)
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def draw_picture(comparison: Comparison, kept: dict[str, Tensor], topk: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    length = len(comparison.out)
    figure, axes = plt.subplots(1, 3, figsize=(18, 5.6), constrained_layout=True)
    extent = (0, length, length, 0)
    dense = comparison.attention_map.cpu().numpy()
    image = axes[0].imshow(dense, extent=extent, norm=LogNorm(1e-5, dense.max(), clip=True), cmap="magma")
    figure.colorbar(image, ax=axes[0], shrink=0.8)
    axes[0].set(title="dense attention, mean of the heads", xlabel="key", ylabel="query")
    image = axes[1].imshow(comparison.selected_map.cpu().numpy(), extent=extent, vmin=0, vmax=1, cmap="magma")
    figure.colorbar(image, ax=axes[1], shrink=0.8)
    axes[1].set(title=f"share of keys selected by the indexer, {topk} a query", xlabel="key", ylabel="query")
    for name, mass in kept.items():
        smooth = torch.nn.functional.avg_pool1d(mass.mean(1)[None], max(1, length // 128))[0].cpu()
        axes[2].plot(torch.linspace(0, length, len(smooth)), smooth, label=name)
    axes[2].set(title="attention mass kept, mean of the heads", xlabel="query", ylim=(0, 1.02), xlim=(0, length))
    axes[2].legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def read_text(paths: list[Path], length: int) -> bytes:
    paths = paths or [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    return b"\n".join(path.read_bytes() for path in paths)[:length]


def parse_arguments(hopper: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to read instead of the documentation")
    parser.add_argument("--length", type=int, default=8192 if hopper else 2048, help="bytes of the text, at most")
    parser.add_argument("--heads", type=int, default=128 if hopper else 16, help="attention heads, 1 to 128")
    parser.add_argument("--topk", type=int, default=2048 if hopper else 256, help="keys that a query attends to")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the random baseline")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "demo_out/selected_keys.png", help="PNG to write")
    args = parser.parse_args()
    if not 1 <= args.heads <= 128:
        parser.error("--heads must be from 1 to 128")
    args.bytes = read_text(args.text, args.length)
    if not 1 <= args.topk < len(args.bytes):
        parser.error(f"--topk must be from 1 to below the length of the text, {len(args.bytes)} bytes")
    return args


def print_report(
    args: argparse.Namespace,
    hopper: bool,
    kept: dict[str, Tensor],
    errors: dict[str, float],
    times: dict[str, tuple[float, int]],
) -> None:
    length, topk = len(args.bytes), args.topk
    share = count_pairs(length, topk) / count_pairs(length, length)
    print(f"\n{length} bytes of text, {args.heads} heads, {topk} keys a query: {share:.0%} of dense attention's pairs.")
    print(f"Over the {length - topk} queries that see more than {topk} keys:\n")
    print(f"{'keys selected':<16}{'mass kept':>11}{'worst 1 %':>11}{'output error':>14}")
    for name, mass in kept.items():
        choosing = mass[topk:].flatten()
        worst = choosing.kthvalue(max(1, len(choosing) // 100)).values
        print(f"{name:<16}{choosing.mean():>11.1%}{worst:>11.1%}{errors[name]:>14.3f}")
    print(f"\n{'':<42}{'time':>12}{'TFLOP/s':>10}")
    for name, (milliseconds, flop) in times.items():
        print(f"{name:<42}{milliseconds:>9.2f} ms{flop / milliseconds / 1e9:>10.3g}")
    print(
        "\nmass kept: share of dense attention's probability that falls on the selected keys, mean over queries and\n"
        "heads; worst 1 %: 99 % of them keep more. output error: |sparse - dense| / |dense|. best possible: the keys\n"
        "with the most attention, mean of the heads, which only dense attention knows. TFLOP/s counts visible pairs."
    )
    print(
        "The weights are seeded, not trained. The indexer is not trained either: its weights are projections of\n"
        "the layer's own (examples/mla_layer.py), so that its scores follow attention."
    )
    if not hopper:
        print(
            "Without a Hopper GPU sparse_mla is its reference, written to be read: its time says nothing of the kernel."
        )
    print(f"Picture: {args.picture}")


@torch.inference_mode()
def main() -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = torch.device("cuda" if hopper else "cpu")
    args = parse_arguments(hopper)
    length, heads, topk = len(args.bytes), args.heads, args.topk
    print(f"device: {dsa_ext.build_info()['device']}; {dsa_ext.build_info()['kernels']}")

    progress = Progress(total=math.ceil(length / CHUNK) + 1 + 4 + 3 + 1)
    layer = MlaLayer(heads, args.seed, device)
    q, kv = layer(args.bytes)
    indexer = layer.indexer(q, kv)
    q, kv = q.bfloat16(), kv.bfloat16()
    progress.step("layer")

    q_fp32, kv_fp32 = q.float(), kv.float()
    comparison = compare(q_fp32, kv_fp32, indexer, topk, args.seed, progress)
    kept, errors = {}, {}
    for name, ids in comparison.selected.items():
        out, lse = sparse_attention(q, kv, ids)
        kept[name] = torch.exp(lse - comparison.lse)
        dense = comparison.out[topk:]
        errors[name] = float((out[topk:].float() - dense).norm() / dense.norm())
        progress.step("sparse attention")

    # Dense attention gets the dtype that it is fast in: bf16 on the GPU, fp32 on the CPU.
    dense_inputs = (q, kv) if hopper else (q_fp32, kv_fp32)
    indexer_inputs = tuple(x.bfloat16() for x in indexer[:2]) if hopper else indexer[:2]
    visible_pairs = count_pairs(length, length)
    index_dim, index_heads = indexer[0].shape[2], indexer[0].shape[1]
    work: dict[str, tuple[Callable[[], object], int]] = {
        f"sparse_mla, {'kernel' if hopper else 'CPU implementation'}": (
            lambda: sparse_attention(q, kv, comparison.selected[INDEXER]),
            2 * heads * (D_QK + D_V) * count_pairs(length, topk),
        ),
        "dense attention, PyTorch in chunks": (
            lambda: dense_attention(*dense_inputs),
            2 * heads * (D_QK + D_V) * visible_pairs,
        ),
        "indexer and top-k, PyTorch in chunks": (
            lambda: indexer_selection(*indexer_inputs, indexer[2], topk),
            2 * index_heads * index_dim * visible_pairs,
        ),
    }
    times = {}
    for name, (call, flop) in work.items():
        times[name] = (measure_ms(call, device), flop)
        progress.step("timing")

    draw_picture(comparison, kept, topk, args.picture)
    progress.step("picture")
    print_report(args, hopper, kept, errors, times)


if __name__ == "__main__":
    main()
