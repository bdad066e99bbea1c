#pragma once

#include <cstdint>

#include "../gradient_order.h"
#include "columns.h"
#include "segments.h"

namespace torchrec_ext::cuda {

enum class GradientType { kFloat, kHalf, kBFloat16 };

// Sums over sum_size(level) lookups each, of rows that have more than that. A sum's place is that of
// its first lookup, divided by its size: no two have the same, because a sum covers its size of lookups.
struct StoredSums {
  float* sums[kLevels];  // [lookups / size, width]
  int64_t width;         // the widest row

  __device__ __forceinline__ float* at(int level, uint32_t first_lookup) const {
    return sums[level] + (first_lookup >> sum_bits(level)) * width;
  }

  // Sums `count` stored sums that lie one after another.
  __device__ __forceinline__ Columns add_up(int level, uint32_t first_lookup, uint32_t count,
                                            int column) const {
    const float* from = at(level, first_lookup) + column;
    Columns total = Columns::nothing();
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i, from += width) {
      total.add(load_columns(from));
    }
    return total;
  }
};

// The gradients of lookups sorted by row, and their sums in the order of gradient_order.h. All lanes
// of a row call these together; `active` is false for lanes without a column.
struct GradientSource {
  const void* gradient;
  GradientType type;
  const uint32_t* positions;
  const uint32_t* sources;
  const float* scales;
  float max_gradient;

  // At most 32 lookups.
  __device__ __forceinline__ Columns sum(const Lanes& lanes, uint32_t begin, uint32_t end,
                                         int column, bool active) const {
    if (type == GradientType::kFloat) {
      return sum_as<float>(lanes, begin, end, column, active);
    }
    return type == GradientType::kHalf
               ? sum_as<torch::headeronly::Half>(lanes, begin, end, column, active)
               : sum_as<torch::headeronly::BFloat16>(lanes, begin, end, column, active);
  }

  template <class Value>
  __device__ __forceinline__ Columns sum_as(const Lanes& lanes, uint32_t begin, uint32_t end,
                                            int column, bool active) const {
    const Value* values = static_cast<const Value*>(gradient) + column;
    Columns total = Columns::nothing();
    for (uint32_t done = 0; done < end - begin; done += lanes.count) {
      const uint32_t first = begin + done;
      const int count = min(static_cast<int>(end - first), lanes.count);
      uint32_t source = 0;
      float scale = 1.0f;
      if (lanes.lane < count) {  // each lane reads one lookup's numbers and hands them round
        const uint32_t position = positions[first + lanes.lane];
        source = sources[position];
        scale = scales != nullptr ? scales[position] : 1.0f;
      }
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        const int64_t offset = int64_t{kColumnsPerLane} * lanes.broadcast(source, k);
        const float factor = lanes.broadcast(scale, k);
        if (active) {
          total.add(scaled(load_columns(values + offset), factor));
        }
      }
    }
    return total;
  }

  // All lookups of a row.
  __device__ __forceinline__ Columns sum_row(const Lanes& lanes, const StoredSums& stored,
                                             uint32_t begin, uint32_t end, int column,
                                             bool active) const {
    const uint32_t count = end - begin;
    const uint32_t rest = count <= sum_size(0) ? count : count & (sum_size(0) - 1);
    uint32_t first = end - rest;
    Columns total = sum(lanes, first, end, column, active);
    for (int level = 0; level < kLevels && count > sum_size(level); ++level) {
      // Sums of this size that no larger one covers.
      const bool covered = level + 1 < kLevels && count > sum_size(level + 1);
      const uint32_t left = covered ? count & (sum_size(level + 1) - 1) : count;
      const uint32_t sums = left >> sum_bits(level);
      first -= sums << sum_bits(level);
      if (active) {
        Columns larger = stored.add_up(level, first, sums, column);
        larger.add(total);
        total = larger;
      }
    }
    return total;
  }

  // The gradient of one lookup of the batch, which has a source.
  __device__ __forceinline__ Columns unscaled(int64_t position, int column) const {
    const int64_t at = int64_t{kColumnsPerLane} * sources[position] + column;
    if (type == GradientType::kFloat) {
      return scaled(load_columns(static_cast<const float*>(gradient) + at), 1.0f);
    }
    return type == GradientType::kHalf
               ? scaled(load_columns(static_cast<const torch::headeronly::Half*>(gradient) + at),
                        1.0f)
               : scaled(
                     load_columns(static_cast<const torch::headeronly::BFloat16*>(gradient) + at),
                     1.0f);
  }

 private:
  __device__ __forceinline__ Columns scaled(Columns g, float factor) const {
    for (float& value : g.values) {
      value = clip(value, max_gradient) * factor;
    }
    return g;
  }
};

// Makes the stored sums of every row with more than 32 lookups, level by level.
void store_sums(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                const Segments& segments, const GradientSource& source, const StoredSums& stored);

}  // namespace torchrec_ext::cuda
