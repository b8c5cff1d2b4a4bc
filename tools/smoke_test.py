"""Tries an installed dsa_ext: that it loads, computes, differentiates and compiles. `python tools/smoke_test.py`.

It needs no GPU and no other package than torch. On a Hopper GPU the kernels are compared with the CPU implementation.
"""

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa_ext

QUERIES, KEYS, HEADS, D_QK, D_V, TOPK = 5, 40, 4, 576, 512, 8


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, QUERIES, HEADS, D_QK, generator=generator)
    kv = torch.randn(1, KEYS, 1, D_QK, generator=generator)
    indices = torch.stack([torch.randperm(KEYS, generator=generator)[:TOPK] for _ in range(QUERIES)])
    return q, kv, indices.sort().values.int()[None, :, None]


def attention(q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
    """What sparse_mla_fwd should return, in a few lines, for queries that see all keys."""
    keys = kv[0, indices[0].long(), 0][:, 0]  # [S, K, d_qk]
    p = (torch.einsum("shd,skd->shk", q[0], keys) * D_QK**-0.5).softmax(-1)
    return torch.einsum("shk,skd->shd", p, keys[..., :D_V])[None]


def forward_and_backward() -> None:
    inputs = make_inputs()
    out, lse = torch.ops.dsa.sparse_mla_fwd(*inputs, causal=False)
    assert lse.shape == (1, QUERIES, HEADS)
    torch.testing.assert_close(out, attention(*inputs), atol=1e-4, rtol=1e-4)

    gradients = []
    for function in (lambda *x: torch.ops.dsa.sparse_mla_fwd(*x, causal=False)[0], attention):
        q, kv = (x.clone().requires_grad_() for x in inputs[:2])
        function(q, kv, inputs[2]).square().sum().backward()
        gradients.append((q.grad, kv.grad))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def compiled() -> None:
    def call(q: Tensor, kv: Tensor, indices: Tensor) -> Tensor:
        return dsa_ext.sparse_mla(q * 2, kv, indices, causal=False) + 1

    inputs = make_inputs()
    graph = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(graph(*inputs), call(*inputs))
    with FakeTensorMode():
        out = dsa_ext.sparse_mla(
            torch.empty(1, QUERIES, HEADS, D_QK, device="cuda", dtype=torch.bfloat16),
            torch.empty(1, KEYS, 1, D_QK, device="cuda", dtype=torch.bfloat16),
            torch.empty(1, QUERIES, 1, TOPK, device="cuda", dtype=torch.int32),
        )
    assert (out.shape, out.device.type, out.dtype) == ((1, QUERIES, HEADS, D_V), "cuda", torch.bfloat16)


def library() -> None:
    """The compiled library takes calls from this torch: its checks run without a GPU."""
    assert Path(dsa_ext.build_info()["library"]).is_file(), dsa_ext.build_info()["library"]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    message = ""
    try:
        torch.ops.dsa.sparse_mla_fwd.default.redispatch(keys, *make_inputs())
    except RuntimeError as error:
        message = str(error)
    assert "dsa::sparse_mla_fwd: " in message, f"no error of the library, but {message!r}"
    assert "without its CUDA kernels" not in message, message


def kernel() -> None:
    q, kv, indices = make_inputs()
    inputs = q.bfloat16(), kv.bfloat16(), indices
    expected = dsa_ext.sparse_mla(*inputs, causal=False)
    on_gpu = [x.cuda() for x in inputs]
    for x in on_gpu[:2]:
        x.requires_grad_()
    out = dsa_ext.sparse_mla(*on_gpu, causal=False)
    torch.testing.assert_close(out.cpu(), expected, atol=2e-2, rtol=2e-2)
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in on_gpu[:2])


def main() -> None:
    printed = subprocess.check_output([sys.executable, "-m", "dsa_ext"], text=True)
    assert torch.__version__ in printed
    print(printed, end="")
    checks = [library, forward_and_backward, compiled]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        checks.append(kernel)
    for check in checks:
        check()
        print(f"{check.__name__.replace('_', ' ')}: passed", flush=True)


if __name__ == "__main__":
    main()
