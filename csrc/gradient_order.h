#pragma once

#include <cstdint>

#include "macros.h"

namespace torchrec_ext {

// The order in which a row's lookups are summed, the same on every device: a tree. 32 lookups make a
// sum, 32 of these the sum of 1,024 lookups, 32 of those the sum of 32,768; the last sum of each kind
// may have fewer. Each starts from its first element and adds the others in the order of the batch, and
// so do the sums of 32,768. Sums of a long row can so be made by many threads, with the same bits.
inline constexpr int kFanOutBits = 5;
inline constexpr int kFanOut = 1 << kFanOutBits;
inline constexpr int kLevels = 3;

// The lookups of a sum of level 0, 1 or 2 are 2 to the power of this.
TORCHREC_EXT_INLINE constexpr int sum_bits(int level) { return kFanOutBits * (level + 1); }
TORCHREC_EXT_INLINE constexpr uint32_t sum_size(int level) { return 1u << sum_bits(level); }

// FBGEMM clips the output gradient, element by element, before per-sample weights and pooling. NaN
// passes through.
TORCHREC_EXT_INLINE float clip(float g, float max_gradient) {
  return g < -max_gradient ? -max_gradient : (g > max_gradient ? max_gradient : g);
}

}  // namespace torchrec_ext
