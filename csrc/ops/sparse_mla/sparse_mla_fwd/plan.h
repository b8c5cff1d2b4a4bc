// Split-KV planning: pure host functions, tested without a GPU.
#pragma once

namespace dsa::sparse_mla_fwd {

inline constexpr int kBlockK = 64;      // keys per tile
inline constexpr int kBlockHeads = 64;  // heads per CTA
inline constexpr int kMaxSplits = 32;

inline constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The number of parts that each query's keys are split into (split-KV). One if there are enough (query, head block)
// items to fill the GPU; else as many as fill it once, with at least four tiles per part to pay for its start.
inline int plan_splits(long items, int topk, int num_sms) {
  const int tiles = ceil_div(topk, kBlockK);
  if (items <= 0 || items * 2 > num_sms) return 1;
  int splits = static_cast<int>(num_sms / items);
  if (splits > tiles / 4) splits = tiles / 4;
  if (splits > kMaxSplits) splits = kMaxSplits;
  return splits < 1 ? 1 : splits;
}

}  // namespace dsa::sparse_mla_fwd
