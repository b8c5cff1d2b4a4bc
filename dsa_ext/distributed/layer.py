"""SparseMLA on several ranks, which divide the storage of the large weights (tensor parallelism) or the sequences
(context parallelism). The computation is divided by rows in both."""

import hashlib
import operator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn.functional import linear
from torch.utils._python_dispatch import _disable_current_modes

from dsa_ext.distributed.collectives import (
    Group,
    Pending,
    all_rows,
    own_rows,
    rank_in,
    rows_of_all,
    shared,
    size_of,
    summed,
    whole_weight,
)
from dsa_ext.distributed.shares import Order, Shares, shares_of
from dsa_ext.nn.expanded import Expanded, expanded_rows, fits
from dsa_ext.nn.indexer import IndexerTensors
from dsa_ext.nn.projections import WHOLE, excess_of
from dsa_ext.nn.rows import Rows, rows_of
from dsa_ext.nn.sparse_mla import SparseMLA, SparseMLAOutput
from dsa_ext.ops._checks import describe

#: The projections whose weights are divided, along the dimension of heads. They are read: the modules are not called.
_DIVIDED = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1}
_OPTIONS = ("heads", "nope_dim", "v_dim", "topk", "phase", "rope", "rope_theta", "yarn", "sm_scale")
_INDEXER_OPTIONS = ("heads", "head_dim", "rope_dim", "rope", "rope_theta", "yarn", "hadamard", "precision")


