"""The attention layer of DeepSeek-V3.2: multi-head latent attention to the keys that a lightning indexer selects."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from dsa_ext import functional
from dsa_ext.nn.absorbed import Absorbed, absorbed_attention
from dsa_ext.nn.absorption import Rope, absorbed_queries, all_keys
from dsa_ext.nn.expanded import NONE, Expanded, attention_of_heads, expanded_queries
from dsa_ext.nn.heads import multiply_heads
from dsa_ext.nn.indexer import IndexerTensors, LightningIndexer, check_ids, sequences
from dsa_ext.nn.paged_cache import FP8, DecodeStep, PagedKVCache, PrefillStep
from dsa_ext.nn.projections import plain_weight, weight_of
from dsa_ext.nn.rotary import RopeLayout, Yarn, apply_rope, check_layout, check_yarn, rope_tables
from dsa_ext.nn.rows import Rows, rows_of
from dsa_ext.nn.tuples import SparseMLAOutput as SparseMLAOutput
from dsa_ext.ops._checks import check_sizes, describe, dtype_name
from dsa_ext.ops._library import as_autocast, check_input, refuse_cache_in_transforms, refuse_reentrant_checkpointing
from dsa_ext.ops.sparse_mla import MAX_HEADS_PER_GROUP, VALUE_COLUMNS, WIDTHS

Phase = Literal["dense", "warmup", "sparse"]
IndexerLoss = Literal["forward", "deferred"]
_PHASES = ("dense", "warmup", "sparse")
#: Columns that the kernels take.
_ROPE_COLUMNS = WIDTHS[0] - VALUE_COLUMNS


class SparseMLA(nn.Module):
    """Causal multi-head latent attention, dense or sparse (arXiv 2512.02556, section 2.1).

    `phase` sets how the layer runs, and may be changed at any time:

    - "dense": every query attends to all keys up to its own position, by torch's scaled_dot_product_attention. The
      indexer does not run.
    - "warmup": the same, and the indexer learns to predict the attention to all keys. Freeze everything but the
      indexer, as DeepSeek does, with `layer.requires_grad_(False); layer.indexer.requires_grad_(True)`.
    - "sparse": every query attends to the `topk` keys that the indexer selects, and the indexer learns to predict the
      attention to these.

    In the sparse phase the first min(16384, topk * (2 + 128 // min(heads, 64))) queries run in the expanded form, in
    which each head has keys and values of its own, if a head has 128 + 64 columns and 128 of the value; else the first
    `topk`. With `cu_seqlens` and a `max_seqlen` of at most so many rows, all queries do. The other queries, the
    warm-up, and the dense phase with `cu_seqlens` run in the absorbed form, in which one latent row per token is key
    and value of all heads. With `ids`, `cache` or deterministic algorithms all queries do, and with heads of other
    columns also with `cu_seqlens` and in compiled calls.

    The indexer's input is detached: the indexer's loss trains the indexer only, and the language-model loss trains
    everything else. Add `indexer_loss` to the loss, or call backward on both (not if it is "deferred").

    Parameters, with the names of Hugging Face's DeepSeek models: `q_a_proj`, `q_a_layernorm`, `q_b_proj`,
    `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`, and those of `indexer` (see LightningIndexer). RoPE
    is applied to the last columns of each head of q and of the output of `kv_a_proj_with_mqa`.

    On a GPU the layer must be in bf16. On the CPU it may also be in fp32 or float64.

    Args:
        hidden_size: columns of the input and of the output.
        heads: attention heads, 1 to 128.
        q_lora_rank: columns of the query latent.
        nope_dim, rope_dim, v_dim: columns per head without RoPE, with RoPE, and of the value. rope_dim is 64.
        kv_lora_rank: columns of the key latent; 512.
        topk: number of keys that a query attends to, 1 to 4096.
        rope_theta: base of RoPE's frequencies, also in the indexer.
        rope: which columns RoPE rotates together, "half" or "interleaved", see apply_rope. DeepSeek-V3.2 has
            "interleaved" here and "half" in the indexer, GLM-MoE-DSA "interleaved" in both.
        yarn: slows RoPE's frequencies for longer sequences, also in the indexer, and scales sm_scale.
        indexer: further arguments of LightningIndexer.
        indexer_loss: where the phase "sparse" computes the indexer's loss: in the "forward", or "deferred" to the
            backward, which has the attention's weights anyway. Then the loss is 0 until a backward in which it takes
            part has run, and has its value afterwards: multiply it by constants and add it to other losses only. It is
            computed in the forward as before in compiled calls, and if only one of attention and indexer learns.
        phase: the initial phase.
    """

    indexer_loss: IndexerLoss = "forward"  # of layers that were pickled before there was a choice

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        q_lora_rank: int = 1536,
        nope_dim: int = 128,
        rope_dim: int = 64,
        v_dim: int = 128,
        kv_lora_rank: int = 512,
        topk: int = 2048,
        rope_theta: float = 10_000.0,
        rope: RopeLayout = "half",
        yarn: Yarn | None = None,
        indexer: dict[str, Any] | None = None,
        indexer_loss: IndexerLoss = "forward",
        phase: Phase = "sparse",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes("SparseMLA", hidden_size=hidden_size, nope_dim=nope_dim, v_dim=v_dim, topk=topk)
        check_sizes("SparseMLA", q_lora_rank=q_lora_rank, rope_dim=rope_dim, kv_lora_rank=kv_lora_rank)
        for name, size, only in (("rope_dim", rope_dim, _ROPE_COLUMNS), ("kv_lora_rank", kv_lora_rank, VALUE_COLUMNS)):
            if size != only:
                raise ValueError(f"SparseMLA: {name} must be {only}, got {size!r}")
        if type(heads) is not int or not 1 <= heads <= MAX_HEADS_PER_GROUP:
            raise ValueError(f"SparseMLA: heads must be an int from 1 to {MAX_HEADS_PER_GROUP}, got {heads!r}")
        self.hidden_size = hidden_size
        self.heads, self.nope_dim, self.rope_dim, self.v_dim = heads, nope_dim, rope_dim, v_dim
        check_layout("SparseMLA", "rope", rope)
        check_yarn("SparseMLA", yarn, rope_theta)
        self.kv_lora_rank, self.topk = kv_lora_rank, topk
        self.rope_theta, self.rope, self.yarn = rope_theta, rope, yarn
        self.sm_scale = (nope_dim + rope_dim) ** -0.5 * (1.0 if yarn is None else yarn.sm_scale)
        if indexer_loss not in ("forward", "deferred"):
            raise ValueError(f"SparseMLA: indexer_loss must be 'forward' or 'deferred', got {indexer_loss!r}")
        self.indexer_loss = indexer_loss
        self.phase = phase

        def projection(columns: int, rows: int) -> nn.Linear:
            return nn.Linear(columns, rows, bias=False, device=device, dtype=dtype)

        self.q_a_proj = projection(hidden_size, q_lora_rank)
        self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps=1e-6, device=device, dtype=dtype)
        self.q_b_proj = projection(q_lora_rank, heads * (nope_dim + rope_dim))
        self.kv_a_proj_with_mqa = projection(hidden_size, kv_lora_rank + rope_dim)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, eps=1e-6, device=device, dtype=dtype)
        self.kv_b_proj = projection(kv_lora_rank, heads * (nope_dim + v_dim))
        self.o_proj = projection(heads * v_dim, hidden_size)
        if indexer is not None and not isinstance(indexer, dict):
            raise TypeError(f"SparseMLA: indexer must be a dict of arguments, got {type(indexer).__name__}")
        options = {"rope_theta": rope_theta, "yarn": yarn, "device": device, "dtype": dtype, **(indexer or {})}
        self.indexer = LightningIndexer(hidden_size, q_lora_rank, **options)
        self.indexer.check_topk(topk)

    @property
    def phase(self) -> Phase:
        """How the layer runs: "dense", "warmup" or "sparse"."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        if phase not in _PHASES:
            raise ValueError(f"SparseMLA: phase must be 'dense', 'warmup' or 'sparse', got {phase!r}")
        self._phase: Phase = phase

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        ids: Tensor | None = None,
        cache: PagedKVCache | None = None,
        layer: int | None = None,
    ) -> SparseMLAOutput:
        """
        Args:
            x: [B, S, hidden_size].
            positions: positions for RoPE, [S] or [B, S]; 0 to S - 1 in each sequence by default. What a query sees
                depends on the order of the rows alone.
            cu_seqlens: for B = 1, the rows at which packed sequences begin, and S: int32 [number of sequences + 1],
                ascending from 0, on the device of x; a sequence may be empty. Its numbers are not checked, which would
                wait for the GPU. Queries see keys of their own sequence only.
            max_seqlen: with cu_seqlens, at least the length of the longest sequence, if it is known: see above. It is
                not checked: queries of longer sequences see only so many keys up to their own.
            ids: keys that an earlier layer selected [B, S, K], int32, to share its indexer; only in the phase "sparse".
                Later keys and those of other sequences are ignored. The indexer does not run, and there is no loss.
            cache: keys of earlier tokens, to which those of x are added: x has the tokens of the cache's current step,
                [1, T, hidden_size] after `cache.prefill`, [B, N, hidden_size] after `cache.decode`. Only in the phase
                "sparse", and without gradients. The cache knows the positions and the sequences.
                Then `ids` are cache slots, which decoding reads as they are.
            layer: number of this layer in the cache; may be left out if it has one.

        Returns:
            SparseMLAOutput. Its ids are rows of x, also with cu_seqlens; with a cache they are its slots,
            page * page_size + row in the page.
        """
        self._check_input(x)
        if cache is not None:
            if any(given is not None for given in (positions, cu_seqlens, max_seqlen)):
                names = "positions, cu_seqlens and max_seqlen"
                raise ValueError(f"SparseMLA: {names} must be None with a cache, which has them")
            return self._with_cache(x, ids, cache, self._check_cache(x, cache, layer))
        if layer is not None:
            raise ValueError(f"SparseMLA: layer is a number in a cache, got {layer!r} without a cache")
        rows = rows_of(x, positions, cu_seqlens, max_seqlen)
        if ids is not None:
            self._check_ids(ids, x)
        q_latent = self._q_latent(x)
        if self.phase == "dense" and rows.bounds is None:
            values = self._dense(self._heads(q_latent), *self._latent_keys(x, rows), self._kv_b(x), rows)
            return SparseMLAOutput(self.o_proj(values.flatten(2)), None, None)
        tensors = None
        if self.phase != "dense" and ids is None:
            tensors = self.indexer(x.detach(), q_latent.detach(), rows.positions)
            if self.phase == "sparse":
                ids = self.indexer.select(tensors, self.topk, rows.bounds)
        out_weight = plain_weight(self.o_proj)
        # Its own indexer selects each key once, and every key of the first queries; ids from elsewhere may be any.
        expanded = NONE
        if tensors is not None and ids is not None:
            sizes = self.topk, self.heads, self.nope_dim, self.rope_dim, self.v_dim
            bounded = rows.bounds is not None
            expanded = expanded_queries(x.shape[1], *sizes, bounded=bounded, longest=rows.longest)
        out, loss = self._absorbed(
            self._heads(q_latent), self._keys(x, rows), self._kv_b(x), tensors, ids, rows, out_weight, expanded
        )
        return SparseMLAOutput(self.o_proj(out.flatten(2)) if out_weight is None else out, loss, ids)

    def make_cache(
        self,
        layers: int,
        num_blocks: int,
        max_sequences: int,
        max_length: int,
        *,
        page_size: int = 64,
        dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> PagedKVCache:
        """An empty cache for a model with `layers` layers like this one. `dtype` is that of the latent keys: by default
        the layer's own (autocast's if autocast is enabled), and if that is bf16 also float8_e4m3fn. The indexer's keys
        are in float8_e4m3fn if its precision is "fp8", and otherwise in the layer's own."""
        weight = self.kv_a_proj_with_mqa.weight
        own = as_autocast(weight.detach()[:0]).dtype
        if dtype == FP8 and own != torch.bfloat16:
            raise ValueError(f"SparseMLA: dtype may be float8_e4m3fn in bfloat16 layers only, got {dtype_name(own)}")
        if dtype not in (None, own, FP8):
            expected = f"{dtype_name(own)}, the layer's own{', or float8_e4m3fn' * (own == torch.bfloat16)}"
            raise ValueError(f"SparseMLA: dtype must be {expected}, got {dtype_name(dtype)}")
        return PagedKVCache(
            layers, num_blocks, max_sequences, max_length, page_size=page_size, index_columns=self.indexer.head_dim,
            dtype=own if dtype is None else dtype, index_dtype=FP8 if self.indexer.precision == "fp8" else own,
            batch_invariant=batch_invariant, device=weight.device,
        )  # fmt: skip

    @torch.no_grad()
    def attention_to_all(self, x: Tensor) -> Tensor:
        """Weights of dense attention, averaged over heads: [B, S, S], fp32 (float64 for float64 inputs)."""
        self._check_input(x)
        rows = rows_of(x)
        heads, kv = self._heads(self._q_latent(x)), self._keys(x, rows)
        every = all_keys(heads, kv)
        p = self._attend(heads, kv, self._kv_b(x), every, rows, distribution=True).distribution
        assert p is not None
        return p[..., : x.shape[1]] / self.heads

    def select(self, x: Tensor) -> Tensor:
        """The keys that the indexer selects for the layer's input [B, S, topk], int32: ascending, then -1."""
        self._check_input(x)
        return self.indexer.select(self.indexer(x, self._q_latent(x)), self.topk)

    def _check_input(self, x: Any) -> None:
        check_input("SparseMLA", x, plain_weight(self.q_a_proj), self.hidden_size)

    def _check_ids(self, ids: Tensor, x: Tensor) -> None:
        if self.phase != "sparse":
            raise ValueError(f"SparseMLA: ids must be None except in the phase 'sparse', got them in {self.phase!r}")
        check_ids("SparseMLA", ids, x)

    def _check_cache(self, x: Tensor, cache: PagedKVCache, layer: int | None) -> int:
        """The number of the layer in the cache."""
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"SparseMLA: cache must be a PagedKVCache, got {type(cache).__name__}")
        refuse_cache_in_transforms("SparseMLA")
        if cache.device != x.device:
            raise ValueError(f"SparseMLA: cache is on {cache.device}, x on {x.device}")
        if self.phase != "sparse":
            raise ValueError(f"SparseMLA: a cache is for the phase 'sparse', got {self.phase!r}")
        if torch.is_grad_enabled():
            raise ValueError("SparseMLA: a cache has no gradients, call under torch.no_grad()")
        if layer is None and cache.layers > 1:
            raise ValueError(
                f"SparseMLA: layer must be the number of this layer in a cache of {cache.layers}, got None"
            )
        expected = cache.step.positions.shape
        if x.shape[:2] != expected:
            name = "decode" if isinstance(cache.step, DecodeStep) else "prefill"
            tokens = f"[{expected[0]}, {expected[1]}, {self.hidden_size}], the tokens of the last cache.{name}"
            raise ValueError(f"SparseMLA: x must be {tokens}, got {describe(x)}")
        return 0 if layer is None else layer

    def _with_cache(self, x: Tensor, ids: Tensor | None, cache: PagedKVCache, layer: int) -> SparseMLAOutput:
        """A step of prefill with the operators of training, on keys that are gathered from their pages; or one of
        decoding, with operators that read pages."""
        if ids is not None:
            self._check_ids(ids, x)
        step = cache.step
        rows = Rows(cache.rows(), (step.starts, step.ends) if isinstance(step, PrefillStep) else None)
        q_latent = self._q_latent(x)
        cache.write(layer, self._keys(x, rows))
        keys = None  # that are selected, by their numbers among those that prefill gathers
        lengths = None  # numbers of slots behind which all is padding, if they are known
        if ids is None:
            ids = self.indexer.select_cached(self.indexer(x, q_latent, rows.positions), cache, layer, self.topk)
            if isinstance(step, PrefillStep):
                keys, ids = ids, cache.ids_of_keys(ids)
            else:
                lengths = step.context_lens
        elif isinstance(step, PrefillStep):
            keys = cache.keys_of_ids(ids)
        heads, kv_b = as_autocast(self._heads(q_latent)), self._kv_b(x)
        if keys is not None:
            kv, out_weight = cache.gather(layer, heads.dtype)[None, :, None], plain_weight(self.o_proj)
            out = self._attend(heads, kv, kv_b, keys[:, :, None], rows, out_weight).out
            return SparseMLAOutput(self.o_proj(out.flatten(2)) if out_weight is None else out, None, ids)
        key_weight, value_weight = self._weights(kv_b)
        q = absorbed_queries(heads, key_weight, self._rope(heads, rows))
        options = {"sm_scale": self.sm_scale, "batch_invariant": cache.batch_invariant}
        latent, _ = functional.sparse_mla_decode(q, cache.kv(layer), ids, topk_length=lengths, **options)
        return SparseMLAOutput(self.o_proj(multiply_heads(latent, value_weight.mT).flatten(2)), None, ids)

    def _dense(self, heads: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, rows: Rows) -> Tensor:
        """Attention to all keys up to each query's own position [B, S, H, v_dim]."""
        nope, rope = heads.split([self.nope_dim, self.rope_dim], dim=-1)
        q = torch.cat([nope, self._rotated(rope, rows)], dim=-1)
        return attention_of_heads(q, latent, k_rope, kv_b, self.sm_scale)

    def _absorbed(
        self,
        heads: Tensor,
        kv: Tensor,
        kv_b: Tensor,
        tensors: IndexerTensors | None,
        ids: Tensor | None,
        rows: Rows,
        out_weight: Tensor | None = None,
        expanded: Expanded = NONE,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of each head in the absorbed form [B, S, H, v_dim], and the indexer's loss.

        Args:
            heads: queries of each head [B, S, H, nope_dim + rope_dim], without RoPE.
            kv: keys [B, T, 1, kv_lora_rank + rope_dim].
            kv_b: weight of kv_b_proj.
            tensors: of the indexer; None if it does not run.
            ids: selected keys; None if all keys are read.
            out_weight: if given, the first result is the projection of all heads by it [B, S, hidden_size].
        """
        learns = tensors is not None and torch.is_grad_enabled()
        refuse_reentrant_checkpointing(tensors or ())
        listed = all_keys(heads, kv) if ids is None else ids[:, :, None]
        learner = tensors if learns and ids is not None else None
        out, lse, _, loss = self._attend(
            heads, kv, kv_b, listed, rows, out_weight,
            learner=learner, expanded=expanded,
        )  # fmt: skip
        if tensors is None or not learns or loss is not None:
            return out, loss
        assert lse is not None
        with torch.no_grad():
            q = absorbed_queries(heads, self._weights(kv_b)[0], self._rope(heads, rows))
        each = sequences(*tensors, q, kv.detach()[:, :, 0], lse)
        bounds = {name: bound[:1].flatten() for name, bound in rows.visible().items()}  # of all sequences of a batch
        losses = [functional.indexer_dense_loss(*one, sm_scale=self.sm_scale, **bounds) for one in each]
        return out, torch.stack(losses).mean()

    def _attend(
        self,
        heads: Tensor,
        kv: Tensor,
        kv_b: Tensor,
        listed: Tensor,
        rows: Rows,
        out_weight: Tensor | None = None,
        *,
        distribution: bool = False,
        learner: IndexerTensors | None = None,
        expanded: Expanded = NONE,
    ) -> Absorbed:
        """Attention to the listed keys."""
        key_weight, value_weight = self._weights(kv_b)
        return absorbed_attention(
            heads, key_weight, value_weight, kv, listed, self._rope(heads, rows),
            sm_scale=self.sm_scale, out_weight=out_weight, distribution=distribution, learner=learner,
            deferred=self.indexer_loss == "deferred", expanded=expanded, **rows.visible(),
        )  # fmt: skip

    def _kv_b(self, x: Tensor) -> Tensor:
        """The weight of kv_b_proj, of all heads, for the layer's input."""
        return weight_of("SparseMLA", self.kv_b_proj, x)

    def _weights(self, kv_b: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of kv_b_proj for keys and for values, per head: [H, nope_dim or v_dim, kv_lora_rank]."""
        weights = kv_b.view(self.heads, -1, self.kv_lora_rank)
        keys, values = weights.split([self.nope_dim, self.v_dim], dim=1)
        return keys, values

    def _rope(self, heads: Tensor, rows: Rows) -> Rope:
        tables = rope_tables(heads, rows.positions, self.rope_theta, self.rope_dim, self.yarn)
        return Rope(*tables, self.rope == "interleaved")

    def _keys(self, x: Tensor, rows: Rows) -> Tensor:
        """The keys of the absorbed form [B, S, 1, kv_lora_rank + rope_dim]."""
        return torch.cat(self._latent_keys(x, rows), dim=-1)[:, :, None]

    def _q_latent(self, x: Tensor) -> Tensor:
        """[B, S, q_lora_rank]."""
        latent: Tensor = self.q_a_layernorm(self.q_a_proj(x))
        return latent

    def _heads(self, q_latent: Tensor) -> Tensor:
        """Queries of all heads [B, S, H, nope_dim + rope_dim], without RoPE."""
        heads: Tensor = self.q_b_proj(q_latent).unflatten(-1, (self.heads, self.nope_dim + self.rope_dim))
        return heads

    def _latent_keys(self, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """The latent keys [B, S, kv_lora_rank] and their RoPE columns [B, S, rope_dim]."""
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        # The norm copies what is not contiguous, here and again in the backward. Autocast computes norms in fp32.
        latent = self.kv_a_layernorm(latent.contiguous()).to(k_rope.dtype)
        return latent, self._rotated(k_rope, rows)

    def _rotated(self, x: Tensor, rows: Rows) -> Tensor:
        return apply_rope(x, rows.positions, self.rope_theta, layout=self.rope, yarn=self.yarn)
