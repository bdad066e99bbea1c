#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "../lookup.h"
#include "../macros.h"

namespace torchrec_ext::cpu {

// What a lookup contributes to its row's gradient: scale * gradient[offset .. offset + dim).
struct Contributions {
  std::unique_ptr<int64_t[]> gradient_offsets;  // [lookups]
  std::unique_ptr<float[]> scales;              // [lookups], or null where every scale is 1
};

// The lookups sorted by row. Row s (of `count`), numbered rows[s] across tables, has the lookups
// positions[begins[s]] up to positions[begins[s + 1]], in the order of the batch.
struct Segments {
  int64_t count = 0;
  const int64_t* rows = nullptr;        // [count]
  const uint32_t* begins = nullptr;     // [count + 1]
  const uint32_t* positions = nullptr;  // [lookups]
};

struct OwnedSegments {
  int64_t count = 0;
  std::unique_ptr<int64_t[]> rows;
  std::unique_ptr<uint32_t[]> begins;
  std::unique_ptr<uint32_t[]> positions;

  Segments view() const { return {count, rows.get(), begins.get(), positions.get()}; }
};

// A bag whose offsets are bad (position is -1), or a lookup whose index is. bag is -1 where all is
// well.
struct BadLookup {
  int64_t bag = -1;
  int64_t position = -1;
};

inline BadLookup first_bad(const std::vector<BadLookup>& found) {
  const auto bad = std::find_if(found.begin(), found.end(),
                                [](const BadLookup& lookup) { return lookup.bag >= 0; });
  return bad == found.end() ? BadLookup{} : *bad;
}

// Calls visit(bag, begin, end) for the bags from first to last; visit returns the position of a bad
// lookup, or -1.
template <class Index, class Visit>
TORCHREC_EXT_INLINE BadLookup visit_bags(const Batch<Index>& batch, int64_t first, int64_t last,
                                         const Visit& visit) {
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t begin = batch.offsets[bag];
    const int64_t end = batch.offsets[bag + 1];
    if (begin < 0 || end < begin || end > batch.lookups) {
      return {bag, -1};
    }
    const int64_t position = visit(bag, begin, end);
    if (position >= 0) {
      return {bag, position};
    }
  }
  return {};
}

// Sorts the batch's lookups by row, stably. Checks every offset and index; where one is bad, returns
// it, and the output is unspecified.
template <class Index>
BadLookup sort_by_row(const Layout& layout, const Batch<Index>& batch, OwnedSegments& segments);

// Finds each lookup's contribution; the same checks.
template <class Index>
BadLookup find_contributions(const Layout& layout, const Batch<Index>& batch,
                             Contributions& contributions);

}  // namespace torchrec_ext::cpu
