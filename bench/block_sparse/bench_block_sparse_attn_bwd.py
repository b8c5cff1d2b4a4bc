"""Times dsa::block_sparse_attn_bwd, including its transposed lists; writes its results, with peers' figures, and plot.

Shapes and lists are those of bench_block_sparse_attn.py. TFLOP/s count five matmuls, 10 * 64 * 64 * 128 for each listed
block. Gradients of some rows of every case are checked against the reference in float64 before it is timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.block_sparse.bench_block_sparse_attn import BLOCK, COLUMNS, HEADS, draw, plot, products, self_attention
from bench.common import (
    Case,
    make_case,
    measure_ms,
    peer_figure,
    run,
)
from dsa_ext import reference
from dsa_ext.testing.tolerances import SIMILARITY, similarity_error

OP = "block_sparse_attn_bwd"


@dataclass(frozen=True)
class Spec:
    """One measurement."""

    tokens: int
    sparsity: int  # percent of the blocks that are not listed

    @property
    def group(self) -> str:
        return f"{self.tokens} tokens"

    @property
    def name(self) -> str:
        return f"n{self.tokens}_{self.sparsity}"


def specs() -> Iterator[Spec]:
    for tokens, sparsity in self_attention():
        yield Spec(tokens, sparsity)


def check(tensors: list[Tensor], index: Tensor, number: Tensor, gradients: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest error of dq of the last block of queries, and of dk and dv of the first block of keys."""
    dout, q, k, v, out, lse = tensors
    last = slice(-BLOCK, None)
    last_block = (t[:, :1, last].double() for t in (dout, q))
    row = (out[:, :1, last].double(), lse[:, :1, last].double())
    keys, values = k[:, :1].double(), v[:, :1].double()
    dq, _, _ = reference.block_sparse_attn_bwd(*last_block, keys, values, *row, index[:, :1, -1:], number[:, :1, -1:])
    errors = [similarity_error(gradients[0][:, :1, last], dq)]

    listing = (index[0, 0] == 0).any(-1)
    seeing = (t[:, :1].unflatten(2, (-1, BLOCK))[:, :, listing].flatten(2, 3).double() for t in (dout, q))
    rows = (t[:, :1].unflatten(2, (-1, BLOCK))[:, :, listing].flatten(2, 3).double() for t in (out, lse))
    first = torch.zeros(1, 1, int(listing.sum()), 1, device="cuda", dtype=torch.int32)
    _, dk, dv = reference.block_sparse_attn_bwd(
        *seeing, keys[:, :, :BLOCK], values[:, :, :BLOCK], *rows, first, torch.ones_like(first[..., 0])
    )
    errors += [similarity_error(gradients[i][:, :1, :BLOCK], wanted) for i, wanted in ((1, dk), (2, dv))]
    assert max(errors) <= SIMILARITY, errors
    return max(errors)


@torch.inference_mode()
def measure(spec: Spec, times: dict[str, float]) -> Case:
    generator = torch.Generator("cuda").manual_seed(1)
    (q, k, v), index, number = draw(spec.tokens, spec.tokens, spec.sparsity, generator)
    dout = torch.randn(q.shape, generator=generator, device="cuda", dtype=q.dtype)
    out, lse = torch.ops.dsa.block_sparse_attn_fwd(q, k, v, index, number)
    tensors = [dout, q, k, v, out, lse]
    error = check(tensors, index, number, torch.ops.dsa.block_sparse_attn_bwd(*tensors, index, number))

    ms = measure_ms(lambda: torch.ops.dsa.block_sparse_attn_bwd(*tensors, index, number))
    flop = 5 * products(index)
    peer = None
    if spec.tokens == 23296 and spec.sparsity != 99:
        peer = peer_figure("block_sparse_attention", "bwd", f"{spec.tokens}_{spec.sparsity}pct", flop)
    return make_case(
        spec.name,
        spec.group,
        {"B": 1, "H": HEADS, "Nq": spec.tokens, "Nkv": spec.tokens, "D": COLUMNS, "M": index.shape[3]},
        ms,
        tflops=flop / ms / 1e9,
        peer=peer,
        err={"similarity": error},
    )


if __name__ == "__main__":
    run(OP, __doc__, specs(), measure, plot)
