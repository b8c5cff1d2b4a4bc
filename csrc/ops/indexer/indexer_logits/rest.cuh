// The rest of the work, see tickets.h: the warp that feeds takes tickets and tells the warps that multiply which
// runs they are.
#pragma once

#include "runs.cuh"
#include "sm90/mbarrier.cuh"

namespace dsa::indexer_logits {

// Two runs of the rest in turn; a run without units is the end. The units of a block's start alone are no run: all
// warps meet in the run that a ticket is.
struct RestRuns {
  Run runs[2];
  uint64_t full[2], empty[2];  // barriers

  __device__ __forceinline__ void init(int readers) {
    for (int i = 0; i < 2; ++i) {
      sm90::barrier_init(&full[i], 1);
      sm90::barrier_init(&empty[i], readers);
    }
  }
};

// The side of the warp that feeds. Called by all its lanes.
template <bool kKeepsRest>
struct RestGiver {
  RestRuns& shared;
  unsigned* tickets;  // in global memory: how many have been taken
  int64_t units;      // of the rest
  int item;           // tickets' units only grow: earlier items have been passed
  int64_t item_begin;
  unsigned turn = 0;

  __device__ __forceinline__ RestGiver(RestRuns& shared, unsigned* tickets, const Run& rest)
      : shared(shared), tickets(tickets), units(rest.units), item(rest.item), item_begin(-rest.skip) {}

  // The next ticket that is not empty; an empty one if there is none.
  __device__ __forceinline__ Ticket take() const {
    for (;;) {
      unsigned number = 0;
      if (threadIdx.x % 32 == 0) number = atomicAdd(tickets, 1u);
      number = __shfl_sync(~0u, number, 0);
      if (number >= kRestRounds * gridDim.x) return {};
      const Ticket ticket = ticket_of(number, units, gridDim.x);
      if (ticket.begin < ticket.end) return ticket;
    }
  }
  // The run of the next ticket. Items have units_of(item) units each.
  template <class UnitsOf>
  __device__ __forceinline__ Run next(int items, UnitsOf units_of) {
    if (!kKeepsRest || units == 0) return {};
    const Ticket ticket = take();
    if (ticket.begin < ticket.end) {
      for (int size; item < items && item_begin + (size = units_of(item)) <= ticket.begin; ++item) item_begin += size;
    }
    const Run run{static_cast<int>(ticket.end - ticket.begin), item, static_cast<int>(ticket.begin - item_begin)};
    sm90::wait(&shared.empty[turn % 2], ~(turn / 2) % 2);
    if (threadIdx.x % 32 == 0) {
      shared.runs[turn % 2] = run;
      sm90::arrive(&shared.full[turn % 2]);
    }
    ++turn;
    return run;
  }
};

// The side of a warp that multiplies. Called by all its lanes, again when the run before has been processed.
template <bool kKeepsRest>
struct RestReader {
  RestRuns& shared;
  bool has_rest;
  unsigned turn = 0;

  __device__ __forceinline__ Run next() {
    if (!kKeepsRest || !has_rest) return {};
    if (turn > 0 && threadIdx.x % 32 == 0) sm90::arrive(&shared.empty[(turn - 1) % 2]);
    sm90::wait(&shared.full[turn % 2], turn / 2 % 2);
    return shared.runs[turn++ % 2];
  }
};

}  // namespace dsa::indexer_logits
