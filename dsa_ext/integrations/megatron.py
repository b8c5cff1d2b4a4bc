"""A backend of Megatron-core's DeepSeek Sparse Attention on the operators of this package.

Call `register` before arguments are parsed and set `dsa_kernel_backend` to "dsa_ext". The other functions are the
hooks that Megatron calls. They take any number of heads and any top-k, neither of which is padded; ids ascend, and ties
go to the lower id on every rank. A hook that returns None declines the call, and Megatron runs its own code.

Shapes are those of Megatron: S queries and T keys first, then the batch B.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsa_ext import functional
from dsa_ext.nn.heads import multiply_heads
from dsa_ext.nn.indexer import IndexerTensors, loss_of_keys, select_keys, sequences
from dsa_ext.ops.indexer import DIMS, HEADS, MAX_TOPK
from dsa_ext.ops.sparse_mla import MAX_HEADS_PER_GROUP, VALUE_COLUMNS, WIDTHS

#: The name of the backend in Megatron's arguments.
NAME = "dsa_ext"
#: Whose hooks these are.
_COMMIT = "d98e8a64dd"


def register() -> None:
    """Adds the backend "dsa_ext" to Megatron.

    Raises:
        ModuleNotFoundError: Megatron is not importable.
        RuntimeError: this version of Megatron has no backends of sparse attention, or others than those known here.
    """
    from megatron.core import utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    try:
        from megatron.core.transformer.experimental_attention_variant import dsa_kernels

        modules, names = dsa_kernels._BACKEND_MODULE_NAME_BY_BACKEND, utils._VALID_DSA_KERNEL_BACKENDS
        choices = TransformerConfig.__dataclass_fields__["dsa_kernel_backend"]  # of the command line
    except (ImportError, AttributeError, KeyError) as error:
        raise RuntimeError(f"register: Megatron must be like its commit {_COMMIT}; missing here: {error}") from error
    modules[NAME] = __name__
    if NAME not in names:
        utils._VALID_DSA_KERNEL_BACKENDS = (*names, NAME)
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
    tensors = _indexer_tensors(q, k, weights, index_topk, (starts, ends), use_relu, layout)
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
        pg_collection: its group `tp`, or None, divides the heads of `query`; the target is the sum over all of them.
        query_valid_rows: rows that count [B, S], bool.
        calculate_per_token_loss: return the sum over rows, not the mean.
    """
    tensors = _indexer_tensors(q, k, weights, index_topk, (starts, ends), use_relu, layout)
    if tensors is None or not _is_absorbed(query, key):
        return None
    ids = _select(tensors, index_topk, starts, ends)
    attention = _Attention.of(query, key, softmax_scale)
    _, lse = attention.to(ids)
    losses = _Losses(_group_of(pg_collection), query_valid_rows, calculate_per_token_loss)
    return ids, None, loss_coeff * losses.of_selected(tensors, attention, ids, lse)


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
    if not _is_absorbed(query, key) or v_channels != VALUE_COLUMNS or topk_indices.shape[-1] == 0:
        return None
    length = None if topk_length is None else _int32(topk_length)
    ids = _int32(topk_indices)[:, :, None]
    options: Any = {"causal": False, "sm_scale": softmax_scale, "topk_length": length}
    out: Tensor = functional.sparse_mla(query.transpose(0, 1), key.transpose(0, 1), ids, **options)
    return out.transpose(0, 1)


