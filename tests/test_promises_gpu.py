"""Promises of every operator on a GPU: a graph at the first call, arguments that stay as they are, independent rows."""

from dataclasses import dataclass, field

import pytest
import torch
from layouts import call
from modes import Args, on
from streams import check_script
from torch import Tensor

from dsa_ext import ops
from dsa_ext.testing.calls import ORDINARY
from dsa_ext.testing.tolerances import bits

pytestmark = pytest.mark.gpu

FIRST_CALL = """
import torch
from dsa_ext.testing.calls import ORDINARY

args = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in ORDINARY["OP"]().items()}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = torch.ops.dsa.OP(**args)
expected = torch.ops.dsa.OP(**args)
captured, expected = ((r if isinstance(r, tuple) else (r,)) for r in (captured, expected))
for result in captured:  # so that what was written during the capture does not count
    result.copy_(torch.zeros(result.shape, device="cuda"))
graph.replay()
for a, b in zip(captured, expected, strict=True):
    torch.testing.assert_close(a.double(), b.double(), equal_nan=True, rtol=1e-3, atol=1e-3)
print("captured")
"""


@dataclass
class Rows:
    """An operator whose results have rows that depend on their own rows of some arguments alone."""

    arguments: dict[str, int]  # the dimension of the rows
    kept: int  # the number of rows that do not change
    results: tuple[int, ...]  # the same dimension of each result
    kept_of_last: int | None = None  # of the last result, if it has other rows
    sizes: Args = field(default_factory=dict)


ROWS = {
    "sparse_mla_decode": Rows({"q": 0, "indices": 0}, 1, (0, 0), sizes={"heads": 128, "topk": 40}),
    "indexer_logits_paged": Rows({"q": 0, "block_table": 0, "context_lens": 0}, 1, (0,), kept_of_last=2),
    "indexer_scores": Rows({"q": 0, "weights": 0, "indices": 0}, 30, (0,), sizes={"seq": 100, "s_kv": 900}),
    "indexer_loss": Rows({"scores": 0, "p": 0, "row_weights": 0}, 4, (0, 0), sizes={"slots": 2000}),
    "block_sparse_attn_fwd": Rows({"q": 2}, 64, (2, 2), sizes={"n_q": 300, "n_kv": 900}),
    "coarse_attn_fwd": Rows({"q": 2}, 64, (2, 2, 2), kept_of_last=1, sizes={"n_q": 300, "n_kv": 300}),
    "gated_fusion_fwd": Rows({"fine": 2, "coarse": 2, "gate": 2}, 7, (2,)),
    "act_quant": Rows({"x": 0}, 3, (0, 0)),
    "fp8_gemm": Rows({"a": 0, "a_s": 0}, 13, (0,), sizes={"rows": 50, "width": 4096}),
    "mhc_pre_fwd": Rows({"x": 1}, 100, (1,) * 6, sizes={"tokens": 300}),
}


@pytest.mark.parametrize("op", ops.OPERATORS)
def test_graph_capture_at_the_first_call(op: str) -> None:
    check_script(FIRST_CALL.replace("OP", op))


@pytest.mark.parametrize("op", ops.OPERATORS)
def test_no_argument_changes(op: str) -> None:
    args = on("cuda", ORDINARY[op]())
    before = {name: value.clone() for name, value in args.items() if isinstance(value, Tensor)}
    call(op, args)
    assert all(torch.equal(bits(args[name]), bits(value)) for name, value in before.items())


def with_other_rows(tensor: Tensor, dim: int, kept: int, nan: bool) -> Tensor:
    tensor = tensor.clone()
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    others = raw.narrow(dim, kept, raw.shape[dim] - kept)
    if nan and raw.is_floating_point():
        others.fill_(torch.nan)
    else:
        others.copy_(others.flip(-1).roll(1, -1))
    return tensor


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("op", ROWS)
def test_rows_do_not_depend_on_others(op: str, nan: bool) -> None:
    rows = ROWS[op]
    args = on("cuda", ORDINARY[op](**rows.sizes))
    changed = {name: with_other_rows(args[name], dim, rows.kept, nan) for name, dim in rows.arguments.items()}
    results, others = call(op, args), call(op, args | changed)
    kept = [rows.kept] * len(rows.results)
    kept[-1] = rows.kept_of_last or rows.kept
    for result, other, dim, count in zip(results, others, rows.results, kept, strict=True):
        assert torch.equal(*(bits(x.narrow(dim, 0, count).contiguous()) for x in (result, other)))
    assert any(not torch.equal(bits(a), bits(b)) for a, b in zip(results, others, strict=True))
