"""Calls and modules for tests of the modes of PyTorch in which they are used."""

from collections.abc import Callable
from typing import Any

import torch
from layouts import call as call
from torch import Tensor

from dsa_ext.nn import BlockSparseAttention, FP8Linear, HyperConnection, LightningIndexer, Phase, SparseMLA
from dsa_ext.testing.calls import ORDINARY

Args = dict[str, Any]


def real(args: Args) -> list[str]:
    """Names of the tensors that may require a gradient: bf16 or wider."""
    return [n for n, t in args.items() if isinstance(t, Tensor) and t.is_floating_point() and t.element_size() > 1]


#: The differentiable operators, and the operator that the error of a second derivative names.
DIFFERENTIABLE = {
    "sparse_mla_fwd": "sparse_mla_bwd",
    "sparse_mla_max_fwd": "sparse_mla_bwd",
    "sparse_mha_fwd": "sparse_mha_bwd",
    "indexer_logits": "indexer_logits_bwd",
    "indexer_scores": "indexer_scores_bwd",
    "indexer_loss": "indexer_loss",
    "indexer_dense_loss": "indexer_dense_loss",
    "block_sparse_attn_fwd": "block_sparse_attn_bwd",
    "coarse_attn_fwd": "block_sparse_attn_bwd",
    "gated_fusion_fwd": "gated_fusion_bwd",
    "mhc_pre_fwd": "mhc_pre_bwd",
    "mhc_post_fwd": "mhc_post_bwd",
}
#: Operators with gradients for only some of their floating-point arguments.
LEAVES = {"indexer_loss": ["scores"], "indexer_dense_loss": ["q", "k", "weights"]}


def on(device: str, args: Args) -> Args:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in args.items()}


def with_leaves(op: str, device: str = "cpu") -> tuple[Args, list[str]]:
    """Arguments that require gradients, and their names."""
    args = on(device, ORDINARY[op]())
    names = LEAVES.get(op, real(args))
    for name in names:
        args[name] = args[name].detach().requires_grad_()
    return args, names


def total(results: tuple[Tensor, ...]) -> Tensor:
    """Linear in all results with a gradient, so that the incoming gradient is a constant without a graph."""
    return torch.stack([t.float().sum() for t in results if t.requires_grad]).sum()


INDEXER: Args = {"heads": 8, "head_dim": 64}


def make_sparse_mla(phase: Phase) -> SparseMLA:
    indexer = INDEXER | {"precision": "bf16", "hadamard": True}
    return SparseMLA(48, 4, q_lora_rank=32, nope_dim=16, v_dim=24, topk=80, phase=phase, indexer=indexer)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "SparseMLA, dense": lambda: make_sparse_mla("dense"),
    "SparseMLA, warmup": lambda: make_sparse_mla("warmup"),
    "SparseMLA, sparse": lambda: make_sparse_mla("sparse"),
    "LightningIndexer": lambda: LightningIndexer(48, 48, **INDEXER),
    "LightningIndexer with hadamard": lambda: LightningIndexer(48, 48, **INDEXER, hadamard=True),
    "BlockSparseAttention": lambda: BlockSparseAttention(48, 2, head_dim=64),
    "HyperConnection": lambda: HyperConnection(torch.nn.Linear(128, 128), 128),
    "HyperConnection with a norm": lambda: HyperConnection(torch.nn.LayerNorm(128), 128),
    "FP8Linear": lambda: FP8Linear(torch.nn.Linear(128, 200)),
}


def make_module(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def results_of(module: torch.nn.Module, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    """The floating-point results of an ordinary input."""
    shape = {HyperConnection: (2, 70, 4, 128), FP8Linear: (2, 70, 128)}.get(type(module), (2, 70, 48))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    results = module(x, x) if isinstance(module, LightningIndexer) else module(x)
    results = results if isinstance(results, tuple) else (results,)
    return tuple(result for result in results if result is not None and result.is_floating_point())


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
