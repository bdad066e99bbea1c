#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace torchrec_ext::cuda {

// CUB's part: all that is instantiated of it stands in sort.cu, behind these four functions. Sorting is
// stable.
//
// keys and positions are pairs of buffers [items]: the input is in the first ones, and the result is in
// the one of each that is returned. `bits` is the number of low bits that keys differ in.
template <class Key>
struct Sorted {
  const Key* keys;
  const uint32_t* positions;
};

template <class Key>
size_t sort_scratch_size(int64_t items, int bits);

template <class Key>
Sorted<Key> sort_pairs(void* scratch, size_t scratch_size, Key* (&keys)[2],
                       uint32_t* (&positions)[2], int64_t items, int bits, cudaStream_t stream);

// begins[0 .. *count) = where the sorted keys change, and 0.
template <class Key>
size_t find_begins_scratch_size(int64_t items);

template <class Key>
void find_begins(void* scratch, size_t scratch_size, const Key* keys, int64_t items,
                 uint32_t* begins, int64_t* count, cudaStream_t stream);

}  // namespace torchrec_ext::cuda
