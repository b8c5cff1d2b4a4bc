"""Sparse attention on real text, compared with dense attention: what is kept, what it costs, how it looks.

The text is this repository's own documentation, read as bytes. A small MLA layer (mla_layer.py) turns it into queries
and keys, `dsa_ext.indexer_topk` scores every key for every query and selects the best, and `dsa_ext.sparse_mla` attends
to those. The weights are seeded, not trained: the figures say what selection does to this layer, not to a trained
model.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mla_layer import D_QK, D_V, HEAD_DIM, ROPE, SM_SCALE, MlaLayer
from torch import Tensor

import dsa_ext
from dsa_ext.testing.progress import Progress
from dsa_ext.testing.timing import time_ms

REPOSITORY = Path(__file__).resolve().parent.parent
MAP_SIZE = 512  # most pixels along one side of the picture
CHUNK = 128  # queries whose probabilities for all keys are held at a time
MAX_TOPK = 4096  # of indexer_topk and topk_select

INDEXER, BEST, LATEST, RANDOM = "indexer", "best possible", "latest keys", "random keys"


@dataclass
class Comparison:
    """Dense attention of the whole text, and the keys that each way of selection takes."""

    out: Tensor  # [S, H, d_v] fp32
    lse: Tensor  # [S, H] fp32
    selected: dict[str, Tensor]  # name -> ids [S, K] int32
    attention_map: Tensor  # means over heads and over the area of a pixel
    selected_map: Tensor


def chunks(length: int) -> Iterator[slice]:
    for first in range(0, length, CHUNK):
        yield slice(first, min(first + CHUNK, length))


def dense_chunk(q: Tensor, kv: Tensor, run: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Dense causal attention of the queries of `run`: out, lse, and probabilities [s, H, keys up to run's end]."""
    keys = kv[: run.stop]
    scores = (q[run] @ keys.T).float() * SM_SCALE
    position = torch.arange(run.stop, device=q.device)
    scores.masked_fill_((position > position[run, None])[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse[..., None]).exp_()
    return p.to(q.dtype) @ keys[:, :D_V], lse, p


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense causal attention with keys and values [S, H, columns] for each head."""
    # PyTorch's fastest kernels take values as wide as the keys.
    v_wide = torch.nn.functional.pad(v, (0, k.shape[2] - v.shape[2]))
    q, k, v_wide = (x.transpose(0, 1)[None] for x in (q, k, v_wide))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v_wide, is_causal=True, scale=SM_SCALE)
    return out[0].transpose(0, 1)[..., : v.shape[2]]


def visible_keys(run: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first key that each query of `run` sees, and the key after the last: starts and ends of the operators."""
    ends = torch.arange(run.start + 1, run.stop + 1, dtype=torch.int32, device=device)
    return torch.zeros_like(ends), ends


def indexer_selection(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> Tensor:
    ids, _ = dsa_ext.indexer_topk(q, k, weights, *visible_keys(slice(0, len(q)), q.device), topk)
    return ids


def compare(q: Tensor, kv: Tensor, indexed: Tensor, topk: int, seed: int, progress: Progress) -> Comparison:
    """Dense attention in fp32 on the values that sparse_mla is given, and the other selections, chunk by chunk."""
    length, device = len(q), q.device
    draw = torch.Generator(device).manual_seed(seed)
    cell = 2 ** max(0, math.ceil(math.log2(length / MAP_SIZE)))

    def pooled(rows: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(rows, (0, length - rows.shape[1]))
        return torch.nn.functional.avg_pool2d(rows[None], cell, ceil_mode=True)[0]

    outs, lses, attention_rows, selected_rows = [], [], [], []
    selected: dict[str, list[Tensor]] = {BEST: [], LATEST: [], RANDOM: []}
    for run in chunks(length):
        out, lse, p = dense_chunk(q, kv, run)
        mean_p = p.mean(1)
        outs.append(out)
        lses.append(lse)
        scores = {
            BEST: mean_p,
            LATEST: torch.arange(run.stop, device=device).float().expand(mean_p.shape),
            RANDOM: torch.rand(mean_p.shape, generator=draw, device=device),
        }
        for name, score in scores.items():
            selected[name].append(dsa_ext.topk_select(score.contiguous(), *visible_keys(run, device), topk)[0])
        ids = indexed[run].long()
        marks = torch.zeros(len(ids), length + 1, device=device).scatter_(1, ids.where(ids >= 0, length), 1)
        attention_rows.append(pooled(mean_p))
        selected_rows.append(pooled(marks[:, :length]))
        progress.step("dense attention and selections")
    return Comparison(
        out=torch.cat(outs),
        lse=torch.cat(lses),
        selected={INDEXER: indexed} | {name: torch.cat(ids) for name, ids in selected.items()},
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
    axes[1].set(title=f"share of keys selected by the indexer, {topk} per query", xlabel="key", ylabel="query")
    for name, mass in kept.items():
        smooth = torch.nn.functional.avg_pool1d(mass.mean(1)[None], max(1, length // 128))[0].cpu()
        axes[2].plot(torch.linspace(0, length, len(smooth)), smooth, label=name)
    axes[2].set(title="attention mass kept, mean of the heads", xlabel="query", ylim=(0, 1.02), xlim=(0, length))
    axes[2].legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def read_text(paths: list[Path], length: int) -> bytes:
    paths = paths or [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    return b"\n".join(path.read_bytes() for path in paths)[:length]


def parse_arguments(hopper: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to read instead of the documentation")
    parser.add_argument("--length", type=int, default=8192 if hopper else 2048, help="bytes of the text, at most")
    parser.add_argument(
        "--heads", type=int, default=128 if hopper else 16, help="attention heads, an even number up to 128"
    )
    parser.add_argument("--topk", type=int, default=2048 if hopper else 256, help="keys that a query attends to")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the random baseline")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "demo_out/selected_keys.png", help="PNG to write")
    args = parser.parse_args()
    if args.heads not in range(2, 129, 2):
        parser.error(f"--heads must be an even number from 2 to 128, got {args.heads}")
    args.bytes = read_text(args.text, args.length)
    if not 1 <= args.topk < len(args.bytes):
        parser.error(f"--topk must be from 1 to below the length of the text, {len(args.bytes)} bytes, got {args.topk}")
    if args.topk > MAX_TOPK:
        parser.error(f"--topk must be at most {MAX_TOPK}, got {args.topk}")
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
    print(f"\n{length} bytes of text, {args.heads} heads, {topk} keys per query: {share:.0%} of all pairs.")
    print(f"Of the {length - topk} queries that see more than {topk} keys:\n")
    print(f"{'keys selected':<16}{'mass kept':>11}{'worst 1 %':>11}{'output error':>14}")
    for name, mass in kept.items():
        choosing = mass[topk:].flatten()
        worst = choosing.kthvalue(max(1, len(choosing) // 100)).values
        print(f"{name:<16}{choosing.mean():>11.1%}{worst:>11.1%}{errors[name]:>14.3f}")
    print(f"\n{'':<62}{'time':>12}{'TFLOP/s':>10}")
    for name, (milliseconds, flop) in times.items():
        print(f"{name:<62}{milliseconds:>9.2f} ms{flop / milliseconds / 1e9:>10.3g}")
    print(
        "\nmass kept: share of the probability of dense attention that falls on the selected keys, mean over queries\n"
        "and heads; worst 1 %: 99 % of them keep more. output error: |sparse - dense| / |dense|. best possible: the\n"
        "keys with the highest probability, mean of the heads, which only dense attention knows.\n"
        "TFLOP/s counts the pairs of a query and a key that it reads. Dense attention does less work per pair:\n"
        f"each head has keys of {HEAD_DIM + ROPE} and values of {HEAD_DIM} columns, for sparse_mla {D_QK} and {D_V}."
    )
    print(
        "The weights are seeded, not trained. The indexer is not trained either: its weights are projections of\n"
        "the layer's own (examples/mla_layer.py), so that its scores follow attention."
    )
    if not hopper:
        print("Without a Hopper GPU the operators run their reference implementations: their times mean nothing.")
    print(f"Picture: {args.picture}")
    print("Look at the right plot: the indexer stays near the best possible selection, and far above the latest keys.")


@torch.inference_mode()
def main() -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    device = torch.device("cuda" if hopper else "cpu")
    args = parse_arguments(hopper)
    length, heads, topk = len(args.bytes), args.heads, args.topk
    print(f"device: {dsa_ext.build_info()['device']}; {dsa_ext.build_info()['kernels']}")

    progress = Progress(total=math.ceil(length / CHUNK) + 2 + 4 + 3 + 1)
    layer = MlaLayer(heads, args.seed, device)
    q, kv = layer.absorbed(args.bytes)
    # The dtype that is fast: bf16 on the GPU, fp32 on the CPU.
    dtype = torch.bfloat16 if hopper else torch.float32
    index_q, index_k, weights = layer.indexer(q, kv)
    indexer = index_q.to(dtype), index_k.to(dtype), weights
    per_head = tuple(x.to(dtype) for x in layer.per_head(args.bytes))
    q, kv = q.bfloat16(), kv.bfloat16()
    progress.step("layer")

    indexed = indexer_selection(*indexer, topk)
    progress.step("indexer")
    comparison = compare(q.float(), kv.float(), indexed, topk, args.seed, progress)
    kept, errors = {}, {}
    for name, ids in comparison.selected.items():
        out, lse = sparse_attention(q, kv, ids)
        kept[name] = torch.exp(lse - comparison.lse)
        dense = comparison.out[topk:]
        errors[name] = float((out[topk:].float() - dense).norm() / dense.norm())
        progress.step("sparse attention")

    visible_pairs = count_pairs(length, length)
    index_heads, index_dim = index_q.shape[1:]
    work: dict[str, tuple[Callable[[], object], int]] = {
        "dsa_ext.indexer_topk": (
            lambda: indexer_selection(*indexer, topk),
            2 * index_heads * index_dim * visible_pairs,
        ),
        "dsa_ext.sparse_mla": (
            lambda: sparse_attention(q, kv, indexed),
            2 * heads * (D_QK + D_V) * count_pairs(length, topk),
        ),
        "dense attention, torch's scaled_dot_product_attention": (
            lambda: dense_attention(*per_head),
            2 * heads * (2 * HEAD_DIM + ROPE) * visible_pairs,
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