class ParallelSparseMLA(SparseMLA):
    """What `parallelize` makes of a SparseMLA. See there.

    `attention_to_all` and `select` take whole sequences, equal on all ranks, and return results for all queries.
    """

    _groups: "_Groups"
    _order: Order

    @property
    def _tp(self) -> Group:
        return self._groups.tensor

    @property
    def _cp(self) -> Group:
        return self._groups.context

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        seq_len: int | None = None,
        cu_seqlens: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> SparseMLAOutput:
        """
        Args:
            x: this rank's rows of the sequences [B, S_r, hidden_size], those of `rows_of_rank`; equal on all ranks of
                the tensor-parallel group.
            seq_len: length S of the whole sequences; by default S_r times the ranks that divide them. It is required
                where ranks hold different numbers of rows: their collectives would not match.
            cu_seqlens: as in SparseMLA.forward, with rows of the whole sequence.
            ids: as in SparseMLA.forward, for the queries whose attention this rank computes: those of the `ids` that it
                returns.

        Returns:
            SparseMLAOutput. `out` has the rows of x; the loss is that of all queries, equal on all ranks. `ids` are the
            keys, as rows of the whole sequence, of the queries whose attention this rank computes.
        """
        self._check_input(x)
        in_context = size_of(self._cp)
        seq_len = x.shape[1] * in_context if seq_len is None else _length(seq_len)
        context = shares_of(seq_len, in_context, self._order, x.device)
        held = context.rows(rank_in(self._cp))
        if x.shape[1] != len(held):
            expected = f"[B, {len(held)}, hidden_size], the rows_of_rank({seq_len})"
            raise ValueError(f"ParallelSparseMLA: x must be {expected} of this rank, got {describe(x)}")
        runs_indexer = self.phase != "dense" and ids is None
        first = 0
        if runs_indexer and self.phase == "sparse" and self._cp is None:
            first = self._first_rows(seq_len)
        among = shares_of(len(held), size_of(self._tp), "zigzag", x.device, first)
        own = among.rows(rank_in(self._tp))
        whole = rows_of(x.new_empty(()).expand(x.shape[0], seq_len, x.shape[2]), None, cu_seqlens)
        queries = whole.at(held[own], x.shape[0])
        if ids is not None:
            self._check_ids(ids, x[:, : len(own)])  # of this rank's queries

        called = {n: p for n, p in self.named_parameters() if n.removesuffix(".weight") not in _DIVIDED}
        parameters = dict(zip(called, shared(list(called.values()), self._tp), strict=True))
        own_x = own_rows(x, among, self._tp)
        # Created first, so that their gradients are waited for last.
        weights = q_b, kv_b, out_weight = [self._whole_weight(name) for name in _DIVIDED]
        q_latent, own_keys, tensors = _projected(self, parameters, own_x, queries, runs_indexer)
        if self.phase == "dense" and whole.bounds is None and self._cp is None:
            return SparseMLAOutput(self._by_heads(q_latent, own_keys, among, whole), None, None)
        index_keys = None if tensors is None else self._of_all(tensors.k, among, context)
        keys = all_rows(own_keys, among, self._tp)
        for weight in weights:
            weight.start()
        if self._cp is not None:
            keys = all_rows(keys.result(), context, self._cp)
        # All but the indexer's keys arrive while it selects.
        if tensors is not None and index_keys is not None:
            tensors = tensors._replace(k=index_keys.result())
            if self.phase == "sparse":
                ids = self.indexer.select(tensors, self.topk, queries.bounds)
        heads = linear(q_latent, q_b.result()).unflatten(-1, (self.heads, -1))
        # In the backward pass the gradient of what is waited for last is sent first: that of the keys.
        whole_kv_b, whole_o = kv_b.result(), out_weight.result()
        expanded = Expanded(among.firsts[rank_in(self._tp)], first)
        out, loss = self._absorbed(heads, keys.result(), whole_kv_b, tensors, ids, queries, whole_o, expanded)
        if loss is not None:
            loss = summed(summed(loss * (len(own) / max(1, seq_len)), self._tp), self._cp)
        return SparseMLAOutput(rows_of_all(out, among, self._tp), loss, ids)

    def make_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a TypeError: a parallel layer takes no cache."""
        raise TypeError("ParallelSparseMLA: a parallel layer takes no cache, make_cache is for a SparseMLA on one rank")

    def _check_input(self, x: Any) -> None:
        super()._check_input(x)
        refusal = _refusal(self, (*WHOLE, DTensor))  # of what has been added since `parallelize`
        if refusal is not None:
            raise ValueError(f"ParallelSparseMLA: {refusal}")

    def _first_rows(self, seq_len: int) -> int:
        """How many of the first queries, each rank an equal share of them, run in the expanded form. Every rank expands
        all of their keys, which with more than two ranks takes longer than it saves."""
        columns = self.nope_dim, self.rope_dim, self.v_dim
        if size_of(self._tp) > 2 or not fits(*columns):
            return 0
        return expanded_rows(seq_len, self.topk, self.heads, *columns)

    def _by_heads(self, q_latent: Tensor, keys: Tensor, among: Shares, rows: Rows) -> Tensor:
        """Dense attention of this rank's heads to the keys of all rows, and the sum of the outputs of all heads."""
        q_latents, all_keys = (all_rows(own, among, self._tp) for own in (q_latent, keys))
        heads = linear(q_latents.result(), _local(self.q_b_proj.weight))
        heads = heads.unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        latent, k_rope = all_keys.result()[:, :, 0].split([self.kv_lora_rank, self.rope_dim], dim=-1)
        values = self._dense(heads, latent, k_rope, _local(self.kv_b_proj.weight), rows)
        return summed(linear(values.flatten(2), _local(self.o_proj.weight)), self._tp)

    def _of_all(self, x: Tensor, among: Shares, context: Shares) -> Pending:
        """Starts to gather the rows of all ranks of both groups."""
        gathered = all_rows(x, among, self._tp)
        return gathered if self._cp is None else all_rows(gathered.result(), context, self._cp)

    def _whole_weight(self, name: str) -> Pending:
        return whole_weight(_local(getattr(self, name).weight), _DIVIDED[name], self._tp)

    def _gathered_weight(self, name: str) -> Tensor:
        weight = self._whole_weight(name)
        weight.start()
        return weight.result()

    def _kv_b(self, x: Tensor) -> Tensor:
        return self._gathered_weight("kv_b_proj")

    def _heads(self, q_latent: Tensor) -> Tensor:
        heads: Tensor = linear(q_latent, self._gathered_weight("q_b_proj")).unflatten(-1, (self.heads, -1))
        return heads

    def rows_of_rank(self, seq_len: int) -> Tensor:
        """The rows of sequences of this length that this rank holds, ascending; on the CPU."""
        shares = shares_of(_length(seq_len), size_of(self._cp), self._order, torch.device("cpu"))
        return shares.rows(rank_in(self._cp)).clone()


