#include "segments.h"

#include <algorithm>
#include <bit>

#include "sort.h"

namespace torchrec_ext::cuda {
namespace {

// A sort of no bits at all would be one more case; one bit is always there.
int key_bits(int64_t total_rows) {
  const uint64_t last = static_cast<uint64_t>(std::max<int64_t>(total_rows, 1)) - 1;
  return std::max(static_cast<int>(std::bit_width(last)), 1);
}

template <class Key>
size_t scratch_size_for(int64_t lookups, int bits) {
  return std::max(sort_scratch_size<Key>(lookups, bits), find_begins_scratch_size<Key>(lookups));
}

template <class Key>
Segments sort_keys(const Queue& queue, const Lookups& lookups, int64_t count, int bits,
                   const SortBuffers& buffers) {
  Key* keys[2] = {static_cast<Key*>(lookups.keys), static_cast<Key*>(buffers.keys)};
  uint32_t* positions[2] = {lookups.positions, buffers.positions};
  const Sorted<Key> sorted =
      sort_pairs(buffers.scratch, buffers.scratch_size, keys, positions, count, bits, queue.stream);
  find_begins(buffers.scratch, buffers.scratch_size, sorted.keys, count, buffers.begins,
              buffers.count, queue.stream);
  return {sorted.keys, sorted.positions, buffers.begins, buffers.count, count, lookups.wide_keys};
}

}  // namespace

size_t sort_scratch_size(int64_t lookups, int64_t total_rows, bool wide_keys) {
  const int bits = key_bits(total_rows);
  return wide_keys ? scratch_size_for<uint64_t>(lookups, bits)
                   : scratch_size_for<uint32_t>(lookups, bits);
}

Segments sort_lookups(const Queue& queue, const Lookups& lookups, int64_t count, int64_t total_rows,
                      const SortBuffers& buffers) {
  const int bits = key_bits(total_rows);
  return lookups.wide_keys ? sort_keys<uint64_t>(queue, lookups, count, bits, buffers)
                           : sort_keys<uint32_t>(queue, lookups, count, bits, buffers);
}

}  // namespace torchrec_ext::cuda
