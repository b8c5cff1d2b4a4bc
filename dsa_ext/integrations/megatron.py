"""A backend of Megatron-core's DeepSeek Sparse Attention on the operators of this package.

Call `register` before arguments are parsed and set `dsa_kernel_backend` to "dsa_ext". The other functions are the
hooks that Megatron calls. They take any number of heads and any top-k, neither of which is padded; ids ascend, and ties
go to the lower id on every rank. A hook that returns None declines the call, and Megatron runs its own code.

Shapes are those of Megatron: S queries and T keys first, then the batch B.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dsa_ext import functional
from dsa_ext.nn.indexer import IndexerTensors, scores_of_keys, select_keys

#: The name of the backend in Megatron's arguments.
NAME = "dsa_ext"
_LATENT, _WIDTHS, _MAX_HEADS = 512, (576, 512), 128
_INDEXER_HEADS, _INDEXER_COLUMNS, _MAX_TOPK = (8, 16, 32, 64), (64, 128), 4096


def register() -> None:
    """Adds the backend "dsa_ext" to Megatron."""
    from megatron.core import utils
    from megatron.core.transformer.experimental_attention_variant import dsa_kernels
    from megatron.core.transformer.transformer_config import TransformerConfig

    dsa_kernels._BACKEND_MODULE_NAME_BY_BACKEND[NAME] = __name__
    if NAME not in utils._VALID_DSA_KERNEL_BACKENDS:
        utils._VALID_DSA_KERNEL_BACKENDS = (*utils._VALID_DSA_KERNEL_BACKENDS, NAME)
    choices = TransformerConfig.__dataclass_fields__["dsa_kernel_backend"]  # of the command line
    if NAME not in get_args(choices.type):
        choices.type = Literal.__getitem__((*get_args(choices.type), NAME))


def run_fused_qk_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    use_relu: bool = True,
    **layout: Any,
) -> tuple[Tensor, None] | None:
    """Selects keys: ids [B, S, min(index_topk, T)], int32, ascending, then -1; and no lengths, since the ids say which
    slots are in use.

    Args:
        q, k, weights: of the indexer, [S, B, Hi, Di], [T, B, Di] and [S, B, Hi]; weights with all scales.
        index_topk: number of keys to select.
        starts, ends: bounds of the keys of each query [S], int32.
        block_size: not used.
        layout: Megatron's arguments on packed sequences under context parallelism. Keys must be those of all ranks.
    """
    tensors = _indexer_tensors(q, k, weights, index_topk, use_relu, layout)
    return None if tensors is None else (_select(tensors, index_topk, starts, ends), None)


def run_fused_qk_topk_with_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    starts: Tensor,
    ends: Tensor,
    block_size: int,
    query: Tensor,
    key: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    pg_collection: Any,
    query_valid_rows: Tensor | None = None,
    calculate_per_token_loss: bool = False,
    use_relu: bool = True,
    config: Any = None,
    **layout: Any,
) -> tuple[Tensor, None, Tensor] | None:
    """The same, and the indexer's loss over the selected keys, with its gradients.

    Args:
        query, key: of the absorbed attention, [S, B, H, 576] and [T, B, 1, 576]; no gradient reaches them.
        softmax_scale: factor on query.key.
        loss_coeff: factor on the loss.
        pg_collection: its group `tp` divides the heads of `query`; the target is the sum over all of them.
        query_valid_rows: rows that count [B, S], bool.
        calculate_per_token_loss: return the sum over rows, not the mean.
    """
    tensors = _indexer_tensors(q, k, weights, index_topk, use_relu, layout)
    if tensors is None or not _is_absorbed(query, key):
        return None
    ids = _select(tensors, index_topk, starts, ends)
    with torch.no_grad():
        main = query.transpose(0, 1), key.transpose(0, 1), ids[:, :, None]
        options: Any = {"causal": False, "sm_scale": softmax_scale}
        _, lse = functional.sparse_mla(*main, **options, return_lse=True)
        target = functional.attn_dist(*main, lse, **options)[:, :, 0]
        if pg_collection.tp.size() > 1:
            torch.distributed.all_reduce(target, group=pg_collection.tp)
    rows = None if query_valid_rows is None else query_valid_rows.to(target.dtype)
    reduction: Any = "sum" if calculate_per_token_loss else "mean"
    loss = functional.indexer_loss(scores_of_keys(tensors, ids), target, row_weights=rows, reduction=reduction)
    return ids, None, loss * loss_coeff


def run_fused_absorbed_sparse_attention(
    query: Tensor,
    key: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    v_channels: int,
    topk_length: Tensor | None = None,
) -> Tensor | None:
    """Attention to the selected keys in the latent: [S, B, H, 512].

    Args:
        query, key: [S, B, H, 576] and [T, B, 1, 576], with gradients.
        topk_indices: ids of the keys [B, S, K]; negative ids are padding.
        v_channels: columns of a key that are its value; 512.
        topk_length: number of leading ids in use [B, S].
    """
    if not _is_absorbed(query, key) or v_channels != _LATENT:
        return None
    length = None if topk_length is None else topk_length.int()
    ids = topk_indices.int()[:, :, None]
    options: Any = {"causal": False, "sm_scale": softmax_scale, "topk_length": length}
    out: Tensor = functional.sparse_mla(query.transpose(0, 1), key.transpose(0, 1), ids, **options)
    return out.transpose(0, 1)


def _indexer_tensors(
    q: Tensor, k: Tensor, weights: Tensor, index_topk: int, use_relu: bool, layout: dict[str, Any]
) -> IndexerTensors | None:
    """The tensors with the batch first. None if the operators do not take them."""
    holds_own_keys_only = (
        layout.get("cp_size", 1) > 1
        and layout.get("single_packed_thd_sequence", False)
        and k.shape[0] == layout.get("local_packed_cp_query_len")
    )
    fits = (
        use_relu
        and q.dtype == k.dtype
        and q.dtype in (torch.bfloat16, *([] if q.is_cuda else [torch.float32, torch.float64]))
        and q.shape[2] in _INDEXER_HEADS
        and q.shape[3] in _INDEXER_COLUMNS
        and 1 <= index_topk <= _MAX_TOPK
        and not holds_own_keys_only
    )
    if not fits:
        return None
    weights = weights if weights.dtype == torch.float64 else weights.float()
    return IndexerTensors(*(t.transpose(0, 1) for t in (q, k, weights)))


def _is_absorbed(query: Tensor, key: Tensor) -> bool:
    """Whether the operators take these queries and keys."""
    dtypes = [torch.bfloat16, *([] if query.is_cuda else [torch.float32, torch.float64])]
    return (
        query.dim() == key.dim() == 4
        and key.shape[2] == 1
        and query.shape[2] <= _MAX_HEADS
        and query.shape[3] in _WIDTHS
        and query.shape[3] == key.shape[3]
        and query.dtype == key.dtype
        and query.dtype in dtypes
    )


def _select(tensors: IndexerTensors, index_topk: int, starts: Tensor, ends: Tensor) -> Tensor:
    batch, seq = tensors.q.shape[:2]
    starts, ends = (bound.int().expand(batch, seq) for bound in (starts, ends))
    return select_keys(tensors, starts, ends, min(index_topk, tensors.k.shape[1]), "bf16")
