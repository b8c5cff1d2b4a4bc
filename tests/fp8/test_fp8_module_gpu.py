"""FP8Linear on a GPU, against the layer that it was made of and against itself on the CPU."""

from functools import partial

import fp8_inputs
import pytest
import torch

from dsa_ext.nn import FP8Linear
from dsa_ext.testing.tolerances import FP8_SIMILARITY, similarity_error

pytestmark = pytest.mark.gpu

random = partial(fp8_inputs.random, device="cuda")


@pytest.mark.parametrize("rows", [5, 100])
def test_linear(rows: int) -> None:
    linear = torch.nn.Linear(1536, 2112, device="cuda")
    layer = FP8Linear(linear)
    x = random(rows, 1536)
    with torch.no_grad():
        out = layer(x.bfloat16())
        assert similarity_error(out, linear(x)) <= 2e-3
        exact = layer.cpu()(x.bfloat16().cpu())
    assert similarity_error(out.cpu(), exact) <= FP8_SIMILARITY
