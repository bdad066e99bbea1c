#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace torchrec_ext::cpu {

// Below this many items a second thread costs more than it saves.
inline constexpr int64_t kGrain = 4096;

inline int64_t slice_count(int64_t items) {
  const int64_t threads = torch::stable::get_num_threads();
  return std::clamp<int64_t>(items / kGrain, 1, std::max<int64_t>(threads, 1));
}

// Calls work(slice, begin, end) for `slices` contiguous parts of [0, items), each exactly once.
// `work` must not throw.
template <class Work>
void for_each_slice(int64_t items, int64_t slices, const Work& work) {
  if (slices == 1) {
    work(0, 0, items);
    return;
  }
  torch::stable::parallel_for(0, slices, 1, [&](int64_t first, int64_t last) {
    for (int64_t slice = first; slice < last; ++slice) {
      work(slice, items * slice / slices, items * (slice + 1) / slices);
    }
  });
}

// Calls work(begin, end) for blocks of at most `block` items; whichever thread is free takes the
// next block. For work whose result does not depend on who does it, and whose cost varies. `work`
// must not throw.
template <class Work>
void for_each_block(int64_t items, int64_t block, int64_t slices, const Work& work) {
  std::atomic<int64_t> next{0};
  for_each_slice(slices, slices, [&](int64_t, int64_t, int64_t) {
    for (int64_t begin = next.fetch_add(block); begin < items; begin = next.fetch_add(block)) {
      work(begin, std::min(begin + block, items));
    }
  });
}

}  // namespace torchrec_ext::cpu
