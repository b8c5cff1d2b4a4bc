"""Trains a small byte-level language model with sparse attention, the way DeepSeek-V3.2 was: dense, warm-up, sparse.

The text is this repository's own documentation, without the last tenth of each file, on which the loss is measured
again (held-out text). First the model learns with dense attention. Then everything but the indexers is frozen, and they
learn to predict attention to all keys (warm-up). Last, queries read only the keys that the indexers select, and
everything learns: the model from the text, the indexers from the keys that they select.
With `--streams` layers are joined by hyper-connections instead of residual connections.

On several GPUs, or processes of a CPU, `torchrun --nproc-per-node 2 examples/train.py`: the ranks divide the
large weights of attention and its queries, and all of them compute everything else.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dsa_ext
from dsa_ext.distributed import parallelize
from dsa_ext.nn import HyperConnection, PagedKVCache, Phase, SparseMLA
from dsa_ext.testing.progress import Progress

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKPOINT = REPOSITORY / "demo_out/model.pt"
BYTES = 256
#: What a checkpoint says of a model besides its weights.
SIZES = ("layers", "hidden", "streams", "heads", "head_dim", "index_heads", "index_dim", "topk", "length")
HELD_OUT_WINDOWS = 16  # of held-out text, at most, in each measurement


class Attention(nn.Module):
    """Returns what attention adds to the stream, and the loss of its indexer."""

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

    def forward(self, x: Tensor, **cached: Any) -> tuple[Tensor, Tensor | None]:
        result = self.attention(self.norm(x), **cached)
        return result.out, result.indexer_loss


class Residual(nn.Module):
    """A residual connection, with the interface of HyperConnection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def read(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def forward(self, x: Tensor, **cached: Any) -> Any:
        result = self.layer(x, **cached)
        return (x + result[0], *result[1:]) if isinstance(result, tuple) else x + result


class Block(nn.Module):
    """Attention and a multilayer perceptron, each connected to the stream or streams."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        mlp = nn.Sequential(
            nn.RMSNorm(args.hidden),
            nn.Linear(args.hidden, 4 * args.hidden),
            nn.GELU(),
            nn.Linear(4 * args.hidden, args.hidden),
        )
        self.attention, self.mlp = (
            Residual(layer) if args.streams == 1 else HyperConnection(layer, args.hidden, args.streams)
            for layer in (Attention(args), mlp)
        )

    def forward(self, x: Tensor, **cached: Any) -> tuple[Tensor, Tensor | None]:
        x, loss = self.attention(x, **cached)
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
        """[B, S, hidden], or [B, S, n, hidden] for several streams."""
        x: Tensor = self.embedding(text)
        return x if self.streams == 1 else x[:, :, None].expand(-1, -1, self.streams, -1)

    def forward(self, text: Tensor, cache: PagedKVCache | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [B, S, 256], and the sum of the indexers' losses: None in the dense phase, and without gradients. With
        a cache `text` has the tokens of its current step."""
        x, losses = self.embed(text), []
        for i, block in enumerate(self.blocks):
            x, loss = block(x) if cache is None else block(x, cache=cache, layer=i)
            losses.append(loss)
        total = None if losses[0] is None else torch.stack(losses).sum()
        return self.head(self.norm(x if self.streams == 1 else x.mean(2))), total

    def enter(self, phase: Phase) -> list[nn.Parameter]:
        """Sets the phase, and returns the parameters that are trained in it."""
        for block in self.blocks:
            block.attention.layer.attention.phase = phase
        for name, parameter in self.named_parameters():
            parameter.requires_grad_({"dense": ".indexer." not in name, "warmup": ".indexer." in name}.get(phase, True))
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def make_cache(self, num_blocks: int, max_sequences: int, max_length: int) -> PagedKVCache:
        layers = [block.attention.layer.attention for block in self.blocks]
        return layers[0].make_cache(len(layers), num_blocks, max_sequences, max_length)

    @torch.no_grad()
    def selection(self, text: Tensor) -> tuple[float, float]:
        """Two figures of the keys that the indexers select: their share of the attention probability of dense
        attention (mass), and the share of the keys with the highest probability that is among them (recall).

        Means over the queries that see at least twice as many keys as they select.
        """
        x, mass, recall = self.embed(text), [], []
        for block in self.blocks:
            layer, inputs = block.attention.layer.attention, block.attention.layer.norm(block.attention.read(x)[0])
            attention, ids = layer.attention_to_all(inputs), layer.select(inputs)
            topk = ids.shape[2]
            selected, attention = ids[:, 2 * topk :].long(), attention[:, 2 * topk :]
            mass.append(attention.gather(2, selected).sum(-1).mean())
            best = attention.topk(topk, dim=-1).indices
            is_selected = torch.zeros_like(attention).scatter_(2, selected, 1)
            recall.append(is_selected.gather(2, best).mean())
            x, _ = block(x)
        return float(torch.stack(mass).mean()), float(torch.stack(recall).mean())

    @torch.no_grad()
    def loss(self, windows: Tensor) -> float:
        """Cross-entropy in nats per byte of windows [N, length + 1], with the attention of the current phase."""
        losses = [language_loss(self(window[None, :-1])[0], window[None, 1:]) for window in windows]
        return float(torch.stack(losses).mean())


def language_loss(logits: Tensor, text: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), text.flatten())


