#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../lookup.h"

namespace torchrec_ext::cuda {

// Layout (lookup.h) in device memory.
struct DeviceLayout {
  const Table* tables;
  int64_t table_count;
  const Feature* features;

  // The table that has the row of this number.
  __device__ __forceinline__ const Table& table_of(int64_t row) const {
    int64_t low = 0;
    for (int64_t count = table_count; count > 1;) {
      const int64_t half = count / 2;
      low = tables[low + half].first_row <= row ? low + half : low;
      count -= half;
    }
    return tables[low];
  }
};

// Weights or a state: one buffer, and another one for tables in managed memory. Offsets count through
// both.
template <class Value>
struct Buffers {
  Value* first;
  int64_t first_size;
  Value* managed;

  __device__ __forceinline__ Value* at(int64_t offset) const {
    return offset < first_size ? first + offset : managed + (offset - first_size);
  }
};

// The weights, and FBGEMM's cache for those in managed memory: locations[lookup] is the slot of the
// row looked up, or -1 where it is not in the cache.
template <class Weight>
struct Weights {
  Buffers<Weight> buffers;
  Weight* cache;
  const int32_t* locations;
  int64_t cache_stride;

  __device__ __forceinline__ Weight* row(const Table& table, int64_t row, int64_t lookup) const {
    const int64_t slot = locations == nullptr ? -1 : locations[lookup];
    return slot >= 0 ? cache + slot * cache_stride
                     : buffers.at(table.weights_offset + row * table.dim);
  }
};

}  // namespace torchrec_ext::cuda