def run_fused_dsa_attention(
    *,
    config: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    up_v_weight: Tensor | None,
    q_indexer: Tensor,
    k_indexer: Tensor,
    indexer_weights: Tensor,
    indexer_topk: int,
    softmax_scale: float,
    loss_coeff: float,
    sparse_loss: bool,
    calculate_per_token_loss: bool,
    absorbed_mla: bool,
    varlen_starts: Tensor | None,
    varlen_ends: Tensor | None,
    key_positions: Tensor | None,
    query_valid_rows: Tensor | None,
    use_relu: bool,
    pg_collection: Any = None,
    **layout: Any,
) -> tuple[Tensor, Tensor] | None:
    """Selection, attention to the selected keys and the indexer's loss together, so that attention is computed once:
    outputs [S, B, H * v_head_dim], and the loss, 0 if loss_coeff is.

    Args:
        query, key: of the absorbed attention, [S, B, H, 576] and [T, B, 1, 576], with gradients.
        up_v_weight: [H, v_head_dim, 512], by which outputs in the latent are multiplied.
        q_indexer, k_indexer, indexer_weights, indexer_topk: as in run_fused_qk_topk.
        sparse_loss: the loss is over the selected keys; otherwise over all keys that a query sees.
        varlen_starts, varlen_ends: bounds of the keys of each query [S].
        value, key_positions: must be None; otherwise the hook declines.
        softmax_scale, loss_coeff, calculate_per_token_loss, query_valid_rows, pg_collection: as in
            run_fused_qk_topk_with_loss.
        config, layout: not used, except Megatron's arguments on packed sequences.
    """
    bounds = varlen_starts, varlen_ends
    tensors = _indexer_tensors(q_indexer, k_indexer, indexer_weights, indexer_topk, bounds, use_relu, layout)
    is_supported = absorbed_mla and value is None and key_positions is None and _is_absorbed(query, key)
    if tensors is None or not is_supported or up_v_weight is None or up_v_weight.shape[-1] != VALUE_COLUMNS:
        return None
    ids = _select(tensors, indexer_topk, *bounds)
    batched = query.transpose(0, 1), key.transpose(0, 1)
    latent, lse = functional.sparse_mla(
        *batched, ids[:, :, None], causal=False, sm_scale=softmax_scale, return_lse=True
    )
    out = multiply_heads(latent, up_v_weight.mT).flatten(2).transpose(0, 1)
    if loss_coeff == 0 or not torch.is_grad_enabled():
        return out, lse.new_zeros(())
    attention = _Attention.of(query, key, softmax_scale)
    losses = _Losses(_group_of(pg_collection), query_valid_rows, calculate_per_token_loss)
    if sparse_loss:
        return out, loss_coeff * losses.of_selected(tensors, attention, ids, lse.detach())
    all_selected = indexer_topk >= key.shape[0]  # so lse is that of all keys
    lse_of_all = lse.detach() if all_selected else None
    return out, loss_coeff * losses.of_all(tensors, attention, _bounds_of(tensors, *bounds), lse_of_all)


