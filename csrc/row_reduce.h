#pragma once

#include <cstdint>

#include "macros.h"

namespace torchrec_ext {

inline constexpr int kReducePartials = 32;

// The sum of term(0) .. term(dim - 1) in the one order that every device keeps: 32 partial sums,
// the j-th over the columns c = j (mod 32) in ascending order, then folded by 16, 8, 4, 2 and 1. A
// warp does the fold with xor shuffles.
template <class Term>
TORCHREC_EXT_INLINE float reduce_row(int64_t dim, Term&& term) {
  float partials[kReducePartials] = {};
  int64_t base = 0;
  for (; base + kReducePartials <= dim; base += kReducePartials) {
    for (int j = 0; j < kReducePartials; ++j) {
      partials[j] += term(base + j);
    }
  }
  for (int j = 0; base + j < dim; ++j) {
    partials[j] += term(base + j);
  }
  for (int offset = kReducePartials / 2; offset > 0; offset /= 2) {
    for (int j = 0; j < offset; ++j) {
      partials[j] += partials[j + offset];
    }
  }
  return partials[0];
}

}  // namespace torchrec_ext
