"""Trains a small byte-level language model with sparse attention, the way DeepSeek-V3.2 was: dense, warm-up, sparse.

The text is this repository's own documentation. First the model learns with dense attention. Then everything but the
indexers is frozen, and they learn to predict attention to all keys (warm-up). At last queries read only the keys that
the indexers select, and everything learns: the model from the text, the indexers from the keys that they select.
With `--streams` layers are joined by hyper-connections instead of residual ones.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsa_ext
from dsa_ext.nn import HyperConnection, Phase, SparseMLA
from dsa_ext.testing.progress import Progress

REPOSITORY = Path(__file__).resolve().parent.parent
BYTES = 256


class Attention(nn.Module):
    """What it adds to the stream, and its indexer's loss."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(args.hidden)
        self.attention = SparseMLA(
            args.hidden,
            args.heads,
            q_lora_rank=args.hidden,
            nope_dim=args.head_dim,
            v_dim=args.head_dim,
            topk=args.topk,
            indexer={"heads": args.index_heads, "head_dim": args.index_dim},
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        result = self.attention(self.norm(x))
        return result.out, result.indexer_loss


class Residual(nn.Module):
    """The connection of a single stream: a layer's result is added to it. Its uses are those of HyperConnection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def read(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def forward(self, x: Tensor) -> Any:
        result = self.layer(x)
        return (x + result[0], *result[1:]) if isinstance(result, tuple) else x + result


class Block(nn.Module):
    """Attention and a perceptron, each joined to the stream or streams."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        perceptron = nn.Sequential(
            nn.RMSNorm(args.hidden),
            nn.Linear(args.hidden, 4 * args.hidden),
            nn.GELU(),
            nn.Linear(4 * args.hidden, args.hidden),
        )
        self.attention, self.mlp = (
            Residual(layer) if args.streams == 1 else HyperConnection(layer, args.hidden, args.streams)
            for layer in (Attention(args), perceptron)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x, loss = self.attention(x)
        return self.mlp(x), loss


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.streams = args.streams
        self.embedding = nn.Embedding(BYTES, args.hidden)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.hidden), nn.Linear(args.hidden, BYTES, bias=False)

    def embed(self, text: Tensor) -> Tensor:
        """[B, S, hidden], or of several streams [B, S, n, hidden]."""
        x: Tensor = self.embedding(text)
        return x if self.streams == 1 else x[:, :, None].expand(-1, -1, self.streams, -1)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, S, 256], and the sum of the indexers' losses, if they have one."""
        x, losses = self.embed(text), []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        total = None if losses[0] is None else torch.stack(losses).sum()
        return self.head(self.norm(x if self.streams == 1 else x.mean(2))), total

    def enter(self, phase: Phase) -> list[nn.Parameter]:
        """Sets the phase; returns the parameters that learn in it."""
        for block in self.blocks:
            block.attention.layer.attention.phase = phase
        for name, parameter in self.named_parameters():
            parameter.requires_grad_({"dense": ".indexer." not in name, "warmup": ".indexer." in name}.get(phase, True))
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def selection(self, text: Tensor) -> tuple[float, float]:
        """Of the keys that the indexers select: their share of dense attention, and how many are among its best.

        Means over the queries that see twice as many keys as they select.
        """
        x, mass, recall = self.embed(text), [], []
        for block in self.blocks:
            layer, inputs = block.attention.layer.attention, block.attention.layer.norm(block.attention.read(x)[0])
            attention, ids = layer.attention_to_all(inputs), layer.select(inputs)
            topk = ids.shape[2]
            chosen, best = ids[:, 2 * topk :].long(), attention[:, 2 * topk :]
            mass.append(best.gather(2, chosen).sum(-1).mean())
            best_ids = best.topk(topk, dim=-1).indices
            marks = torch.zeros_like(best).scatter_(2, chosen, 1)
            recall.append(marks.gather(2, best_ids).mean())
            x, _ = block(x)
        return float(torch.stack(mass).mean()), float(torch.stack(recall).mean())


@dataclass
class History:
    """What is measured after each step."""

    phases: list[str] = field(default_factory=list)
    language: list[float] = field(default_factory=list)
    indexer: list[float] = field(default_factory=list)  # NaN in the dense phase
    seconds: list[float] = field(default_factory=list)
    selections: dict[int, tuple[float, float]] = field(default_factory=dict)  # by the number of steps before

    def mean(self, values: list[float], phase: str, part: slice) -> float:
        of_phase = [value for value, name in zip(values, self.phases, strict=True) if name == phase][part]
        return sum(of_phase) / max(1, len(of_phase))