@dataclass(frozen=True)
class _Attention:
    """The attention that the indexer learns from; no gradient reaches it."""

    q: Tensor  # [B, S, H, 576]
    kv: Tensor  # [B, T, 1, 576]
    sm_scale: float

    @classmethod
    def of(cls, query: Tensor, key: Tensor, sm_scale: float) -> "_Attention":
        return cls(query.detach().transpose(0, 1), key.detach().transpose(0, 1), sm_scale)

    def to(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and lse."""
        options: Any = {"causal": False, "sm_scale": self.sm_scale}
        return functional.sparse_mla(self.q, self.kv, ids[:, :, None], **options, return_lse=True)

    def lse_of_all(self, starts: Tensor, ends: Tensor) -> Tensor:
        batch, keys = self.kv.shape[:2]
        every = torch.arange(keys, device=self.q.device, dtype=torch.int32).expand(batch, self.q.shape[1], 1, keys)
        options: Any = {"starts": starts, "ends": ends, "sm_scale": self.sm_scale}
        lse: Tensor = functional.sparse_mla(self.q, self.kv, every, **options, return_lse=True)[1]
        return lse


@dataclass(frozen=True)
class _Losses:
    """Losses of the indexer, as sums over rows or means over those that count."""

    group: Any  # of the ranks that hold the other heads, or None
    valid_rows: Tensor | None  # [B, S]
    is_sum: bool

    def of_selected(self, tensors: IndexerTensors, attention: _Attention, ids: Tensor, lse: Tensor) -> Tensor:
        if self.valid_rows is not None:  # rows that do not count list no keys, so that NaN in them reaches nothing
            ids = torch.where(self.valid_rows[..., None], ids, -1)
        options: Any = {"causal": False, "sm_scale": attention.sm_scale}
        target = functional.attn_dist(attention.q, attention.kv, ids[:, :, None], lse, **options)[:, :, 0]
        if self.group is not None:
            torch.distributed.all_reduce(target, group=self.group)
        weights = None if self.valid_rows is None else self.valid_rows.to(target.dtype)
        reduction: Any = "sum" if self.is_sum else "mean"
        return loss_of_keys(tensors, ids, target, row_weights=weights, reduction=reduction)

    def of_all(
        self, tensors: IndexerTensors, attention: _Attention, bounds: tuple[Tensor, Tensor], lse: Tensor | None
    ) -> Tensor:
        lse = attention.lse_of_all(*bounds) if lse is None else lse
        rows = torch.ones_like(lse[:, :, 0]) if self.valid_rows is None else self.valid_rows.to(lse.dtype)
        losses = []
        each = sequences(*tensors, attention.q, attention.kv[:, :, 0], lse, rows, *bounds)
        for q, k, weights, *main, starts, ends in each:
            if self.group is None:
                options: Any = {"sm_scale": attention.sm_scale, "starts": starts, "ends": ends, "reduction": "sum"}
                losses.append(functional.indexer_dense_loss(q, k, weights, *main[:3], row_weights=main[3], **options))
            else:
                rest = starts, ends, attention.sm_scale, self.group
                losses.append(_DenseLossOfGroup.apply(q, k, weights, *main, *rest))  # type: ignore[no-untyped-call]
        count = 1 if self.is_sum else rows.sum().clamp(min=1)
        mean: Tensor = torch.stack(losses).sum() / count
        return mean


class _DenseLossOfGroup(torch.autograd.Function):
    """indexer_dense_loss, as a sum, with a target that is summed over the ranks of a group."""

    _SCORES_AT_ONCE = 2**24

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, k, weights, main_q, main_kv, lse, row_weights, starts, ends, sm_scale, group = args
        every = torch.arange(len(k), device=q.device, dtype=torch.int32)
        ends = torch.where(row_weights == 0, starts, ends)  # as indexer_dense_loss does
        loss: Tensor = lse.new_zeros(())
        dq, dweights = torch.empty_like(q), torch.empty_like(weights)
        dk = torch.zeros_like(k, dtype=lse.dtype)
        step = max(1, _DenseLossOfGroup._SCORES_AT_ONCE // max(1, len(k)))
        for run in (slice(first, first + step) for first in range(0, len(q), step)):
            bounds: Any = {"starts": starts[run], "ends": ends[run]}
            listed = every.expand(len(q[run]), -1)
            target = functional.attn_dist(main_q[run], main_kv, listed, lse[run], sm_scale=sm_scale, **bounds)
            torch.distributed.all_reduce(target, group=group)
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q[run], k, weights[run])]
                scores = functional.indexer_logits(*leaves, **bounds)
                of_run = functional.indexer_loss(scores, target, row_weights=row_weights[run], reduction="sum")
            dq[run], more_dk, dweights[run] = torch.autograd.grad(of_run, leaves)
            dk += more_dk
            loss += of_run.detach()
        ctx.save_for_backward(dq, dk.to(k.dtype), dweights)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        return *(gradient * dloss.to(gradient.dtype) for gradient in ctx.saved_tensors), *(None,) * 8


def _group_of(pg_collection: Any) -> Any:
    """The group of ranks that divide the heads, or None if one rank holds all."""
    group = getattr(pg_collection, "tp", None)
    return None if group is None or group.size() == 1 else group


def _indexer_tensors(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    bounds: tuple[Tensor | None, Tensor | None],
    use_relu: bool,
    layout: dict[str, Any],
) -> IndexerTensors | None:
    """The tensors with the batch first. None if the operators do not take them."""
    holds_own_keys_only = (
        layout.get("cp_size", 1) > 1
        and layout.get("single_packed_thd_sequence", False)
        and k.shape[0] == layout.get("local_packed_cp_query_len")
    )
    fits = (
        use_relu
        and all(bound is not None for bound in bounds)
        and (q.dim(), k.dim()) == (4, 3)
        and q.dtype == k.dtype
        and q.dtype in (torch.bfloat16, *([] if q.is_cuda else [torch.float32, torch.float64]))
        and q.shape[2] in HEADS
        and q.shape[3] in DIMS
        and (weights.dtype != torch.float64 or q.dtype == torch.float64)
        and 1 <= min(index_topk, k.shape[0]) <= MAX_TOPK
        and not holds_own_keys_only
    )
    if not fits:
        return None
    weights = weights.double() if q.dtype == torch.float64 else weights.float()
    return IndexerTensors(*(t.transpose(0, 1) for t in (q, k, weights)))


def _is_absorbed(query: Tensor, key: Tensor) -> bool:
    """Whether the operators take these queries and keys."""
    dtypes = [torch.bfloat16, *([] if query.is_cuda else [torch.float32, torch.float64])]
    return (
        query.dim() == key.dim() == 4
        and key.shape[2] == 1
        and query.shape[2] <= MAX_HEADS_PER_GROUP
        and query.shape[3] in WIDTHS
        and query.shape[3] == key.shape[3]
        and query.dtype == key.dtype
        and query.dtype in dtypes
    )


def _select(tensors: IndexerTensors, index_topk: int, starts: Any, ends: Any) -> Tensor:
    return select_keys(tensors, *_bounds_of(tensors, starts, ends), min(index_topk, tensors.k.shape[1]), "bf16")


def _bounds_of(tensors: IndexerTensors, starts: Any, ends: Any) -> tuple[Tensor, Tensor]:
    """int32 [B, S]"""
    batch, seq = tensors.q.shape[:2]
    return _int32(starts).expand(batch, seq), _int32(ends).expand(batch, seq)


def _int32(numbers: Tensor) -> Tensor:
    """Ids, bounds or lengths as int32: one that is too large becomes the largest, and a negative one -1. Plain
    narrowing would wrap them to small numbers."""
    return numbers if numbers.dtype == torch.int32 else numbers.long().clamp(-1, 2**31 - 1).int()
