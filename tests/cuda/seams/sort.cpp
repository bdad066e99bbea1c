// In place of csrc/cuda/sort.cu: what CUB does, by the C++ library.

#include "cuda/sort.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace torchrec_ext::cuda {
namespace {

constexpr size_t kScratchSize = 64;

void check_scratch(const void* scratch, size_t size) {
  STD_TORCH_CHECK(scratch != nullptr && size >= kScratchSize, "too little scratch");
}

}  // namespace

template <class Key>
size_t sort_scratch_size(int64_t, int) {
  return kScratchSize;
}

// Like CUB, looks at the low `bits` alone, and leaves the result in either buffer.
template <class Key>
Sorted<Key> sort_pairs(void* scratch, size_t scratch_size, Key* (&keys)[2],
                       uint32_t* (&positions)[2], int64_t items, int bits, cudaStream_t) {
  check_scratch(scratch, scratch_size);
  const Key mask = bits == 8 * sizeof(Key) ? ~Key{0} : (Key{1} << bits) - 1;
  std::vector<uint32_t> order(static_cast<size_t>(items));
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return (keys[0][a] & mask) < (keys[0][b] & mask);
  });
  for (int64_t i = 0; i < items; ++i) {
    keys[1][i] = keys[0][order[static_cast<size_t>(i)]];
    positions[1][i] = positions[0][order[static_cast<size_t>(i)]];
  }
  const int passes = (bits + 7) / 8;
  if (passes % 2 == 1) {
    return {keys[1], positions[1]};
  }
  std::swap_ranges(keys[0], keys[0] + items, keys[1]);
  std::swap_ranges(positions[0], positions[0] + items, positions[1]);
  return {keys[0], positions[0]};
}

template <class Key>
size_t find_begins_scratch_size(int64_t) {
  return kScratchSize;
}

template <class Key>
void find_begins(void* scratch, size_t scratch_size, const Key* keys, int64_t items,
                 uint32_t* begins, int64_t* count, cudaStream_t) {
  check_scratch(scratch, scratch_size);
  *count = 0;
  for (int64_t i = 0; i < items; ++i) {
    if (i == 0 || keys[i] != keys[i - 1]) {
      begins[(*count)++] = static_cast<uint32_t>(i);
    }
  }
}

#define TORCHREC_EXT_INSTANTIATE(Key)                                                       \
  template size_t sort_scratch_size<Key>(int64_t, int);                                     \
  template Sorted<Key> sort_pairs(void*, size_t, Key*(&)[2], uint32_t*(&)[2], int64_t, int, \
                                  cudaStream_t);                                            \
  template size_t find_begins_scratch_size<Key>(int64_t);                                   \
  template void find_begins(void*, size_t, const Key*, int64_t, uint32_t*, int64_t*, cudaStream_t)
TORCHREC_EXT_INSTANTIATE(uint32_t);
TORCHREC_EXT_INSTANTIATE(uint64_t);
#undef TORCHREC_EXT_INSTANTIATE

}  // namespace torchrec_ext::cuda
