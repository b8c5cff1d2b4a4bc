"""Modes of PyTorch and of CUDA in which operators and modules may be used, on a GPU: concurrent streams, graphs with
branches, expandable segments, a second GPU, autocast, the deterministic switch, derivatives that do not exist."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from layouts import call
from modes import DIFFERENTIABLE, MODULES, Args, make_module, on, results_of, total, with_leaves
from torch import Tensor
from torch.autograd import forward_ad

import dsa_ext
from dsa_ext import ops
from dsa_ext.nn import FP8Linear
from dsa_ext.testing.calls import ORDINARY
from dsa_ext.testing.tolerances import bits

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
all_operators = pytest.mark.parametrize("op", ops.OPERATORS)
#: Sizes at which operators split their work and use a workspace.
SIZES: dict[str, Args] = {
    "sparse_mla_fwd": {"heads": 64, "seq": 6, "s_kv": 1500, "topk": 1000},
    "sparse_mla_bwd": {"heads": 64, "seq": 6, "s_kv": 1500, "topk": 1000},
    "attn_dist": {"heads": 128, "seq": 6, "s_kv": 1500, "topk": 1000},
    "block_sparse_attn_fwd": {"n_q": 400, "n_kv": 900, "dim": 128},
    "block_sparse_attn_bwd": {"n_q": 400, "n_kv": 900, "dim": 128},
    "coarse_attn_fwd": {"n_q": 900, "n_kv": 300},
    "indexer_logits": {"seq": 100, "s_kv": 3000, "heads": 64, "dim": 128},
    "indexer_topk": {"seq": 100, "s_kv": 9000, "heads": 64, "dim": 128},
    "indexer_logits_bwd": {"seq": 100, "s_kv": 3000, "heads": 64, "dim": 128},
    "indexer_scores": {"seq": 100, "s_kv": 3000, "slots": 500},
    "indexer_scores_bwd": {"seq": 100, "s_kv": 3000, "slots": 500},
    "indexer_loss": {"rows": 300, "slots": 2000},
    "indexer_dense_loss": {"seq": 100, "s_kv": 400},
    "topk_select": {"rows": 3, "columns": 100_000},
    "fp8_gemm": {"rows": 64, "width": 4096, "columns": 1024},
    "mhc_pre_fwd": {"tokens": 300, "columns": 1024},
    "mhc_pre_bwd": {"tokens": 300, "columns": 1024},
    "mhc_post_fwd": {"tokens": 300, "columns": 1024},
    "mhc_post_bwd": {"tokens": 300, "columns": 1024},
}


def two_calls(op: str) -> list[Args]:
    """A call with enough work, and the same call with other values."""
    args = on(DEVICE, ORDINARY[op](**SIZES.get(op, {})))
    first = next(name for name, value in args.items() if isinstance(value, Tensor))
    plain = args[first].view(torch.uint8) if args[first].element_size() == 1 else args[first]
    return [args, args | {first: plain.flip(-1).view(args[first].dtype)}]


def assert_same_bits(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        a, b = (t.view(torch.uint8) if t.element_size() == 1 else bits(t.contiguous()) for t in (a, b))
        assert torch.equal(a, b)


@all_operators
def test_two_streams(op: str, deterministic_algorithms: None) -> None:
    """Concurrent calls, each with a workspace of its own."""
    calls = two_calls(op)
    expected = [call(op, args) for args in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, ...]]] = [[], []]
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # so that all calls are queued before the first one runs
    for _ in range(20):
        for stream, args, several in zip(streams, calls, results, strict=True):
            with torch.cuda.stream(stream):
                several.append(call(op, args))
    torch.cuda.synchronize()
    for several, alone in zip(results, expected, strict=True):
        for result in several:
            assert_same_bits(result, alone)


@all_operators
def test_graph_with_two_branches(op: str, deterministic_algorithms: None) -> None:
    calls = two_calls(op)
    expected = [call(op, args) for args in calls]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        first = call(op, calls[0])
        with torch.cuda.stream(side):
            second = call(op, calls[1])
        main.wait_stream(side)
    for _ in range(5):
        for result in (*first, *second):
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(first, expected[0])
        assert_same_bits(second, expected[1])


def digests(device: str) -> dict[str, str]:
    """Digests of the results and gradients of every operator."""
    made = {}
    for op in ops.OPERATORS:
        results = call(op, on(device, ORDINARY[op]()))
        if op in DIFFERENTIABLE:
            args, names = with_leaves(op, device)
            results += torch.autograd.grad(total(call(op, args)), [args[name] for name in names])
        contents = b"".join(t.detach().flatten().view(torch.uint8).cpu().numpy().tobytes() for t in results)
        made[op] = hashlib.sha256(contents).hexdigest()
    return made


def test_expandable_segments(deterministic_algorithms: None) -> None:
    """With expandable segments of the allocator, results are bitwise equal."""
    option = "expandable_segments:True"
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    environment = os.environ | dict.fromkeys(names, option)
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == repr(digests(DEVICE))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}")
@all_operators
def test_second_gpu(op: str, deterministic_algorithms: None) -> None:
    """The operator runs on the device of its arguments, whichever GPU is the current one."""
    args = two_calls(op)[0]
    expected = call(op, on("cuda:0", args))
    with torch.cuda.device(0):
        there = on("cuda:1", args)
        for _ in range(2):
            got = call(op, there)
        assert torch.cuda.current_device() == 0
    assert {result.device for result in got} == {torch.device("cuda:1")}
    assert_same_bits(tuple(result.cpu() for result in got), tuple(result.cpu() for result in expected))
    if op in DIFFERENTIABLE:
        leaves, names = with_leaves(op, "cuda:1")
        gradients = torch.autograd.grad(total(call(op, leaves)), [leaves[name] for name in names])
        assert {gradient.device for gradient in gradients} == {torch.device("cuda:1")}


# ---- autocast


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_modules_under_autocast(name: str, dtype: torch.dtype) -> None:
    """A module in bf16, and one with fp32 weights and bf16 activations, against fp32 on the CPU."""
    module = make_module(name)
    expected = results_of(module)
    module.to(DEVICE)
    if not isinstance(module, FP8Linear):
        module.to(dtype)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = results_of(module, dtype, DEVICE)
    for a, b in zip(got, expected, strict=True):
        assert (a.cpu().float() - b.float()).norm() <= 0.1 * b.float().norm()
    if isinstance(module, FP8Linear):
        return
    total(got).backward()
    for parameter_name, parameter in module.named_parameters():
        if parameter.grad is None:
            assert name == "SparseMLA, dense", parameter_name
        else:
            assert parameter.grad.dtype == dtype, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name


def test_autocast_in_a_compiled_graph() -> None:
    torch._dynamo.reset()
    args = on(DEVICE, ORDINARY["sparse_mla_fwd"]())
    wide = args | {name: args[name].float() for name in ("q", "kv")}

    @torch.compile(fullgraph=True)
    def attend(args: Args) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return dsa_ext.sparse_mla(**args)

    assert torch.equal(attend(wide), dsa_ext.sparse_mla(**args))


# ---- the deterministic switch


def test_the_dense_loss_is_repeatable(deterministic_algorithms: None) -> None:
    """An operator that it calls sums the gradient of k, over very many queries for few keys."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    seq, s_kv, index_heads = 4000, 300, 64
    leaves = [normal(seq, index_heads, 128).bfloat16(), normal(s_kv, 128).bfloat16(), normal(seq, index_heads)]
    args = [t.requires_grad_() for t in leaves]
    main = normal(seq, 16, 576).bfloat16(), normal(s_kv, 576).bfloat16(), torch.full((seq, 16), 9.0, device=DEVICE)
    runs = []
    for _ in range(5):
        loss = dsa_ext.indexer_dense_loss(*args, *main, causal=False, reduction="sum")
        runs.append(torch.autograd.grad(loss, args))
    for gradients in runs[1:]:
        assert_same_bits(gradients, runs[0])


