// CTAs differ in speed by a few percent. So long calls keep back a rest of their work, see runs.cuh, of which CTAs that
// are done with their share take tickets. No result depends on which CTA takes which.
#pragma once

#include <cstdint>

namespace dsa::indexer_logits {

// Units [begin, end) of the rest.
struct Ticket {
  int64_t begin, end;
};

// The rest of a call of `units` units in `items` items: one part of kRestShare, or nothing where that is less than
// kFewestRestUnits a CTA, because the start of a run costs several, or where items are short, because the one in which
// a ticket begins is searched for.
inline constexpr int kRestShare = 16, kFewestRestUnits = 64, kFewestItemUnits = 256;
constexpr int64_t rest_of(int64_t units, int items, unsigned ctas) {
  const int64_t rest = units / kRestShare;
  const bool is_worth_it = rest >= int64_t{kFewestRestUnits} * ctas && units >= int64_t{kFewestItemUnits} * items;
  return is_worth_it ? rest : 0;
}

// The rest is given away in rounds of a ticket for each CTA: in each but the last, half of what is left.
inline constexpr unsigned kRestRounds = 3;

// `number`: below kRestRounds * ctas.
constexpr Ticket ticket_of(unsigned number, int64_t units, unsigned ctas) {
  const unsigned round = number / ctas, turn = number % ctas;
  const int64_t left = units >> round, round_begin = units - left;
  const int64_t round_units = round + 1 < kRestRounds ? left - (left >> 1) : left;
  return {round_begin + round_units * turn / ctas, round_begin + round_units * (turn + 1) / ctas};
}

}  // namespace dsa::indexer_logits