def batches(text: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """Random windows of the text [batch, length + 1]."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        yield torch.stack([text[start : start + args.length + 1] for start in starts]).to(args.device)


def train(args: argparse.Namespace) -> History:
    torch.manual_seed(args.seed)
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
    model = Model(args).to(args.device, torch.bfloat16 if args.device.type == "cuda" else torch.float32)
    stream, history = batches(text, args), History()
    sample = next(stream)[:, :-1]
    phases: dict[Phase, int] = {"dense": args.dense_steps, "warmup": args.warmup_steps, "sparse": args.sparse_steps}
    progress = Progress(total=sum(phases.values()))
    for phase, steps in phases.items():
        parameters = model.enter(phase)
        optimizer = torch.optim.AdamW(parameters, lr=args.indexer_lr if phase == "warmup" else args.lr)
        for step in range(steps):
            if step == 0 or len(history.phases) % args.measure_every == 0:
                history.selections[len(history.phases)] = model.selection(sample)
            begin, window = time.perf_counter(), next(stream)
            logits, indexer = model(window[:, :-1])
            language = nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            losses = {"dense": [language], "warmup": [indexer], "sparse": [language, indexer]}[phase]
            torch.stack(losses).sum().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            history.language.append(float(language.detach()))
            history.indexer.append(math.nan if indexer is None else float(indexer.detach()) / args.layers)
            history.seconds.append(time.perf_counter() - begin)
            history.phases.append(phase)
            if step % 20 == 0:
                label = f"{phase}: language {history.language[-1]:.2f}, indexer {history.indexer[-1]:.3f}"
            progress.step(label)
    history.selections[len(history.phases)] = model.selection(sample)
    return history


def read_text() -> bytes:
    paths = [REPOSITORY / "README.md", REPOSITORY / "bench/NOTES.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    return b"\n".join(path.read_bytes() for path in paths)


def draw(history: History, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    axes[0].plot(history.language)
    axes[0].set(title="language loss", xlabel="step", ylabel="nats a byte")
    axes[1].plot(history.indexer)
    axes[1].set(title="indexer's KL from attention, a layer", xlabel="step", ylabel="nats", ylim=(0, None))
    steps = list(history.selections)
    axes[2].plot(steps, [mass for mass, _ in history.selections.values()], label="attention on the selected keys")
    axes[2].plot(steps, [recall for _, recall in history.selections.values()], label="of the best keys, selected")
    axes[2].set(title="selection, beside dense attention", xlabel="step", ylim=(0, 1.02))
    axes[2].legend(loc="lower right")
    for axis in axes:
        for i in range(1, len(history.phases)):
            if history.phases[i] != history.phases[i - 1]:
                axis.axvline(i, color="black", linestyle=":", linewidth=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def print_report(args: argparse.Namespace, history: History) -> None:
    layers = f"{args.layers} layers" + (f", {args.streams} streams" if args.streams > 1 else "")
    print(f"\n{layers}, {args.heads} heads, {args.length} bytes a window, {args.topk} keys a query.\n")
    print(f"{'phase':<9}{'steps':>6}{'language loss':>21}{'indexer KL':>19}{'mass':>16}{'recall':>16}{'step':>10}")
    for phase in dict.fromkeys(history.phases):
        first, count = history.phases.index(phase), history.phases.count(phase)
        ends = [
            [history.mean(values, phase, part) for part in (slice(10), slice(-10, None))]
            for values in (history.language, history.indexer)
        ]
        before, after = history.selections[first], history.selections[first + count]
        indexer = "-" if math.isnan(ends[1][0]) else f"{ends[1][0]:.3f} -> {ends[1][1]:.3f}"
        cells = f"{ends[0][0]:>12.2f} -> {ends[0][1]:.2f} {indexer:>18}"
        shares = "".join(f"{a:>8.0%} -> {b:>3.0%}" for a, b in zip(before, after, strict=True))
        print(f"{phase:<9}{count:>6}{cells:>40}{shares:>32}{history.mean(history.seconds, phase, slice(None)):>8.2f} s")
    print(
        "\nLosses are means of a phase's first and last ten steps. mass: share of dense attention that falls on the\n"
        "keys that the indexers select; recall: how many of the keys with the most attention are among them."
    )
    if args.device.type != "cuda":
        print("Without a Hopper GPU the operators are their references, written to be read: step times say nothing.")
    print(f"Picture: {args.picture}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )

    def number(name: str, on_gpu: float, on_cpu: float, text: str) -> None:
        parser.add_argument(f"--{name}", type=type(on_cpu), default=on_gpu if hopper else on_cpu, help=text)

    number("layers", 4, 2, "of the model")
    number("hidden", 1024, 128, "columns of the stream")
    number("streams", 1, 1, "side by side, 1, 2 or 4; joined by hyper-connections where there are several")
    number("heads", 64, 4, "of attention")
    number("head-dim", 128, 32, "columns of a head, without those with RoPE")
    number("index-heads", 64, 8, "of an indexer")
    number("index-dim", 128, 64, "columns of an indexer's head")
    number("topk", 512, 16, "keys that a query reads")
    number("length", 4096, 128, "bytes of a window")
    number("batch", 4, 4, "windows a step")
    number("dense-steps", 300, 80, "steps with dense attention")
    number("warmup-steps", 100, 50, "steps in which the indexers alone learn, from dense attention")
    number("sparse-steps", 300, 70, "steps with the selected keys")
    number("measure-every", 50, 25, "steps between measurements of the selection, besides those where a phase begins")
    number("lr", 3e-4, 3e-3, "learning rate")
    number("indexer-lr", 1e-3, 3e-3, "learning rate of the warm-up")
    number("seed", 0, 0, "of the weights and of the windows")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "demo_out/training.png", help="PNG to write")
    args = parser.parse_args(arguments)
    if not 2 * args.topk < args.length:
        parser.error(f"--topk must be below half of --length, {args.length}, got {args.topk}")
    if args.streams not in (1, 2, 4):
        parser.error(f"--streams must be 1, 2 or 4, got {args.streams}")
    if args.streams > 1 and args.hidden % 128 != 0:
        parser.error(f"--hidden must be a multiple of 128 for several streams, got {args.hidden}")
    args.device = torch.device("cuda" if hopper else "cpu")
    return args


def main() -> None:
    args = parse_arguments()
    print(f"device: {dsa_ext.build_info()['device']}; {dsa_ext.build_info()['kernels']}")
    history = train(args)
    draw(history, args.picture)
    print_report(args, history)


if __name__ == "__main__":
    main()
