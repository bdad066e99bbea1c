#pragma once

#include <algorithm>
#include <cstdint>

#include "../gradient_order.h"
#include "segments.h"

namespace torchrec_ext::cpu {

inline constexpr int64_t kChunk = sum_size(0);
inline constexpr int64_t kNode = sum_size(1);

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

  // sum = the sum over at most kNode lookups; chunk is scratch of the same size.
  TORCHREC_EXT_INLINE void sum_node(int64_t begin, int64_t end, int64_t dim,
                                    float* __restrict__ sum, float* __restrict__ chunk) const {
    sum_chunk(begin, std::min(begin + kChunk, end), dim, sum);
    for (int64_t at = begin + kChunk; at < end; at += kChunk) {
      sum_chunk(at, std::min(at + kChunk, end), dim, chunk);
      add(chunk, dim, sum);
    }
  }

  static TORCHREC_EXT_INLINE void add(const float* __restrict__ addend, int64_t dim,
                                      float* __restrict__ sum) {
    for (int64_t column = 0; column < dim; ++column) {
      sum[column] += addend[column];
    }
  }
};

}  // namespace torchrec_ext::cpu
