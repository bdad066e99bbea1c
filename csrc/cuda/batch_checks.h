#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "../lookup.h"

namespace torchrec_ext::cuda {

// What a kernel checks of a batch. Where something is bad it prints what and traps, like a device-side
// assertion.

template <class Index>
__device__ __forceinline__ void trap_at_bag(const Batch<Index>& batch, int64_t bag) {
  printf(
      "torchrec_ext: offsets of bag %lld run from %lld to %lld in a batch of %lld bags and "
      "%lld lookups; nothing was updated\n",
      static_cast<long long>(bag), static_cast<long long>(batch.offsets[bag]),
      static_cast<long long>(batch.offsets[bag + 1]), static_cast<long long>(batch.bags),
      static_cast<long long>(batch.lookups));
  __trap();
}

template <class Index>
__device__ __forceinline__ void check_bag(const Batch<Index>& batch, int64_t bag) {
  const int64_t begin = batch.offsets[bag];
  const int64_t end = batch.offsets[bag + 1];
  const bool first = bag > 0 || begin == 0;
  const bool last = bag + 1 < batch.bags || end == batch.lookups;
  if (begin > end || !first || !last) {
    trap_at_bag(batch, bag);
  }
}

// Where variable batch sizes place a feature's bags.
template <class Index>
__device__ __forceinline__ void check_feature(const Batch<Index>& batch, int64_t feature) {
  const int64_t begin = batch.feature_bags[feature];
  const int64_t end = batch.feature_bags[feature + 1];
  const bool first = feature > 0 || begin == 0;
  const bool last = feature + 1 < batch.features || end == batch.bags;
  if (begin > end || !first || !last) {
    printf(
        "torchrec_ext: feature_bags of feature %lld run from %lld to %lld in a batch of %lld bags; "
        "nothing was updated\n",
        static_cast<long long>(feature), static_cast<long long>(begin), static_cast<long long>(end),
        static_cast<long long>(batch.bags));
    __trap();
  }
}

template <class Index>
__device__ __forceinline__ void check_index(const Batch<Index>& batch, const Table& table,
                                            int64_t number, int64_t feature, int64_t index) {
  if (index < 0 || index >= table.rows) {
    printf(
        "torchrec_ext: index %lld of feature %lld, lookup %lld, is outside of its table, which "
        "has %lld rows; nothing was updated\n",
        static_cast<long long>(index), static_cast<long long>(feature),
        static_cast<long long>(number), static_cast<long long>(table.rows));
    __trap();
  }
}

}  // namespace torchrec_ext::cuda
