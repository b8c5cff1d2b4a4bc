"""Parts of the calls that compute-sanitizer watches, by family: small calls of every operator and kernel variant."""

from collections.abc import Callable

from sanitized import block_sparse, fp8, indexer, mhc, sparse_mha, sparse_mla

PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        sparse_mla.sparse_mla_fwd,
        sparse_mla.sparse_mla_max_fwd,
        sparse_mla.sparse_mla_bwd,
        sparse_mla.sparse_mla_bwd_merged,
        sparse_mla.attn_dist,
        sparse_mla.sparse_mla_decode,
        sparse_mla.pack_kv_fp8,
        sparse_mla.rope,
        sparse_mha.sparse_mha,
        indexer.topk_select,
        indexer.indexer,
        indexer.indexer_paged,
        indexer.indexer_training,
        indexer.indexer_packed,
        indexer.indexer_loss,
        block_sparse.block_select,
        block_sparse.block_sparse_attn_fwd,
        block_sparse.block_sparse_attn_bwd,
        block_sparse.coarse_attn,
        block_sparse.gated_fusion,
        fp8.act_quant,
        fp8.fp8_gemm,
        mhc.mhc_pre_fwd,
        mhc.mhc_pre_bwd,
        mhc.mhc_post,
    )
}
