"""block_sparse_attn_bwd without a GPU: gradcheck, errors, opcheck. Values: test_block_sparse_attn_fwd.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from callers import assert_error, callers
from torch import Tensor

import dsa_ext
from dsa_ext.testing.block_inputs import H_KV, N_KV, N_Q, B, D, H, make_block_inputs

BWD = "block_sparse_attn_bwd"
_, cpu, fake = callers(BWD)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_gradcheck() -> None:
    x = make_block_inputs(heads=2, kv_heads=1, n_q=3, n_kv=70, slots=2)
    x.q2k_num.fill_(2)
    x.kv_block_size.fill_(4)

    def sums(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        return dsa_ext.block_sparse_attn(*leaves, *x.lists(), return_lse=True)

    assert torch.autograd.gradcheck(sums, x.leaves(), fast_mode=True)


def gradient_arguments(**changes: Any) -> dict[str, Any]:
    args = vars(make_block_inputs(dtype=torch.bfloat16))
    out, lse = torch.ops.dsa.block_sparse_attn_fwd(**args)
    return {**args, "dout": out, "out": out, "lse": lse, **changes}


GRADIENT_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"k": zeros(B, H_KV, N_KV)}, "k must be bfloat16 [B, Hkv, Nkv, D], got bfloat16 [1, 2, 200]"),
    (
        {"dout": zeros(B, H, 3, D)},
        "dout must be bfloat16 [B=1, H=4, Nq=100, D=64], got bfloat16 [1, 4, 3, 64]",
    ),
    ({"out": torch.zeros(1)}, "out must be bfloat16 [B, H, Nq, D], got float32 [1]"),
    ({"lse": torch.zeros(B, H, 3)}, "lse must be float32 [B=1, H=4, Nq=100], got float32 [1, 4, 3]"),
    ({"dlse": zeros(B, H, N_Q)}, "dlse must be float32 [B, H, Nq], got bfloat16 [1, 4, 100]"),
]


@pytest.mark.parametrize("call", [cpu, fake], ids=["cpu", "fake"])
@pytest.mark.parametrize(("changes", "message"), GRADIENT_ERRORS, ids=[text for _, text in GRADIENT_ERRORS])
def test_gradient_errors(call: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    assert_error(call, BWD, gradient_arguments(**changes), message)


def test_opcheck() -> None:
    args = gradient_arguments()
    names = ("dout", "q", "k", "v", "out", "lse", "q2k_index", "q2k_num", "kv_block_size")
    torch.library.opcheck(torch.ops.dsa.block_sparse_attn_bwd.default, tuple(args[name] for name in names))
