"""SparseMLA on several GPUs, with NCCL, against one."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dsa_ext.distributed import parallelize
from dsa_ext.nn import SparseMLA
from dsa_ext.testing.tolerances import similarity_error

pytestmark = pytest.mark.gpu
HIDDEN, SEQ = 512, 1001
#: Of outputs and gradients: products and sums that are divided otherwise are rounded to bf16 at other places, and a few
#: keys with nearly equal scores are exchanged.
SIMILARITY = 2e-3


def make_layer(phase: Any = "sparse") -> SparseMLA:
    torch.manual_seed(0)
    indexer = {"heads": 16, "head_dim": 64, "precision": "bf16"}
    layer = SparseMLA(HIDDEN, 16, q_lora_rank=256, topk=200, indexer=indexer, phase=phase)
    return layer.to("cuda", torch.bfloat16)


def make_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x, dout = (torch.randn(2, SEQ, HIDDEN, device="cuda", generator=generator) for _ in range(2))
    return x.bfloat16(), dout.bfloat16()


def step(layer: Any, x: Tensor, dout: Tensor, checkpointed: bool = False, **options: Any) -> list[Tensor]:
    """The output, the loss if there is one, and the gradient of x; those of the parameters are in their grad."""
    x = x.detach().requires_grad_()
    call = (lambda x: checkpoint(layer, x, use_reentrant=False, **options)) if checkpointed else layer
    out, loss, _ = call(x) if checkpointed else call(x, **options)
    layer.zero_grad()
    torch.autograd.backward([out] if loss is None else [out, loss], [dout] if loss is None else [dout, None])
    return [out.detach(), *([] if loss is None else [loss.detach()]), x.grad]


def run(rank: int, ranks: int, way: str, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("ranks",))
        for phase in ("sparse", "warmup", "dense"):
            compare(way, phase, mesh)
    finally:
        dist.destroy_process_group()
    os._exit(0)


def compare(way: str, phase: str, mesh: Any) -> None:
    x, dout = make_rows()
    whole = make_layer(phase)
    expected = step(whole, x, dout)
    parallel: Any = parallelize(make_layer(phase), mesh, **{way: "ranks"})
    rows = parallel.rows_of_rank(SEQ).cuda()
    own = x[:, rows], dout[:, rows]
    got = step(parallel, *own, seq_len=SEQ)

    def close(name: str, a: Tensor, b: Tensor) -> None:
        error = similarity_error(a, b) if b.dim() else abs(float(a) / float(b) - 1)
        assert error <= SIMILARITY, f"{way}, {phase}, {name}: {error}"

    close("out", got[0], expected[0][:, rows])
    if len(expected) > 2:
        close("loss", got[1], expected[1])
    close("x.grad", got[-1], expected[-1][:, rows])
    for (name, p), q in zip(whole.named_parameters(), parallel.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is None:
            continue
        gradient = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad.clone()
        if way == "context":
            dist.all_reduce(gradient)
        close(name, gradient, p.grad)
    # Outputs are repeatable, also with activation checkpointing and in a stream of one's own.
    assert torch.equal(step(parallel, *own, checkpointed=True, seq_len=SEQ)[0], got[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = step(parallel, *own, seq_len=SEQ)[0]
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(again, got[0])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("way", ["tensor", "context"])
def test_like_one_gpu(way: str, ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, there are {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(run, (ranks, way, str(tmp_path)), nprocs=ranks)