@dataclass
class History:
    """What is measured at each step, and now and then."""

    phases: list[str] = field(default_factory=list)
    language: list[float] = field(default_factory=list)
    indexer: list[float] = field(default_factory=list)  # NaN in the dense phase
    seconds: list[float] = field(default_factory=list)
    # Mass and recall, by the number of steps before the measurement.
    selections: dict[int, tuple[float, float]] = field(default_factory=dict)
    # The number of steps before, and the loss. Where a phase follows another, one value for each.
    held_out: list[tuple[int, float]] = field(default_factory=list)

    def mean(self, values: list[float], phase: str, part: slice) -> float:
        phase_values = [value for value, name in zip(values, self.phases, strict=True) if name == phase][part]
        return sum(phase_values) / max(1, len(phase_values))

    def held_out_ends(self, phase: str) -> tuple[float, float]:
        """The loss on held-out text where the phase begins, and where it ends."""
        first, count = self.phases.index(phase), self.phases.count(phase)
        at_begin = [loss for steps, loss in self.held_out if steps == first]
        at_end = [loss for steps, loss in self.held_out if steps == first + count]
        return at_begin[-1], at_end[0]


def batches(text: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """Random windows of the text [batch, length + 1]."""
    generator = torch.Generator().manual_seed(args.seed)
    while True:
        starts = torch.randint(len(text) - args.length, (args.batch,), generator=generator)
        yield torch.stack([text[start : start + args.length + 1] for start in starts]).to(args.device)


def divided_last(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that every rank has, and those that are divided among the ranks: PyTorch's functions for lists of
    tensors take no mixture."""
    groups: list[list[nn.Parameter]] = [[], []]
    for parameter in parameters:
        groups[isinstance(parameter, DTensor)].append(parameter)
    return [group for group in groups if group]


def clip_gradients(parameters: list[nn.Parameter], max_norm: float) -> None:
    """nn.utils.clip_grad_norm_ for both kinds of parameters."""
    groups = divided_last(parameters)
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def train(args: argparse.Namespace) -> tuple[Model, History]:
    torch.manual_seed(args.seed)
    text, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in read_text())
    windows = held_out.unfold(0, args.length + 1, args.length)
    windows = windows[torch.linspace(0, len(windows) - 1, min(HELD_OUT_WINDOWS, len(windows))).long()].to(args.device)
    model = Model(args).to(args.device, torch.bfloat16 if args.device.type == "cuda" else torch.float32)
    if args.ranks > 1:
        mesh = init_device_mesh(args.device.type, (args.ranks,), mesh_dim_names=("ranks",))
        for block in model.blocks:
            parallelize(block.attention.layer.attention, mesh, tensor="ranks")
    stream, history = batches(text, args), History()
    sample = next(stream)[:, :-1]
    phases: dict[Phase, int] = {"dense": args.dense_steps, "warmup": args.warmup_steps, "sparse": args.sparse_steps}
    progress = Progress(total=sum(phases.values()))
    for phase, steps in phases.items():
        parameters = model.enter(phase)
        groups = [{"params": group} for group in divided_last(parameters)]
        optimizer = torch.optim.AdamW(groups, lr=args.indexer_lr if phase == "warmup" else args.lr)
        for step in range(steps):
            if step == 0 or len(history.phases) % args.measure_every == 0:
                history.selections[len(history.phases)] = model.selection(sample)
                history.held_out.append((len(history.phases), model.loss(windows)))
            begin, window = time.perf_counter(), next(stream)
            logits, indexer = model(window[:, :-1])
            language = language_loss(logits, window[:, 1:])
            optimizer.zero_grad()
            losses = {"dense": [language], "warmup": [indexer], "sparse": [language, indexer]}[phase]
            torch.stack(losses).sum().backward()
            clip_gradients(parameters, 1.0)
            optimizer.step()
            history.language.append(float(language.detach()))
            history.indexer.append(math.nan if indexer is None else float(indexer.detach()) / args.layers)
            history.seconds.append(time.perf_counter() - begin)
            history.phases.append(phase)
            if step % 20 == 0:
                learned = "-" if indexer is None else f"{history.indexer[-1]:.3f}"
                label = f"{phase}: language {history.language[-1]:.2f}, indexer {learned}"
            if args.rank == 0:
                progress.step(label)
        if steps:
            history.held_out.append((len(history.phases), model.loss(windows)))
    history.selections[len(history.phases)] = model.selection(sample)
    return model, history


def save(model: Model, args: argparse.Namespace) -> None:
    """Writes the checkpoint: the model's sizes and its weights, whole ones from each rank's part."""
    weights = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    if args.rank == 0:
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"sizes": {name: getattr(args, name) for name in SIZES}, "weights": weights}, args.checkpoint)


def load(path: Path, device: torch.device) -> tuple[Model, dict[str, int]]:
    """The model of a checkpoint, in the phase "sparse" and in the dtype in which it was trained; and its sizes."""
    saved = torch.load(path, map_location=device, weights_only=True)
    model = Model(argparse.Namespace(**saved["sizes"])).to(device, saved["weights"]["head.weight"].dtype)
    model.load_state_dict(saved["weights"])
    model.enter("sparse")
    return model, saved["sizes"]


def read_text() -> tuple[bytes, bytes]:
    """The text to train on, and the held-out text: the last tenth of each file."""
    paths = [REPOSITORY / "README.md", REPOSITORY / "bench/NOTES.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    texts = [path.read_bytes() for path in paths]
    return b"\n".join(t[: len(t) * 9 // 10] for t in texts), b"\n".join(t[len(t) * 9 // 10 :] for t in texts)


def draw(history: History, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    axes[0].plot(history.language, label="training text")
    axes[0].plot(*zip(*history.held_out, strict=True), marker="o", markersize=3, label="held-out text")
    axes[0].set(title="language loss", xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes[0].legend(loc="lower left")
    axes[1].plot(history.indexer)
    axes[1].set(title="KL divergence of the indexers from attention", xlabel="step", ylim=(0, None))
    axes[1].set(ylabel="nats per query, mean of the layers")
    steps = list(history.selections)
    axes[2].plot(steps, [mass for mass, _ in history.selections.values()], label="mass: attention on the selected keys")
    axes[2].plot(
        steps, [recall for _, recall in history.selections.values()], label="recall: best keys that are selected"
    )
    axes[2].set(title="selected keys, compared with dense attention", xlabel="step", ylim=(0, 1.02))
    axes[2].legend(loc="lower right")
    for axis in axes:
        for i in range(1, len(history.phases)):
            if history.phases[i] != history.phases[i - 1]:
                axis.axvline(i, color="black", linestyle=":", linewidth=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def print_report(args: argparse.Namespace, history: History) -> None:
    layers = f"{args.layers} layers" + (f", {args.streams} streams" if args.streams > 1 else "")
    print(f"\n{layers}, {args.heads} heads, windows of {args.length} bytes, {args.topk} keys per query.\n")
    titles = f"{'training loss':>18}{'held-out loss':>18}{'indexer KL':>20}{'mass':>16}{'recall':>16}"
    print(f"{'phase':<9}{'steps':>6}{titles}{'step':>10}")
    for phase in dict.fromkeys(history.phases):
        first, count = history.phases.index(phase), history.phases.count(phase)
        ends = [
            [history.mean(values, phase, part) for part in (slice(10), slice(-10, None))]
            for values in (history.language, history.indexer)
        ]
        before, after = history.selections[first], history.selections[first + count]
        indexer = "-" if math.isnan(ends[1][0]) else f"{ends[1][0]:.3f} -> {ends[1][1]:.3f}"
        losses = "".join(f"{a:>10.2f} -> {b:.2f}" for a, b in (ends[0], history.held_out_ends(phase)))
        shares = "".join(f"{a:>8.0%} -> {b:>4.0%}" for a, b in zip(before, after, strict=True))
        seconds = history.mean(history.seconds, phase, slice(None))
        print(f"{phase:<9}{count:>6}{losses}{indexer:>20}{shares}{seconds:>8.2f} s")
    print(
        "\nLosses are in nats per byte. training loss, indexer KL: means of the first and of the last ten steps of a\n"
        "phase. held-out loss: at its begin and end, on text that is not trained on; a training loss far below it\n"
        "means that the model memorizes. mass: share of the attention probability of dense attention that falls on\n"
        "the keys that the indexers select; recall: share of the keys with the highest probability that is selected."
    )
    if args.device.type != "cuda":
        print("Without a Hopper GPU the operators run their reference implementations: the step times mean nothing.")
    print(f"Picture: {args.picture}. Checkpoint, for examples/generate.py: {args.checkpoint}")
    print("Look at the second dotted line: selection begins there, and if mass is high the held-out loss hardly jumps.")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )

    def number(name: str, on_gpu: float, on_cpu: float, text: str) -> None:
        parser.add_argument(f"--{name}", type=type(on_cpu), default=on_gpu if hopper else on_cpu, help=text)

    number("layers", 4, 2, "of the model")
    number("hidden", 1024, 128, "columns of the stream")
    number("streams", 1, 1, "of the hidden state, 1, 2 or 4; hyper-connections join several")
    number("heads", 64, 4, "of attention")
    number("head-dim", 128, 32, "columns of a head, without its RoPE columns")
    number("index-heads", 64, 8, "of an indexer")
    number("index-dim", 128, 64, "columns of a head of an indexer")
    number("topk", 512, 16, "keys that a query reads")
    number("length", 4096, 128, "bytes of a window")
    number("batch", 4, 4, "windows per step")
    number("dense-steps", 300, 80, "steps with dense attention")
    number("warmup-steps", 100, 50, "steps in which only the indexers are trained, on dense attention")
    number("sparse-steps", 300, 70, "steps with the selected keys")
    number("measure-every", 50, 25, "steps between measurements of the selection and of the held-out loss")
    number("lr", 3e-4, 3e-3, "learning rate")
    number("indexer-lr", 1e-3, 3e-3, "learning rate of the warm-up")
    number("seed", 0, 0, "of the weights and of the windows")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "demo_out/training.png", help="PNG to write")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="of the trained model, to write")
    args = parser.parse_args(arguments)
    if not 2 * args.topk < args.length:
        parser.error(f"--topk must be below half of --length, {args.length}, got {args.topk}")
    if args.streams not in (1, 2, 4):
        parser.error(f"--streams must be 1, 2 or 4, got {args.streams}")
    if args.streams > 1 and args.hidden % 128 != 0:
        parser.error(f"--hidden must be a multiple of 128 for several streams, got {args.hidden}")
    held_out = len(read_text()[1])
    if not args.length < held_out:
        parser.error(f"--length must be below the size of the held-out text, {held_out} bytes, got {args.length}")
    args.rank, args.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    args.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if hopper else torch.device("cpu")
    if args.heads % args.ranks != 0:
        parser.error(f"--heads must be a multiple of the {args.ranks} ranks, got {args.heads}")
    return args


def main() -> None:
    args = parse_arguments()
    if args.device.type == "cuda":
        torch.cuda.set_device(args.device)
    if args.ranks > 1:
        torch.distributed.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    if args.rank == 0:
        ranks = f", {args.ranks} ranks" if args.ranks > 1 else ""
        print(f"device: {dsa_ext.build_info()['device']}; {dsa_ext.build_info()['kernels']}{ranks}")
    model, history = train(args)
    save(model, args)
    if args.rank == 0:
        draw(history, args.picture)
        print_report(args, history)
    if args.ranks > 1:
        # Ranks wait for the first one's picture. Until then Gloo's threads have released the tensors of the last
        # collective, which must not be after the interpreter's end. A monitored barrier does not run on these threads.
        is_gloo = torch.distributed.get_backend() == "gloo"
        (torch.distributed.monitored_barrier if is_gloo else torch.distributed.barrier)()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
