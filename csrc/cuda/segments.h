#pragma once

#include <cstdint>

#include "lookups.h"

namespace torchrec_ext::cuda {

// The lookups sorted by row. Row s (of *count) has the lookups positions[begins[s]] up to
// positions[begins[s + 1]], in the order of the batch; the last row's end with the batch.
struct Segments {
  const void* keys;  // [lookups] sorted, uint32 or, where wide_keys, uint64
  const uint32_t* positions;
  const uint32_t* begins;
  const int64_t* count;
  int64_t lookups;
  bool wide_keys;

  // The number of the row of a sorted lookup.
  __device__ __forceinline__ int64_t row(int64_t lookup) const {
    return wide_keys ? static_cast<int64_t>(static_cast<const uint64_t*>(keys)[lookup])
                     : static_cast<int64_t>(static_cast<const uint32_t*>(keys)[lookup]);
  }

  __device__ __forceinline__ uint32_t end(int64_t segment, int64_t segments) const {
    return segment + 1 < segments ? begins[segment + 1] : static_cast<uint32_t>(lookups);
  }
};

// The arrays that sorting needs besides the lookups' own.
struct SortBuffers {
  void* keys;           // [lookups], as the lookups' keys
  uint32_t* positions;  // [lookups]
  uint32_t* begins;     // [lookups]
  int64_t* count;       // [1]
  void* scratch;
  size_t scratch_size;
};

// The bytes of scratch that sorting needs, for rows numbered below total_rows.
size_t sort_scratch_size(int64_t lookups, int64_t total_rows, bool wide_keys);

Segments sort_lookups(const Queue& queue, const Lookups& lookups, int64_t count, int64_t total_rows,
                      const SortBuffers& buffers);

}  // namespace torchrec_ext::cuda
