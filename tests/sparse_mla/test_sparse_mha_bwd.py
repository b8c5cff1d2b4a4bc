"""Errors of sparse_mha_bwd beyond those of its forward. Its reference is tested with that of sparse_mha_fwd."""

import pytest
import torch

from dsa_ext.testing.calls import ORDINARY


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_errors_of_the_gradient(name: str) -> None:
    args = ORDINARY["sparse_mha_bwd"]()
    args[name] = args[name][:, :3]
    with pytest.raises(RuntimeError, match=rf"dsa::sparse_mha_bwd: {name} must be"):
        torch.ops.dsa.sparse_mha_bwd(**args)
