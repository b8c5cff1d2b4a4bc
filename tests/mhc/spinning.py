"""A kernel that only takes time, for tests of kernels that do not get all SMs."""

import torch
import triton
import triton.language as tl


@triton.jit
def _spin_kernel(out, rounds) -> None:  # type: ignore[no-untyped-def]
    value = tl.program_id(0).to(tl.float32)
    for _ in range(rounds):
        value = value * 0.999 + 1.0
    tl.store(out + tl.program_id(0), value)


def spin(ctas: int, rounds: int) -> None:
    """On so many SMs, if as many are free. A round takes some clocks."""
    _spin_kernel[(ctas,)](torch.empty(ctas, device="cuda"), rounds, num_warps=1)
