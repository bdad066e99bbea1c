#pragma once

#include <cstdint>

#include "macros.h"

namespace torchrec_ext {

inline constexpr int kReducePartials = 128;

template <int kPartials, class Term>
TORCHREC_EXT_INLINE float reduce_row_in(int64_t dim, Term&& term) {
  float partials[kPartials] = {};
  int64_t base = 0;
  for (; base + kPartials <= dim; base += kPartials) {
    for (int j = 0; j < kPartials; ++j) {
      partials[j] += term(base + j);
    }
  }
  for (int j = 0; base + j < dim; ++j) {
    partials[j] += term(base + j);
  }
  for (int offset = kPartials / 2; offset > 0; offset /= 2) {
    for (int j = 0; j < offset; ++j) {
      partials[j] += partials[j + offset];
    }
  }
  return partials[0];
}

// The sum of term(0) .. term(dim - 1) in the one order that every device keeps: 128 partial sums,
// the j-th over the columns c = j (mod 128) in ascending order, then folded by 64, 32, .. 1. On a GPU
// a lane holds four neighbouring partials, and the lanes of a row fold by xor shuffles.
//
// Partials start from +0 and so are never -0: those beyond the last column add nothing, and narrow
// rows leave them out.
template <class Term>
TORCHREC_EXT_INLINE float reduce_row(int64_t dim, Term&& term) {
  if (dim <= kReducePartials / 4) {
    return reduce_row_in<kReducePartials / 4>(dim, term);
  }
  if (dim <= kReducePartials / 2) {
    return reduce_row_in<kReducePartials / 2>(dim, term);
  }
  return reduce_row_in<kReducePartials>(dim, term);
}

}  // namespace torchrec_ext
