#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "parallel.h"

namespace torchrec_ext::cpu {

// Keys with the positions they had before sorting. Sorting is stable, so its result is unique: it
// does not depend on the number of slices.
template <class Key>
struct SortedKeys {
  std::unique_ptr<Key[]> keys;
  std::unique_ptr<uint32_t[]> positions;
};

template <class Key>
void radix_pass(const SortedKeys<Key>& from, SortedKeys<Key>& to, int64_t items, int shift,
                int bits, bool first_pass) {
  const int64_t slices = slice_count(items);
  const int64_t buckets = int64_t{1} << bits;
  const Key mask = static_cast<Key>(buckets - 1);
  std::vector<uint32_t> heads(static_cast<size_t>(slices * buckets), 0);
  const Key* keys = from.keys.get();
  for_each_slice(items, slices, [&](int64_t slice, int64_t begin, int64_t end) {
    uint32_t* count = heads.data() + slice * buckets;
    for (int64_t i = begin; i < end; ++i) {
      ++count[(keys[i] >> shift) & mask];
    }
  });
  uint32_t head = 0;
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    for (int64_t slice = 0; slice < slices; ++slice) {
      head += std::exchange(heads[static_cast<size_t>(slice * buckets + bucket)], head);
    }
  }
  const uint32_t* positions = from.positions.get();
  for_each_slice(items, slices, [&](int64_t slice, int64_t begin, int64_t end) {
    uint32_t* next = heads.data() + slice * buckets;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t target = next[(keys[i] >> shift) & mask]++;
      to.keys[target] = keys[i];
      to.positions[target] = first_pass ? static_cast<uint32_t>(i) : positions[i];
    }
  });
}

// Least-significant-digit radix sort of keys below key_limit.
template <class Key>
SortedKeys<Key> radix_sort(std::unique_ptr<Key[]> keys, int64_t items, uint64_t key_limit) {
  SortedKeys<Key> from{std::move(keys), std::unique_ptr<uint32_t[]>(new uint32_t[items])};
  const int key_bits = key_limit > 1 ? std::bit_width(key_limit - 1) : 0;
  if (key_bits == 0 || items == 0) {
    for (int64_t i = 0; i < items; ++i) {
      from.positions[i] = static_cast<uint32_t>(i);
    }
    return from;
  }
  SortedKeys<Key> to{std::unique_ptr<Key[]>(new Key[items]),
                     std::unique_ptr<uint32_t[]>(new uint32_t[items])};
  // Wider digits mean fewer passes but more buckets to clear and to scan: keep the buckets well
  // below the items.
  const int widest =
      std::clamp(static_cast<int>(std::bit_width(static_cast<uint64_t>(items))) - 3, 6, 12);
  const int passes = (key_bits + widest - 1) / widest;
  const int digit = (key_bits + passes - 1) / passes;
  for (int pass = 0; pass < passes; ++pass) {
    radix_pass(from, to, items, pass * digit, digit, pass == 0);
    std::swap(from, to);
  }
  return from;
}

}  // namespace torchrec_ext::cpu
