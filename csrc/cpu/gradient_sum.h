#pragma once

#include <algorithm>
#include <cstdint>

#include "../macros.h"
#include "segments.h"

namespace torchrec_ext::cpu {

// The canonical order of a row's sum: chunks of 32 lookups, each started from its first element,
// then the chunk sums in order. Chunks of a long row can so be summed by several threads, and on a
// GPU by several warps, with the same bits.
inline constexpr int64_t kChunk = 32;

// FBGEMM clips the output gradient, element by element, before per-sample weights and pooling. NaN
// passes through.
TORCHREC_EXT_INLINE float clip(float g, float max_gradient) {
  return g < -max_gradient ? -max_gradient : (g > max_gradient ? max_gradient : g);
}

struct GradientSource {
  const float* gradient;
  const uint32_t* positions;
  const Contributions* contributions;
  float max_gradient;

  TORCHREC_EXT_INLINE const float* row(int64_t lookup) const {
    return gradient + contributions->gradient_offsets[positions[lookup]];
  }

  TORCHREC_EXT_INLINE float scale(int64_t lookup) const {
    return contributions->scales != nullptr ? contributions->scales[positions[lookup]] : 1.0f;
  }

  // out = the sum over at most kChunk lookups.
  TORCHREC_EXT_INLINE void sum_chunk(int64_t begin, int64_t end, int64_t dim,
                                     float* __restrict__ out) const {
    constexpr int64_t kAhead = 4;
    const float* __restrict__ first = row(begin);
    const float first_scale = scale(begin);
    for (int64_t column = 0; column < dim; ++column) {
      out[column] = clip(first[column], max_gradient) * first_scale;
    }
    for (int64_t lookup = begin + 1; lookup < end; ++lookup) {
      if (lookup + kAhead < end) {
        __builtin_prefetch(row(lookup + kAhead));
      }
      const float* __restrict__ next = row(lookup);
      const float next_scale = scale(lookup);
      for (int64_t column = 0; column < dim; ++column) {
        out[column] += clip(next[column], max_gradient) * next_scale;
      }
    }
  }
};

}  // namespace torchrec_ext::cpu