@pytest.mark.parametrize("op", ["sparse_mla_bwd", "indexer_logits_bwd", "indexer_scores_bwd"])
def test_the_switch_without_autograd(op: str, deterministic_algorithms: None) -> None:
    args = two_calls(op)[0]
    expected = call(op, args | {"deterministic": True})
    for mode in (torch.no_grad, torch.inference_mode, torch._C._AutoDispatchBelowAutograd):
        with mode():
            inside = {name: value.clone() if isinstance(value, Tensor) else value for name, value in args.items()}
            assert_same_bits(call(op, inside), expected)


# ---- derivatives that do not exist


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_derivatives_that_do_not_exist(op: str) -> None:
    args, names = with_leaves(op, DEVICE)
    for name in names:
        (gradient,) = torch.autograd.grad(total(call(op, args)), args[name], create_graph=True)
        loss = gradient.float().square().sum() + args[name].float().sum()
        with pytest.raises(RuntimeError, match=f"^dsa::{DIFFERENTIABLE[op]}: second derivatives"):
            loss.backward()
        primal = args[name].detach()
        with forward_ad.dual_level():
            dual = args | {name: forward_ad.make_dual(primal, torch.ones_like(primal))}
            with pytest.raises(RuntimeError, match=f"^dsa::{op}: forward-mode"):
                call(op, dual)


@contextmanager
def little_memory() -> Iterator[None]:
    """No memory but 4 MiB is left for this process, neither on the GPU nor in the allocator's free blocks."""
    torch.cuda.empty_cache()
    _, everything = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / everything)
    held = []
    try:
        for level in range(37, 21, -1):
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(2**level, dtype=torch.uint8, device=DEVICE))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_memory_that_is_short_is_named() -> None:
    args = on(DEVICE, ORDINARY["sparse_mla_fwd"](heads=128, seq=2048, topk=8))
    expected = r"CUDA out of memory: no room for bfloat16 \[1, 2048, 128, 512\] on"
    with little_memory(), pytest.raises(RuntimeError, match=expected):
        torch.ops.dsa.sparse_mla_fwd(**args)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    print(repr(digests(DEVICE)))
