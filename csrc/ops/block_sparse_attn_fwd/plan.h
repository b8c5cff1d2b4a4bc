// How the work is cut: pure functions of host and device, tested without a GPU.
//
// Query blocks go round the workers, so that those of one head run together and find its keys in L2. What is left for
// the last round is cut evenly instead: a worker takes a part of a block's list.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define DSA_HOST_DEVICE __host__ __device__
#else
#define DSA_HOST_DEVICE
#endif

namespace dsa::block_sparse_attn_fwd {

inline constexpr int kStreams = 3;  // warpgroups of a CTA that compute: workers

struct Plan {
  int workers;
  int whole, cut;  // query blocks that go round, and those behind them that are cut
  int units;       // in which a list is cut
};

// What a worker takes: of the list of query block `item`, units [begin, end).
struct Piece {
  int item, begin, end;
};

// First unit of the cut items that is not of an earlier worker. (At most two rounds are cut, in 64 units: 32 bits do.)
constexpr DSA_HOST_DEVICE int first_unit(const Plan& plan, int worker) {
  return worker * plan.cut * plan.units / plan.workers;
}

// A worker's pieces in their order.
class Pieces {
  const Plan& plan_;
  int item_, unit_, last_unit_;

 public:
  DSA_HOST_DEVICE constexpr Pieces(const Plan& plan, int worker)
      : plan_(plan), item_(worker), unit_(first_unit(plan, worker)), last_unit_(first_unit(plan, worker + 1)) {}

  // False behind the last one.
  DSA_HOST_DEVICE constexpr bool next(Piece& piece) {
    if (item_ < plan_.whole) {
      piece = {item_, 0, plan_.units};
      item_ += plan_.workers;
      return true;
    }
    if (unit_ == last_unit_) return false;
    const int begin = unit_ % plan_.units, end = begin + last_unit_ - unit_;
    piece = {plan_.whole + unit_ / plan_.units, begin, end < plan_.units ? end : plan_.units};
    unit_ += piece.end - piece.begin;
    return true;
  }
};

// A worker has two pieces at most that are not whole lists: the end of one and the beginning of another. Where the
// result of such a one lies.
constexpr DSA_HOST_DEVICE int partial_slot(int worker, int begin) { return worker * 2 + (begin == 0); }

// For so many query blocks with lists of so many slots.
inline Plan plan_work(int items, int slots, int num_sms) {
  constexpr int kMinTiles = 4;  // of a piece, so that its start pays
  const int workers = num_sms * kStreams, left = items % workers;
  const int units = std::clamp(slots / kMinTiles, 1, 64);
  int cut = 0;
  if (units > 1 && left * 8 < workers * 7) {  // else the last round is nearly full
    // A small rest is cut alone, a larger one with the round before, so that pieces are not much less than a list.
    cut = left * 3 <= workers || items < workers ? left : left + workers;
  }
  return {workers, items - cut, cut, units};
}

}  // namespace dsa::block_sparse_attn_fwd
