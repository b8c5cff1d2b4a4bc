"""A kernel that only takes time, for tests of kernels that do not get all SMs."""

import torch
import triton
import triton.language as tl

NUMBERS = tl.constexpr(32768)  # of a CTA, in registers: no CTA that needs half of an SM's registers fits beside them


@triton.jit
def _spin_kernel(out, rounds) -> None:  # type: ignore[no-untyped-def]
    values = tl.arange(0, NUMBERS).to(tl.float32)
    for _ in range(rounds):
        values = values * 0.999 + 1.0
    tl.store(out + tl.program_id(0), tl.sum(values, 0))


def spin(ctas: int, rounds: int) -> None:
    """On so many SMs, if as many are free. A round takes about 300 clocks."""
    _spin_kernel[(ctas,)](torch.empty(ctas, device="cuda"), rounds, num_warps=32)
