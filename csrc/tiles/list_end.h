// Where kernels search for the end of a list, behind which all is padding. A host header, tested without a GPU.
#pragma once

namespace dsa::tiles {

// The most CTAs that may share a list and search it. With more, the search would take each as long as its part.
inline constexpr int kMostSearchingParts = 8;

// Whether lists of `topk` slots in `parts` are searched, if that pays from `fewest_slots` of a part on.
constexpr bool searches_lists(int topk, int parts, int fewest_slots) {
  return parts <= kMostSearchingParts && topk >= fewest_slots * parts;
}

}  // namespace dsa::tiles
