"""Where the rows of a layer's input stand, and what their queries see."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsa_ext.nn.rotary import PlacedRows, check_positions, placed
from dsa_ext.ops._checks import check_sizes, describe


class Rows(NamedTuple):
    """Where the rows of a layer's input x stand."""

    positions: Tensor | PlacedRows  # for RoPE
    bounds: tuple[Tensor, Tensor] | None  # the first key and the one after the last that a query sees, int32 [B, S]
    longest: int | None = None  # with bounds: no query sees a key that is so many rows before its own

    def at(self, rows: Tensor, batch: int) -> "Rows":
        """Those of these rows, with bounds."""
        positions = self.positions.positions if isinstance(self.positions, PlacedRows) else self.positions
        row = torch.arange(positions.shape[-1], device=rows.device, dtype=torch.int32)
        starts, ends = (torch.zeros_like(row), row + 1) if self.bounds is None else (bound[0] for bound in self.bounds)
        return Rows(placed(positions[..., rows]), (starts[rows].expand(batch, -1), ends[rows].expand(batch, -1)))

    def visible(self) -> dict[str, Any]:
        """Arguments of the attention's operators."""
        return {} if self.bounds is None else {"starts": self.bounds[0], "ends": self.bounds[1]}


def rows_of(
    x: Tensor, positions: Tensor | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
) -> Rows:
    """Those of x [B, S, ...], see SparseMLA.forward."""
    if positions is not None:
        check_positions("SparseMLA", positions, x)
    seq = x.shape[1]
    row = torch.arange(seq, device=x.device)
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"SparseMLA: max_seqlen must be None without cu_seqlens, got {max_seqlen!r}")
        return Rows(placed(row if positions is None else positions), None)
    is_list = isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 and cu_seqlens.dtype == torch.int32
    if not is_list or cu_seqlens.shape[0] < 2 or x.shape[0] != 1:
        expected = "must be int32 [number of sequences + 1] with x [1, S, hidden_size]"
        raise ValueError(f"SparseMLA: cu_seqlens {expected}, got {describe(cu_seqlens)} with x {describe(x)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"SparseMLA: cu_seqlens must be on the device of x, {x.device}, got {cu_seqlens.device}")
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, row, right=True, out_int32=True) - 1]
    if positions is None:
        positions = row - starts
    if max_seqlen is not None:
        check_sizes("SparseMLA", max_seqlen=max_seqlen)
        max_seqlen = min(max_seqlen, seq)
        starts = torch.maximum(starts, row + 1 - max_seqlen).int()
    return Rows(placed(positions), (starts[None], (row + 1).int()[None]), max_seqlen)
