"""Trains a DeepSeek-V3.2 model of Hugging Face transformers on text, with sparse attention and an indexer that learns.

The model is small and randomly initialized, but its attention has the sizes of DeepSeek-V3.2: a latent of 512 columns
and 64 with RoPE. Its tokens are the bytes of this repository's documentation. One call, `enable`, puts its attention on
the operators of dsa_ext; all else is transformers' own. The same training is run once more without the loss of the
indexers: attention becomes less uniform while the model learns, so that an indexer that does not learn falls behind.
"""

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train import BYTES, HELD_OUT_WINDOWS, REPOSITORY, batches, read_text
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

import dsa_ext
from dsa_ext.integrations.transformers import enable
from dsa_ext.testing.progress import Progress


@dataclass
class History:
    language: list[float] = field(default_factory=list)  # nats per byte, by step
    indexer: list[float] = field(default_factory=list)  # nats per query, mean of the layers, by step
    held_out: dict[int, float] = field(default_factory=dict)  # by the number of steps before


def make_model(args: argparse.Namespace) -> Any:
    torch.manual_seed(args.seed)
    config = DeepseekV32Config(
        vocab_size=BYTES,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        moe_intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=args.hidden // 2,
        qk_nope_head_dim=args.head_dim,
        v_head_dim=args.head_dim,
        index_n_heads=args.index_heads,
        index_head_dim=args.index_dim,
        index_topk=args.topk,
        max_position_embeddings=args.length,
    )
    return DeepseekV32ForCausalLM(config).to(args.device, torch.bfloat16 if args.device.type == "cuda" else None)


def train(args: argparse.Namespace, progress: Progress, loss_coeff: float) -> History:
    text, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in read_text())
    windows = held_out.unfold(0, args.length, args.length)[:HELD_OUT_WINDOWS].to(args.device)
    model, stream, history = make_model(args), batches(text, args), History()
    handle = enable(model, train_indexer=True, loss_coeff=loss_coeff)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        if step % args.measure_every == 0:
            history.held_out[step] = measure(model, windows)
        window = next(stream)[:, :-1]
        loss = model(window, labels=window, use_cache=False).loss  # includes loss_coeff times the indexers'
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        indexer = handle.indexer_loss().detach()
        history.language.append(float(loss.detach() - loss_coeff * indexer))
        history.indexer.append(float(indexer))
        progress.step(f"language {history.language[-1]:.2f}, indexer {history.indexer[-1]:.3f}")
    history.held_out[args.steps] = measure(model, windows)
    return history


@torch.no_grad()
def measure(model: Any, windows: Tensor) -> float:
    """Loss on held-out text, in nats per byte."""
    losses = [model(window[None], labels=window[None], use_cache=False).loss for window in windows]
    return float(torch.stack(losses).mean())


def draw(history: History, baseline: History, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    axes[0].plot(history.language, label="training text")
    axes[0].plot(list(history.held_out), list(history.held_out.values()), marker="o", markersize=3, label="held-out")
    axes[0].set(title="language loss", xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes[0].legend(loc="lower left")
    axes[1].plot(baseline.indexer, color="#9aa5b1", label="indexers that do not learn")
    axes[1].plot(history.indexer, label="indexers that learn")
    axes[1].legend(loc="upper left")
    axes[1].set(title="KL divergence of the indexers from attention", xlabel="step", ylim=(0, None))
    axes[1].set(ylabel="nats per query, mean of the layers")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )

    def number(name: str, on_gpu: float, on_cpu: float, text: str) -> None:
        parser.add_argument(f"--{name}", type=type(on_cpu), default=on_gpu if hopper else on_cpu, help=text)

    number("layers", 4, 2, "of the model")
    number("hidden", 1024, 64, "columns of the hidden state")
    number("heads", 64, 4, "of attention")
    number("head-dim", 128, 32, "columns of a head, without its RoPE columns")
    number("index-heads", 64, 8, "of an indexer")
    number("index-dim", 128, 64, "columns of a head of an indexer")
    number("topk", 512, 16, "keys that a query reads")
    number("length", 4096, 96, "bytes of a window")
    number("batch", 4, 2, "windows per step")
    number("steps", 300, 50, "of training")
    number("measure-every", 50, 20, "steps between measurements on held-out text")
    number("lr", 3e-4, 2e-3, "learning rate")
    number("seed", 0, 0, "of the weights and of the windows")
    parser.add_argument("--picture", type=Path, default=REPOSITORY / "demo_out/finetune.png", help="PNG to write")
    args = parser.parse_args(arguments)
    args.device = torch.device("cuda" if hopper else "cpu")
    return args


def main() -> None:
    args = parse_arguments()
    print(f"device: {dsa_ext.build_info()['device']}; {dsa_ext.build_info()['kernels']}")
    progress = Progress(total=2 * args.steps)
    history, baseline = (train(args, progress, loss_coeff) for loss_coeff in (1.0, 0.0))
    draw(history, baseline, args.picture)
    held_out = list(history.held_out.values())
    print(f"held-out loss: {held_out[0]:.2f} -> {held_out[-1]:.2f} nats per byte")
    last, without = (statistics.fmean(h.indexer[-10:]) for h in (history, baseline))
    print(
        f"KL divergence of the indexers in the last ten steps: {last:.3f}, of indexers that do not learn {without:.3f}"
    )
    print(f"Picture: {args.picture}. Look at the right half: only indexers that learn follow attention as it changes.")


if __name__ == "__main__":
    main()
