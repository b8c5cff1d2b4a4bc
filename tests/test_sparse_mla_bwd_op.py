"""torch.ops.dsa.sparse_mla_bwd as an operator: errors and fake tensors. All without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import callers

from dsa_ext.testing.inputs import make_inputs

OP = torch.ops.dsa.sparse_mla_bwd.default
native, cpu, fake = callers("sparse_mla_bwd")
B, S, S_KV, H, G, K, D, DV = 1, 4, 16, 8, 1, 5, 576, 512
TENSORS = ("dout", "q", "kv", "out", "lse", "indices")


def arguments(**changes: Any) -> dict[str, Any]:
    """Valid arguments of small size, bf16, with every tensor given."""
    inputs = make_inputs(B, S, S_KV, H, G, K, D)
    out, lse = torch.ops.dsa.sparse_mla_fwd(inputs.q, inputs.kv, inputs.indices)
    return {
        "dout": torch.ones_like(out),
        "q": inputs.q,
        "kv": inputs.kv,
        "out": out,
        "lse": lse,
        "indices": inputs.indices,
        "topk_length": torch.full((B, S), K, dtype=torch.int32),
        "attn_sink": torch.zeros(H),
        "dlse": torch.ones_like(lse),
        **changes,
    }


ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"dout": torch.zeros(B, S, H, D).bfloat16()},
        "dout must be bfloat16 [B=1, S=4, H=8, Dv=512], got bfloat16 [1, 4, 8, 576]",
    ),
    ({"dout": torch.zeros(B, S, H, DV)}, "dout must be bfloat16 [B, S, H, Dv], got float32 [1, 4, 8, 512]"),
    ({"out": torch.zeros(B, S, DV).bfloat16()}, "out must be bfloat16 [B, S, H, Dv], got bfloat16 [1, 4, 512]"),
    ({"lse": torch.zeros(B, S, 7)}, "lse must be float32 [B=1, S=4, H=8], got float32 [1, 4, 7]"),
    ({"dlse": torch.zeros(B, S, H).double()}, "dlse must be float32 [B, S, H], got float64 [1, 4, 8]"),
    ({"kv": torch.zeros(B, S_KV, G, D).half()}, "kv must be bfloat16 [B, S_kv, G, Dqk], got float16 [1, 16, 1, 576]"),
    ({"d_v": 256}, "(Dqk, d_v) must be (576, 512) or (512, 512), got (576, 256)"),
    ({"sm_scale": float("nan")}, "sm_scale must be from -2^127 to 2^127, got nan"),
]


@pytest.mark.parametrize("call", [native, cpu, fake], ids=["native", "cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        call(**arguments(**changes))
    assert f"dsa::sparse_mla_bwd: {message}" in str(error.value)


def test_native_checks_end_at_the_device() -> None:
    with pytest.raises(RuntimeError, match="dsa::sparse_mla_bwd: q must be on a CUDA device, got cpu"):
        native(**arguments())


@pytest.mark.parametrize("sink", [False, True])
def test_fake_tensors_on_a_cuda_device(sink: bool) -> None:
    args = arguments() if sink else arguments(attn_sink=None)
    dq, dkv, d_sink = fake(**args)
    assert (dq.shape, dq.dtype, dq.device.type) == ((B, S, H, D), torch.bfloat16, "cuda")
    assert (dkv.shape, dkv.dtype) == ((B, S_KV, G, D), torch.bfloat16)
    assert (d_sink.shape, d_sink.dtype) == ((H,) if sink else (0,), torch.float32)


def test_opcheck() -> None:
    args = arguments()
    positional = [args.pop(name) for name in TENSORS]
    torch.library.opcheck(OP, positional, args)
    torch.library.opcheck(OP, positional, {"deterministic": True, "causal": False})


def test_expanded_gradients() -> None:
    """out.sum() sends a gradient back that is one element everywhere."""
    args = arguments(attn_sink=None, dlse=None)
    dense = OP(**args)
    expanded = OP(**{**args, "dout": torch.ones((), dtype=torch.bfloat16).expand(B, S, H, DV)})
    assert all(torch.equal(a, b) for a, b in zip(dense, expanded, strict=True))