class _Projections(nn.Module):
    """The part of a layer that projects rows: query latent, keys, and the tensors of the indexer, if it runs."""

    def __init__(self, layer: SparseMLA) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, rows: Rows, runs_indexer: bool) -> tuple[Tensor, Tensor, IndexerTensors | None]:
        q_latent, keys = self.layer._q_latent(x), self.layer._keys(x, rows)
        tensors = self.layer.indexer(x.detach(), q_latent.detach(), rows.positions) if runs_indexer else None
        return q_latent, keys, tensors


def _projected(
    layer: SparseMLA, parameters: dict[str, Tensor], *inputs: Any
) -> tuple[Tensor, Tensor, IndexerTensors | None]:
    """What _Projections computes with these parameters in place of the layer's."""
    projections = _Projections(layer)
    of_part = {f"layer.{name}": parameter for name, parameter in parameters.items()}
    result: tuple[Tensor, Tensor, IndexerTensors | None] = functional_call(projections, of_part, inputs)
    return result


class _Groups:
    """Process groups, which copies of a layer share."""

    def __init__(self, tensor: Group, context: Group) -> None:
        self.tensor, self.context = tensor, context

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Groups":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "ParallelSparseMLA: a parallel layer cannot be pickled or saved whole, since it has process groups; save "
            "its state_dict() with torch.distributed.checkpoint"
        )


