#pragma once

#include <cstdint>

#include "../gradient_order.h"
#include "columns.h"
#include "segments.h"

namespace torchrec_ext::cuda {

// The dtype of an output and of its gradient.
enum class OutputType { kFloat, kHalf, kBFloat16 };

// Sums over sum_size(level) lookups each, of rows that have more than that. A sum's place is that of
// its first lookup, divided by its size: no two have the same, because a sum covers its size of lookups.
struct StoredSums {
  float* sums[kLevels];  // [lookups / size, width]
  int64_t width;         // the widest row

  __device__ __forceinline__ float* at(int level, uint32_t first_lookup) const {
    return sums[level] + (first_lookup >> sum_bits(level)) * width;
  }

  // Sums `count` stored sums that lie one after another.
  template <int kAtOnce>
  __device__ __forceinline__ Columns add_up(int level, uint32_t first_lookup, uint32_t count,
                                            const LaneColumns<kAtOnce>& columns) const {
    const float* from = at(level, first_lookup) + columns.first;
    Columns total = Columns::nothing();
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i, from += width) {
      total.add(load_columns(from, columns));
    }
    return total;
  }
};

// The gradients of lookups sorted by row, and their sums in the order of gradient_order.h. All lanes
// of a row call these together, those without a column too.
struct GradientSource {
  const void* gradient;
  OutputType type;
  const uint32_t* positions;
  const uint32_t* sources;
  const float* scales;
  float max_gradient;

  // At most 32 lookups.
  template <int kAtOnce>
  __device__ __forceinline__ Columns sum(const Lanes<kAtOnce>& lanes, uint32_t begin, uint32_t end,
                                         const LaneColumns<kAtOnce>& columns) const {
    if (type == OutputType::kFloat) {
      return sum_as<float>(lanes, begin, end, columns);
    }
    return type == OutputType::kHalf
               ? sum_as<torch::headeronly::Half>(lanes, begin, end, columns)
               : sum_as<torch::headeronly::BFloat16>(lanes, begin, end, columns);
  }

  template <class Value, int kAtOnce>
  __device__ __forceinline__ Columns sum_as(const Lanes<kAtOnce>& lanes, uint32_t begin,
                                            uint32_t end,
                                            const LaneColumns<kAtOnce>& columns) const {
    const Value* values = static_cast<const Value*>(gradient) + columns.first;
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
        const int64_t offset = int64_t{kAtOnce} * lanes.broadcast(source, k);
        const float factor = lanes.broadcast(scale, k);
        if (columns.any()) {
          total.add(scaled(load_columns(values + offset, columns), factor));
        }
      }
    }
    return total;
  }

  // All lookups of a row.
  template <int kAtOnce>
  __device__ __forceinline__ Columns sum_row(const Lanes<kAtOnce>& lanes, const StoredSums& stored,
                                             uint32_t begin, uint32_t end,
                                             const LaneColumns<kAtOnce>& columns) const {
    const uint32_t count = end - begin;
    const uint32_t rest = count <= sum_size(0) ? count : count & (sum_size(0) - 1);
    uint32_t first = end - rest;
    Columns total = sum(lanes, first, end, columns);
    for (int level = 0; level < kLevels && count > sum_size(level); ++level) {
      // Sums of this size that no larger one covers.
      const bool covered = level + 1 < kLevels && count > sum_size(level + 1);
      const uint32_t left = covered ? count & (sum_size(level + 1) - 1) : count;
      const uint32_t sums = left >> sum_bits(level);
      first -= sums << sum_bits(level);
      if (columns.any()) {
        Columns larger = stored.add_up(level, first, sums, columns);
        larger.add(total);
        total = larger;
      }
    }
    return total;
  }

  // The gradient of one lookup of the batch, which has a source.
  template <int kAtOnce>
  __device__ __forceinline__ Columns unscaled(int64_t position,
                                              const LaneColumns<kAtOnce>& columns) const {
    const int64_t at = int64_t{kAtOnce} * sources[position] + columns.first;
    if (type == OutputType::kFloat) {
      return unscaled_as<float>(at, columns);
    }
    return type == OutputType::kHalf ? unscaled_as<torch::headeronly::Half>(at, columns)
                                     : unscaled_as<torch::headeronly::BFloat16>(at, columns);
  }

 private:
  template <class Value, int kAtOnce>
  __device__ __forceinline__ Columns unscaled_as(int64_t at,
                                                 const LaneColumns<kAtOnce>& columns) const {
    return scaled(load_columns(static_cast<const Value*>(gradient) + at, columns), 1.0f);
  }

  __device__ __forceinline__ Columns scaled(Columns g, float factor) const {
    for (float& value : g.values) {
      value = clip(value, max_gradient) * factor;
    }
    return g;
  }
};

// Makes the stored sums of every row with more than 32 lookups, level by level.
template <int kAtOnce>
void store_sums(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                const Segments& segments, const GradientSource& source, const StoredSums& stored);

}  // namespace torchrec_ext::cuda
