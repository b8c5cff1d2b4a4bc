// What the launches of this folder share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "params.h"
#include "sm90/tensor_map.h"

namespace dsa::sparse_mla_bwd {

// Launches dq of `queries` queries from p.first_item on by pairs of CTAs, with their additions to dkv or, in a
// deterministic call, their rows of dkv. Returns null, or a text that says what failed.
const char* launch_pairs(Params p, int64_t queries, cudaStream_t stream);

// Tensor maps of q, dout and dq with boxes of `heads` heads of some positions.
template <class Maps>
inline const char* encode_maps(Maps& maps, const Params& p, int heads, int positions) {
  const int group_heads = p.heads / p.groups;
  const auto contiguous = [&](void* data, int columns) {
    const int64_t row = int64_t(p.heads) * columns;
    return sm90::HeadTensor{data,    columns,      group_heads, p.groups,
                            p.seq_q, p.batch,      columns,     int64_t(group_heads) * columns,
                            row,     p.seq_q * row};
  };
  const sm90::HeadBox box{.heads = heads, .positions = positions};
  if (!sm90::encode_head_tensor(&maps.q,
                                {p.q, p.d_qk, group_heads, p.groups, p.seq_q, p.batch, p.q_stride_h,
                                 group_heads * p.q_stride_h, p.q_stride_s, p.q_stride_b},
                                box)) {
    return "no tensor map for q";
  }
  if (!sm90::encode_head_tensor(&maps.dout, contiguous(const_cast<void*>(p.dout), p.d_v), box)) {
    return "no tensor map for dout";
  }
  return sm90::encode_head_tensor(&maps.dq, contiguous(p.dq, p.d_qk), box) ? nullptr : "no tensor map for dq";
}

}  // namespace dsa::sparse_mla_bwd
