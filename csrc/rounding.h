#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstdint>

#include "macros.h"

namespace torchrec_ext {

using BFloat16 = torch::headeronly::BFloat16;
using Half = torch::headeronly::Half;

TORCHREC_EXT_INLINE uint64_t
mix64(uint64_t x) {  // the SplitMix64 finaliser (Steele, Lea and Flood, 2014)
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

TORCHREC_EXT_INLINE uint32_t mix32(uint32_t x) {  // "lowbias32" (Wellons, 2018)
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// How a row's new weights are stored. `step` counts the completed updates, `row` is the row's number
// among all rows of all tables.
template <class Weight>
struct NearestRounding {
  using WeightType = Weight;

  TORCHREC_EXT_INLINE void set_step(uint64_t /*step*/) {}
  TORCHREC_EXT_INLINE void begin_row(uint64_t /*row*/) {}
  TORCHREC_EXT_INLINE Weight operator()(float value, int64_t /*column*/) const {
    return static_cast<Weight>(value);
  }
};

TORCHREC_EXT_INLINE uint32_t mask(bool condition) { return 0u - static_cast<uint32_t>(condition); }

// Rounds a float to one that the weights' type represents exactly: one of its two neighbours there.
template <class Weight>
struct RoundTo;

// From 2^-14 on, a half keeps 10 of a float's 23 mantissa bits: a random number below the lost 13
// bits is added, then they are cut off. Below, halves are the multiples of 2^-24. Masks choose
// between the two, and infinity and NaN, because the compiler turns conditional expressions into
// branches here.
template <>
struct RoundTo<Half> {
  static TORCHREC_EXT_INLINE float round(float value, uint32_t random) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    const uint32_t is_subnormal = mask(magnitude < 0x38800000u);  // 2^-14
    const uint32_t is_finite = mask(magnitude < 0x7F800000u);
    const uint32_t normal = (magnitude + (random & 0x1FFFu & is_finite)) & ~(0x1FFFu & is_finite);
    const float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
    const float steps =
        std::bit_cast<float>(magnitude & is_subnormal) * 0x1p24f + uniform;  // below 1025
    const float subnormal = static_cast<float>(static_cast<int32_t>(steps)) * 0x1p-24f;
    const uint32_t rounded =
        (std::bit_cast<uint32_t>(subnormal) & is_subnormal) | (normal & ~is_subnormal);
    return std::bit_cast<float>((bits & 0x80000000u) | rounded);
  }
};

// A bfloat16 is the upper half of a float.
template <>
struct RoundTo<BFloat16> {
  static TORCHREC_EXT_INLINE float round(float value, uint32_t random) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t lost = 0xFFFFu & mask((bits & 0x7FFFFFFFu) < 0x7F800000u);
    return std::bit_cast<float>((bits + (random & lost)) & ~lost);
  }
};

// Rounds to one of the two neighbours with probabilities that make the expectation equal to the
// value. The random number depends on (seed, step, row, column) alone, hence not on the order of
// execution.
template <class Weight>
struct StochasticRounding {
  using WeightType = Weight;

  uint64_t seed;
  uint64_t step;
  uint64_t row_key = 0;

  TORCHREC_EXT_INLINE void set_step(uint64_t completed_updates) { step = completed_updates; }

  TORCHREC_EXT_INLINE void begin_row(uint64_t row) {
    row_key = mix64(mix64(mix64(seed + 0x9E3779B97F4A7C15ull) + step) + row);
  }

  TORCHREC_EXT_INLINE Weight operator()(float value, int64_t column) const {
    const uint32_t random =
        mix32(static_cast<uint32_t>(row_key >> 32) +
              mix32(static_cast<uint32_t>(row_key) + static_cast<uint32_t>(column)));
    return static_cast<Weight>(RoundTo<Weight>::round(value, random));
  }
};

}  // namespace torchrec_ext