def parallelize(
    layer: SparseMLA,
    mesh: DeviceMesh,
    *,
    tensor: str | None = None,
    context: str | None = None,
    order: Order = "zigzag",
) -> ParallelSparseMLA:
    """Runs a layer on the ranks of a mesh. Changes the layer in place, and returns it.

    Along the dimension `tensor` of the mesh `q_b_proj`, `kv_b_proj` and `o_proj` are divided by heads. All else is
    divided by rows of the sequence, which all ranks of the dimension hold: a rank gathers these weights, and computes
    the projections, the indexer, attention and the loss of its rows, with the keys of all. Only in the dense phase
    attention is divided by heads. Along the dimension `context` the ranks hold parts of the sequence, and the latent
    keys and the keys of the indexer are gathered.

    Weights that are divided become DTensors, the others stay as they are. Gradients of the others are complete within
    the tensor-parallel group; along `context` they are those of this rank's rows, as in data parallelism: FSDP or DDP
    over that dimension, or an all-reduce, adds them up.

    Args:
        layer: equal on all ranks. Load its checkpoint before, or afterwards with torch.distributed.checkpoint.
        mesh: of the ranks; dimensions that are not named have no effect.
        tensor, context: names of dimensions of the mesh.
        order: how rows are divided along `context`: "zigzag" gives all ranks the same work, "contiguous" neighboring
            rows.

    Raises:
        TypeError: layer is not a SparseMLA, or of a subclass, or its forward is replaced; mesh is not a DeviceMesh.
        ValueError: the layer is parallel already, the mesh has no such dimension, both are the same or none is named,
            the heads cannot be divided among the ranks, a projection that is divided has an adapter, a hook or a bias,
            indexer_loss is "deferred", or the layers of the ranks differ in options, hooks, or the shapes, dtypes and
            requires_grad of parameters; then all ranks raise it, and their layers stay as they are. That their weights
            are equal is not checked.
    """
    if isinstance(layer, ParallelSparseMLA):
        raise ValueError("parallelize: the layer is parallel already")
    if type(layer) is not SparseMLA or "forward" in vars(layer):  # what it overrides would be lost
        got = "one whose forward is replaced" if type(layer) is SparseMLA else type(layer).__name__
        raise TypeError(f"parallelize: layer must be a SparseMLA itself, got {got}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"parallelize: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    for argument, name in (("tensor", tensor), ("context", context)):
        if name is not None and name not in names:
            raise ValueError(f"parallelize: {argument} must be a dimension of the mesh, one of {names}, got {name!r}")
    if tensor is None and context is None:
        raise ValueError(f"parallelize: tensor or context must be a dimension of the mesh, one of {names}, got None")
    if tensor == context:
        raise ValueError(f"parallelize: tensor and context must be two dimensions, got {tensor!r} for both")
    if order not in ("zigzag", "contiguous"):
        raise ValueError(f"parallelize: order must be 'zigzag' or 'contiguous', got {order!r}")
    groups = _Groups(
        *(None if name is None or mesh[name].size() == 1 else mesh[name].get_group() for name in (tensor, context))
    )
    refusal = _refusal(layer, WHOLE)
    _check_equal(_description(layer, order, refusal), groups, mesh.device_type)
    ranks = size_of(groups.tensor)
    if layer.heads % ranks != 0:
        raise ValueError(f"parallelize: the layer's heads must be a multiple of {ranks} ranks, got {layer.heads}")
    if refusal is not None:
        raise ValueError(f"parallelize: {refusal}")
    divided = {}
    if groups.tensor is not None:
        assert tensor is not None
        for name, dim in _DIVIDED.items():
            weight = getattr(layer, name).weight
            shard = distribute_tensor(weight.detach(), mesh[tensor], [Shard(dim)])
            divided[name] = nn.Parameter(shard, requires_grad=weight.requires_grad)
    layer.__class__ = ParallelSparseMLA
    assert isinstance(layer, ParallelSparseMLA)
    layer._order, layer._groups = order, groups
    for name, parameter in divided.items():
        getattr(layer, name).weight = parameter
    return layer


def _refusal(layer: SparseMLA, weights: tuple[type, ...]) -> str | None:
    """Why the layer's options, or the weights of the projections that are read, of these types, would not do for calls;
    None if they do."""
    if layer.indexer_loss != "forward":
        return f"indexer_loss must be 'forward', since ranks add up its value, got {layer.indexer_loss!r}"
    for name in _DIVIDED:
        excess = excess_of(getattr(layer, name), weights)
        if excess is not None:
            return f"{name} must be nn.Linear without bias, adapters and hooks, got {excess}"
    return None


def _description(layer: SparseMLA, order: Order, refusal: str | None) -> str:
    """What must be equal on all ranks: otherwise their collectives wait forever, or their results differ."""
    options = [f"{name} {getattr(layer, name)!r}" for name in _OPTIONS] + [f"order {order!r}"]
    indexer = [f"indexer.{name} {getattr(layer.indexer, name)!r}" for name in _INDEXER_OPTIONS]
    parameters = [
        f"{name} {describe(parameter)}{'' if parameter.requires_grad else ' frozen'}"
        for name, parameter in layer.named_parameters()
    ]
    return ", ".join([*options, *indexer, *parameters, *([] if refusal is None else [refusal])])


def _check_equal(here: str, groups: _Groups, device: str) -> None:
    """Raises an error on all ranks of both groups if their descriptions differ."""
    members = [group for group in (groups.tensor, groups.context) if group is not None]
    if not members:
        return
    digest = int.from_bytes(hashlib.sha256(here.encode()).digest()[:7], "big")
    with _disable_current_modes():  # FakeTensorMode has no numbers
        extremes = torch.tensor([digest, -digest], device=device)
        for group in members:  # one after the other: then they are those of all ranks of both
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        differ = extremes.tolist() != [digest, -digest]
    if differ:
        raise ValueError(f"parallelize: the layers of the ranks differ; on this rank: {here}")


def _length(seq_len: Any) -> int:
    try:
        length = operator.index(seq_len)
    except TypeError:
        raise TypeError(f"ParallelSparseMLA: seq_len must be an int, got {seq_len!r}") from None
    if length < 0:
        raise ValueError(f"ParallelSparseMLA: seq_len must be at least 0, got {length}")
    return length


def _local(weight: Any) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
