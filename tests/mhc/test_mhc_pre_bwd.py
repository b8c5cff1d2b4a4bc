"""mhc_pre_bwd without a GPU: gradcheck, errors, fake results. Values: test_mhc_pre_fwd.py."""

import pytest
import torch
from mhc_inputs import check_fake_results, check_wrong_shape, make_pre, pre_bwd_arguments

import dsa_ext

OP = "mhc_pre_bwd"


def test_gradcheck() -> None:
    args = [value.requires_grad_() for value in make_pre().values()]
    assert torch.autograd.gradcheck(dsa_ext.mhc_pre, args, fast_mode=True)
    assert torch.autograd.gradcheck(dsa_ext.mhc_pre, args[:4], fast_mode=True)


@pytest.mark.parametrize("kind", ["native", "cpu", "fake"])
def test_gradient_errors(kind: str) -> None:
    args = pre_bwd_arguments()
    check_wrong_shape(OP, kind, args, "dh_in", "dh_in must be bfloat16 [B=2, S=3, D=128]")
    check_wrong_shape(OP, kind, args, "h_mix", "h_mix must be float32 [B=2, S=3, M=24]")


def test_fake_results_are_like_those_of_the_cpu() -> None:
    args = pre_bwd_arguments()
    check_fake_results(OP, args)
    check_fake_results(OP, args | {"gamma": None})


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.dsa.mhc_pre_bwd.default, tuple(pre_bwd_arguments().values()))


def test_gradients_have_no_gradient() -> None:
    args = [value.requires_grad_() for value in make_pre(dtype=torch.float32).values()]
    gradient = torch.autograd.grad(dsa_ext.mhc_pre(*args)[0].square().sum(), args[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="dsa::mhc_pre_bwd: second derivatives"):
        gradient.sum().backward()
