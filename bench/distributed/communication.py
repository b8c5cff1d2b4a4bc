"""Bytes that a rank sends in a training step of a layer with the sizes of DeepSeek-V3.2, and the time that they take
without overlap. As a program, prints a table of predicted steps.

Bandwidths out of each GPU: 231 GB/s were measured between two H200s (an all-gather of 128 MB; an all-to-all has 240).
Between hosts 45 GB/s are assumed: a network card of 400 Gbit/s for each GPU.
"""

import json
from pathlib import Path

HIDDEN, HEADS, Q_LATENT, NOPE, VALUE, LATENT, ROPE = 7168, 128, 1536, 128, 128, 512, 64
INDEX_HEADS, INDEX_COLUMNS = 64, 128
#: Elements of the weights that are divided along `tensor`, and of the others.
DIVIDED = HEADS * (Q_LATENT * (NOPE + ROPE) + LATENT * (NOPE + VALUE) + VALUE * HIDDEN)
REPLICATED = HIDDEN * (Q_LATENT + LATENT + ROPE + INDEX_COLUMNS + INDEX_HEADS) + Q_LATENT * INDEX_HEADS * INDEX_COLUMNS
NVLINK, NETWORK = 231.0, 45.0  # GB/s
BF16 = 2  # bytes
KEYS = "latent keys, the indexer's keys: all-gather, all-to-all"
OUTPUTS = "output, gradient of the input: all-gather"

WHOLE = Path(__file__).parent.parent / "results" / "h200" / "distributed.json"


def sent_bytes(way: str, tokens: int, ranks: int) -> dict[str, float]:
    """By collective, in the forward and in the backward together, for a sequence of so many tokens that `ranks` divide
    along "tensor" or "context"."""
    elements = {
        KEYS: 2 * tokens * (LATENT + ROPE + INDEX_COLUMNS),
        **{
            "tensor": {
                "divided weights: all-gather, all-to-all": 2 * DIVIDED,
                OUTPUTS: 2 * tokens * HIDDEN,
                "gradients of other weights: all-to-all, all-gather": 2 * REPLICATED,
            },
            "context": {"gradients of weights: all-reduce": 2 * (DIVIDED + REPLICATED)},
        }[way],
    }
    return {name: BF16 * count * (ranks - 1) / ranks for name, count in elements.items()}


def collectives_ms(way: str, tokens: int, ranks: int, bandwidth: float = NVLINK) -> float:
    """Milliseconds of all collectives of a step, one after the other."""
    return sum(sent_bytes(way, tokens, ranks).values()) / bandwidth / 1e6


def predicted_ms(whole_ms: float, way: str, tokens: int, ranks: int) -> float:
    """Milliseconds of a step on `ranks` GPUs of a host, of which one takes `whole_ms`."""
    return whole_ms / ranks + collectives_ms(way, tokens, ranks)


def main() -> None:
    """Predicts steps on 8 GPUs of a host, and on 8 such hosts: along `context` between hosts, `tensor` within each."""
    print("| tokens | one GPU, measured | 8 GPUs, `tensor` | 8 GPUs, `context` | 64 GPUs, both |")
    print("| --- | --- | --- | --- | --- |")
    for case in json.loads(WHOLE.read_text())["cases"]:
        if not case["name"].endswith("whole"):
            continue
        tokens, ms = case["args"]["S"], case["ms"]
        tensor, context = (predicted_ms(ms, way, tokens, 8) for way in ("tensor", "context"))
        # Between hosts: the keys of all ranks, and the sum of the gradients of the weights that a GPU holds.
        keys = sent_bytes("context", tokens, 8)[KEYS]
        gradients = 2 * BF16 * (DIVIDED / 8 + REPLICATED) * 7 / 8
        between = (keys + gradients) / NETWORK / 1e6
        within = collectives_ms("tensor", tokens // 8, 8)
        cells = [tensor, context, ms / 64 + within + between]
        print(f"| {tokens} | {ms:.0f} ms | " + " | ".join(f"{cell:.1f} ms" for cell in cells) + " |")


if __name__ == "__main__":
    main()
