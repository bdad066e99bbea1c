#pragma once

#include <cstdint>

#include "device_layout.h"
#include "lanes.h"
#include "launch.h"

namespace torchrec_ext::cuda {

// What a lookup adds to its row: scales[i] * gradient[kAtOnce * sources[i] .. + dim). Gradients begin at
// multiples of kAtOnce elements: of the columns that kernels read in one access.
struct Lookups {
  void* keys;           // [lookups] the numbers of the rows, uint32 or, where wide_keys, uint64
  uint32_t* positions;  // [lookups] 0, 1, 2, ..
  uint32_t* sources;    // [lookups]
  float* scales;        // [lookups], or null where every scale is 1
  bool wide_keys;
};

// The source of a lookup that has no gradient.
inline constexpr uint32_t kNoSource = 0xFFFFFFFFu;

// Fills in the arrays. Where an offset or an index is bad, the kernel prints which and traps, like a
// device-side assertion, before anything was changed. feature_requires_grad: lookups of features with 0
// have no source; null: all have.
template <int kAtOnce, class Index>
void find_lookups(const Queue& queue, const DeviceLayout& layout, const Batch<Index>& batch,
                  const int32_t* feature_requires_grad, int64_t gradient_size,
                  const Lookups& lookups);

}  // namespace torchrec_ext::cuda
