// Work distribution: pure functions of host and device, tested without a GPU.
//
// Query blocks go to the workers round-robin, so that those of one head run together and find its keys in L2. The
// blocks of an incomplete last round are split evenly instead (split-KV): a part of a block's list goes to a CTA, whose
// workers share it as a team.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define DSA_HOST_DEVICE __host__ __device__
#else
#define DSA_HOST_DEVICE
#endif

namespace dsa::block_sparse_attn_fwd {

inline constexpr int kStreams = 3;  // compute warpgroups of a CTA: its workers

struct Plan {
  int workers;     // worker blockIdx + stream * CTAs: those of a CTA are far apart
  int whole, cut;  // query blocks taken round-robin, and those after them, which teams share
  int units;       // parts of a list, the granularity of a split
  int teams;       // number of CTAs, the first ones, that have units: at least one each
};

// A worker's piece of work: units [begin, end) of the list of query block `item`, alone or with its team.
struct Piece {
  int item, begin, end;
};

// A team's first unit of the split items. (There are fewer than `workers` of these, so 32 bits suffice.)
constexpr DSA_HOST_DEVICE int first_unit(const Plan& plan, int team) {
  return team * plan.cut * plan.units / plan.teams;
}

// The team that has a unit.
constexpr DSA_HOST_DEVICE int team_of_unit(const Plan& plan, int unit) {
  return ((unit + 1) * plan.teams - 1) / (plan.cut * plan.units);
}

// A worker's pieces in order; the workers of a team have the same pieces of the split items.
class Pieces {
  const Plan& plan_;
  int item_, unit_ = 0, last_unit_ = 0;

 public:
  DSA_HOST_DEVICE constexpr Pieces(const Plan& plan, int worker) : plan_(plan), item_(worker) {
    const int team = worker % (plan.workers / kStreams);
    if (team >= plan.teams) return;
    unit_ = first_unit(plan, team), last_unit_ = first_unit(plan, team + 1);
  }

  // Returns false after the last one.
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

// Where a partial result is stored. A team has at most two pieces that are not whole lists: the end of one and the
// beginning of another.
constexpr DSA_HOST_DEVICE int partial_slot(int team, bool begins_list) { return team * 2 + begins_list; }

constexpr bool has_parts(const Plan& plan) { return plan.cut > 0 && plan.cut % plan.teams != 0; }

// For `items` query blocks whose lists have `slots` slots.
inline Plan plan_work(int items, int slots, int num_sms) {
  constexpr int kMinBlocks = 6;  // per part, to pay for its start
  constexpr int kMaxUnits = 1024;
  const int workers = num_sms * kStreams, left = items % workers;
  const bool is_full = left * 8 >= workers * 7;  // nearly full: the last round
  const int cut = slots < kMinBlocks || is_full ? 0 : left;
  const int teams = cut * std::min(slots / kMinBlocks, kMaxUnits);
  return {workers, items - cut, cut, std::min(slots, kMaxUnits), std::min(num_sms, teams)};
}

}  // namespace dsa::block_sparse_attn_fwd
