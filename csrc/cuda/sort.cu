#include "sort.h"

#include <torch/headeronly/util/Exception.h>

#include <thrust/iterator/counting_iterator.h>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>

namespace torchrec_ext::cuda {
namespace {

void check(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

template <class Key>
struct Begins {
  const Key* keys;

  __device__ bool operator()(uint32_t i) const { return i == 0 || keys[i] != keys[i - 1]; }
};

template <class Key>
cudaError_t select_begins(void* scratch, size_t& scratch_size, const Key* keys, int64_t items,
                          uint32_t* begins, int64_t* count, cudaStream_t stream) {
  return cub::DeviceSelect::If(scratch, scratch_size, thrust::counting_iterator<uint32_t>(0),
                               begins, count, items, Begins<Key>{keys}, stream);
}

}  // namespace

template <class Key>
size_t sort_scratch_size(int64_t items, int bits) {
  cub::DoubleBuffer<Key> keys;
  cub::DoubleBuffer<uint32_t> positions;
  size_t size = 0;
  check(cub::DeviceRadixSort::SortPairs(nullptr, size, keys, positions, items, 0, bits), "sort");
  return size;
}

template <class Key>
Sorted<Key> sort_pairs(void* scratch, size_t scratch_size, Key* (&keys)[2],
                       uint32_t* (&positions)[2], int64_t items, int bits, cudaStream_t stream) {
  cub::DoubleBuffer<Key> key_buffers(keys[0], keys[1]);
  cub::DoubleBuffer<uint32_t> position_buffers(positions[0], positions[1]);
  check(cub::DeviceRadixSort::SortPairs(scratch, scratch_size, key_buffers, position_buffers, items,
                                        0, bits, stream),
        "sort");
  return {key_buffers.Current(), position_buffers.Current()};
}

template <class Key>
size_t find_begins_scratch_size(int64_t items) {
  size_t size = 0;
  check(select_begins<Key>(nullptr, size, nullptr, items, nullptr, nullptr, nullptr), "select");
  return size;
}

template <class Key>
void find_begins(void* scratch, size_t scratch_size, const Key* keys, int64_t items,
                 uint32_t* begins, int64_t* count, cudaStream_t stream) {
  check(select_begins(scratch, scratch_size, keys, items, begins, count, stream), "select");
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
