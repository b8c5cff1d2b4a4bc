"""Removes noise from video with block-sparse attention, and shows which blocks are selected and what each stage costs.

The clips are made here: shapes that move over a drifting texture. Their patches are the tokens, ordered so that a block
of 64 tokens is a box of 4 frames by 4 by 4 patches. A small model gets clips with noise and learns to predict them
without it. Then the blocks that one block of queries selects are drawn, and each stage of a layer is timed.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import dsa_ext
from dsa_ext.nn import BlockSparseAttention
from dsa_ext.testing.progress import Progress
from dsa_ext.testing.timing import time_ms

REPOSITORY = Path(__file__).resolve().parent.parent
BOX = 4  # frames, rows and columns of patches of a block
COLOURS = 3
SHAPES = 4
TIMED = ("projections", "pooling", "coarse", "selection", "fine", "fusion")


def make_clip(frames: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """[frames, height, width, 3], about -1 to 1: discs that move over a texture that drifts."""

    def random(*sizes: int) -> Tensor:
        return torch.rand(*sizes, generator=generator, device=generator.device)

    t, y, x = (torch.arange(size, device=generator.device) for size in (frames, height, width))
    t, y, x = t[:, None, None, None], y[:, None, None] / height, x[:, None] / height
    waves = (random(4, 3, COLOURS) - 0.5) * torch.tensor([20.0, 20, 0.4], device=generator.device)[:, None]
    clip = sum(0.2 * torch.sin(w[0] * y + w[1] * x + w[2] * t + 6 * c) for w, c in zip(waves, random(4), strict=True))
    assert isinstance(clip, Tensor)
    for _ in range(SHAPES):
        (py, px, vy, vx), radius, colour = random(4), 0.08 + 0.1 * random(1), 2 * random(COLOURS) - 1
        centre_y, centre_x = py + 0.04 * (vy - 0.5) * t, (px * width / height) + 0.04 * (vx - 0.5) * t
        distance = ((y - centre_y) ** 2 + (x - centre_x) ** 2).sqrt()
        cover = torch.sigmoid((radius - distance) * height / 2)
        clip = cover * colour + (1 - cover) * clip
    return clip


def to_tokens(clip: Tensor, patch: int) -> Tensor:
    """[tokens, patch * patch * 3], box by box."""
    frames, height, width, colours = clip.shape
    shape = (frames // BOX, BOX, height // patch // BOX, BOX, patch, width // patch // BOX, BOX, patch, colours)
    return clip.reshape(shape).permute(0, 2, 5, 1, 3, 6, 4, 7, 8).flatten(6).flatten(0, 5)


def box_order(places: tuple[int, int, int]) -> Tensor:
    """The place of each token: frame, row and column of patches [tokens, 3]."""
    axes = [torch.arange(size) for size in places]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
    return to_tokens(grid.float(), 1).long()


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with a residual connection."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(args.hidden), nn.RMSNorm(args.hidden)
        self.attention = BlockSparseAttention(
            args.hidden, args.heads, head_dim=args.head_dim, mode="topk", topk=args.topk
        )
        self.mlp = nn.Sequential(
            nn.Linear(args.hidden, 4 * args.hidden), nn.GELU(), nn.Linear(4 * args.hidden, args.hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Model(nn.Module):
    """Predicts patches without noise from patches with noise."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        columns = args.patch**2 * COLOURS
        self.embedding = nn.Linear(columns, args.hidden)
        self.places = nn.ParameterList(0.5 * torch.randn(size, args.hidden) for size in args.places)
        self.register_buffer("order", box_order(args.places), persistent=False)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.hidden), nn.Linear(args.hidden, columns)
        nn.init.zeros_(self.head.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        assert isinstance(self.order, Tensor)
        for table, place in zip(self.places, self.order.unbind(1), strict=True):
            x = x + table[place]
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


@dataclass
class Stages:
    """One layer on one clip, stage by stage."""

    times: dict[str, float] = field(default_factory=dict)  # milliseconds
    selected: Tensor = field(default_factory=lambda: torch.empty(0))  # share of the heads [blocks, blocks]


def train(model: Model, clips: list[Tensor], args: argparse.Namespace, progress: Progress) -> list[float]:
    """The loss of each step: the mean squared error, relative to that of predicting the mean."""
    generator = torch.Generator(args.device).manual_seed(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for step in range(args.steps):
        tokens = clips[step % len(clips)]
        noise = torch.randn(tokens.shape, generator=generator, device=args.device)
        seen = (tokens + args.noise * noise).to(tokens.dtype)
        loss = (model(seen).float() - tokens.float()).square().mean() / tokens.float().var()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 10 == 0:
            label = f"training: loss {losses[-1]:.3f}"
        progress.step(label)
    return losses


def measure_ms(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return time_ms(call, total_ms=50)
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


@torch.no_grad()
def look(model: Model, tokens: Tensor, args: argparse.Namespace, progress: Progress) -> Stages:
    """Runs the last layer stage by stage, on a clip without noise."""
    x = model.embed(tokens)
    for block in model.blocks[:-1]:
        x = block(x)
    layer, x = model.blocks[-1].attention, model.blocks[-1].attention_norm(x)
    stages = Stages()

    def heads(projection: nn.Module) -> Tensor:
        rows: Tensor = projection(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        return rows

    def project() -> tuple[Tensor, ...]:
        return heads(layer.q_proj), heads(layer.k_proj), heads(layer.v_proj), layer.gate_proj(x).mT

    q, k, v, gate = project()
    pooled = layer.pool(k, v)
    coarse, scores = dsa_ext.coarse_attn(q, *pooled)
    index, number = layer.select(scores)
    fine = dsa_ext.block_sparse_attn(q, k, v, index, number)
    calls: tuple[Callable[[], object], ...] = (
        lambda: (project(), layer.o_proj(fine.transpose(1, 2).flatten(2))),
        lambda: layer.pool(k, v),
        lambda: dsa_ext.coarse_attn(q, *pooled),
        lambda: layer.select(scores),
        lambda: dsa_ext.block_sparse_attn(q, k, v, index, number),
        lambda: dsa_ext.gated_fusion(fine, coarse, gate),
    )
    for name, call in zip(TIMED, calls, strict=True):
        stages.times[name] = measure_ms(call, args.device)
        progress.step("timing")
    blocks = scores.shape[3]
    marks = torch.zeros(*scores.shape[1:3], blocks + 1, device=args.device)
    marks.scatter_(2, index[0].masked_fill(index[0] < 0, blocks).long(), 1)
    stages.selected = marks[..., :blocks].mean(0).cpu()
    return stages


def draw(clip: Tensor, stages: Stages, query: int, args: argparse.Namespace) -> None:
    """Every fourth frame; below each, which of its blocks the heads of one block of queries select."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    slabs, rows, columns = (size // BOX for size in args.places)
    side = BOX * args.patch
    shares = stages.selected[query].view(slabs, rows, columns)
    figure, axes = plt.subplots(2, slabs, figsize=(4 * slabs, 5.5), constrained_layout=True, squeeze=False)
    for slab in range(slabs):
        frame = clip[slab * BOX + BOX // 2].clamp(-1, 1).cpu().numpy() / 2 + 0.5
        axes[0, slab].imshow(frame)
        axes[0, slab].set_title(f"frames {slab * BOX} to {slab * BOX + BOX - 1}")
        extent = (0, columns * side, rows * side, 0)
        image = axes[1, slab].imshow(shares[slab].numpy(), extent=extent, vmin=0, vmax=1, cmap="magma")
        if slab == query // (rows * columns):
            corner = (query % columns * side, query // columns % rows * side)
            for axis in axes[:, slab]:
                axis.add_patch(plt.Rectangle(corner, side, side, fill=False, edgecolor="cyan", linewidth=2))
    figure.colorbar(image, ax=axes, shrink=0.5, label="share of heads")
    figure.suptitle("Top: the clip. Bottom: the blocks that the queries in the cyan block select")
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=100)
    plt.close(figure)


def print_report(losses: list[float], stages: Stages, args: argparse.Namespace) -> None:
    blocks = len(stages.selected)
    print(
        f"\n{blocks * BOX**3} tokens in {blocks} blocks, {args.heads} heads, {args.topk} blocks per block of queries.\n"
    )
    first, last = (sum(part) / len(part) for part in (losses[:5], losses[-5:]))
    print(f"loss: {first:.3f} -> {last:.3f}; predicting the mean gives 1\n")
    print(f"{'stage of a layer':<18}{'time':>12}")
    for name, milliseconds in stages.times.items():
        print(f"{name:<18}{milliseconds:>9.3f} ms")
    print(f"{'all':<18}{sum(stages.times.values()):>9.3f} ms")
    if args.device.type != "cuda":
        print("\nWithout a Hopper GPU the operators run their reference implementations: the times mean nothing.")
    print(f"Picture: {args.picture}")
    print("Look at the bright blocks at the bottom: the queries in the cyan block read only these, in all frames.")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )

    def number(name: str, on_gpu: float, on_cpu: float, text: str) -> None:
        parser.add_argument(f"--{name}", type=type(on_cpu), default=on_gpu if hopper else on_cpu, help=text)

    number("frames", 16, 8, "of a clip, a multiple of 4")
    number("rows", 28, 16, "of patches, a multiple of 4")
    number("columns", 52, 16, "of patches, a multiple of 4")
    number("patch", 8, 4, "pixels along a side of a patch")
    number("layers", 2, 2, "of the model")
    number("hidden", 1536, 64, "columns of the stream")
    number("heads", 12, 2, "of attention")
    number("head-dim", 128, 64, "columns of a head, 64 or 128")
    number("topk", 36, 6, "blocks that a block of queries attends to")
    number("clips", 8, 8, "to train on, one per step")
    number("steps", 100, 50, "of training")
    number("noise", 1.0, 1.0, "standard deviation of the noise; that of clips is about a third")
    number("lr", 3e-4, 3e-3, "learning rate")
    number("seed", 0, 0, "of the weights and of the clips")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "demo_out/video_blocks.png", help="PNG to write")
    args = parser.parse_args(arguments)
    args.places = (args.frames, args.rows, args.columns)
    if any(size < BOX or size % BOX for size in args.places):
        parser.error(f"--frames, --rows and --columns must be multiples of {BOX}, got {args.places}")
    args.device = torch.device("cuda" if hopper else "cpu")
    return args


def run(args: argparse.Namespace) -> tuple[list[float], Stages]:
    torch.manual_seed(args.seed)
    dtype = torch.bfloat16 if args.device.type == "cuda" else torch.float32
    generator = torch.Generator(args.device).manual_seed(args.seed)
    frames, height, width = args.frames, args.rows * args.patch, args.columns * args.patch
    clips = [make_clip(frames, height, width, generator) for _ in range(args.clips + 1)]
    tokens = [to_tokens(clip, args.patch)[None].to(dtype) for clip in clips]
    model = Model(args).to(args.device, dtype)
    progress = Progress(total=args.steps + len(TIMED) + 1)
    losses = train(model, tokens[:-1], args, progress)
    stages = look(model, tokens[-1], args, progress)
    slabs, rows, columns = (size // BOX for size in args.places)
    draw(clips[-1], stages, (slabs // 2 * rows + rows // 2) * columns + columns // 2, args)
    progress.step("picture")
    return losses, stages


def main() -> None:
    args = parse_arguments()
    print(f"device: {dsa_ext.build_info()['device']}; {dsa_ext.build_info()['kernels']}")
    print_report(*run(args), args)


if __name__ == "__main__":
    main()
