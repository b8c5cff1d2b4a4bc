"""Layers and meshes for tests of dsa_ext.distributed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dsa_ext.nn import SparseMLA

HIDDEN, HEADS, BATCH = 48, 12, 2


def make_layer(phase: Any = "sparse", **options: Any) -> SparseMLA:
    torch.manual_seed(0)
    indexer = {"heads": 16, "head_dim": 64, "precision": "bf16", **options.pop("indexer", {})}
    sizes = {"q_lora_rank": 32, "nope_dim": 16, "v_dim": 24, "topk": 5, **options}
    return SparseMLA(HIDDEN, HEADS, **sizes, indexer=indexer, phase=phase, dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def one_rank(call: Any) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        call(init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
    finally:
        dist.destroy_process_group()
