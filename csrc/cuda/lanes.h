#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../row_reduce.h"
#include "launch.h"

namespace torchrec_ext::cuda {

inline constexpr int kColumnsPerLane = 4;

// A row is worked on by 8, 16 or 32 neighbouring lanes of a warp, each with four columns at a time.
// Fewer than 32 only where all of a row's columns are met in one go.
constexpr int lanes_for(int64_t max_dim) {
  return max_dim <= 8 * kColumnsPerLane ? 8 : (max_dim <= 16 * kColumnsPerLane ? 16 : 32);
}

// Which columns of a row are a lane's at a time. kAtOnce of them are read and written in one access.
template <int kAtOnce>
struct LaneColumns;

// Four neighbours, of which the row has all or none.
template <>
struct LaneColumns<kColumnsPerLane> {
  int first;
  bool active;

  __device__ __forceinline__ int column(int v) const { return first + v; }
  __device__ __forceinline__ bool has(int /*v*/) const { return active; }
  __device__ __forceinline__ bool any() const { return active; }
};

// For rows of any width: one column of each quarter of those that the lanes have together, so that in
// each access neighbouring lanes have neighbouring columns.
template <>
struct LaneColumns<1> {
  int first;
  int step;
  int dim;

  __device__ __forceinline__ int column(int v) const { return first + v * step; }
  __device__ __forceinline__ bool has(int v) const { return column(v) < dim; }
  __device__ __forceinline__ bool any() const { return first < dim; }
};

template <int kAtOnce>
struct Lanes {
  static_assert(kAtOnce == kColumnsPerLane || kAtOnce == 1);

  int count;
  int lane;
  unsigned mask;

  static __device__ __forceinline__ Lanes of(int count) {
    const int in_warp = static_cast<int>(threadIdx.x % 32);
    const unsigned first = count == 32 ? 0xFFFFFFFFu : (1u << count) - 1u;
    return {count, in_warp % count, first << (in_warp / count * count)};
  }

  // The number of this thread's row among the rows that a grid works on at once, and of those.
  __device__ __forceinline__ int64_t group() const { return thread_number() / count; }
  __device__ __forceinline__ int64_t groups() const { return thread_count() / count; }
  __device__ __forceinline__ int group_in_block() const {
    return static_cast<int>(threadIdx.x) / count;
  }

  // How many columns the lanes have together at a time, and which of those from `base` on this one has.
  __device__ __forceinline__ int columns() const { return count * kColumnsPerLane; }
  __device__ __forceinline__ LaneColumns<kAtOnce> columns_at(int base, int dim) const {
    if constexpr (kAtOnce == 1) {
      return {base + lane, count, dim};
    } else {
      const int first = base + lane * kColumnsPerLane;
      return {first, first < dim};
    }
  }

  template <class Value>
  __device__ __forceinline__ Value broadcast(Value value, int source) const {
    return __shfl_sync(mask, value, source, count);
  }

  // Folds the partial sums of reduce_row (row_reduce.h), four of which a lane holds. All lanes get
  // the result.
  __device__ __forceinline__ float fold(const float* partials) const {
    float sums[kColumnsPerLane] = {partials[0], partials[1], partials[2], partials[3]};
    if constexpr (kAtOnce == 1) {
      // A lane's own are the ones furthest apart: they are folded first.
      sums[0] = (sums[0] + sums[2]) + (sums[1] + sums[3]);
      for (int offset = count / 2; offset > 0; offset /= 2) {
        sums[0] += __shfl_xor_sync(mask, sums[0], offset, count);
      }
      return sums[0];
    } else {
      for (int offset = count / 2; offset > 0; offset /= 2) {
        for (float& sum : sums) {
          sum += __shfl_xor_sync(mask, sum, offset, count);
        }
      }
      sums[0] += sums[2];
      sums[1] += sums[3];
      return sums[0] + sums[1];
    }
  }
};

static_assert(32 * kColumnsPerLane == kReducePartials);

}  // namespace torchrec_ext::cuda
