#include "lookups.h"

#include <cstdio>

namespace torchrec_ext::cuda {
namespace {

template <class Index>
__device__ __forceinline__ void check_bag(const Batch<Index>& batch, int64_t bag) {
  const int64_t begin = batch.offsets[bag];
  const int64_t end = batch.offsets[bag + 1];
  const bool first = bag > 0 || begin == 0;
  const bool last = bag + 1 < batch.bags || end == batch.lookups;
  if (begin > end || !first || !last) {
    printf(
        "torchrec_ext: offsets of bag %lld run from %lld to %lld in a batch of %lld bags and "
        "%lld lookups; nothing was updated\n",
        static_cast<long long>(bag), static_cast<long long>(begin), static_cast<long long>(end),
        static_cast<long long>(batch.bags), static_cast<long long>(batch.lookups));
    __trap();
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

// A bag's gradient, where variable batch sizes place it.
__device__ __forceinline__ void check_gradient(int64_t bag, int64_t offset, int64_t dim,
                                               int64_t gradient_size) {
  if (offset < 0 || offset % kColumnsPerLane != 0 || offset + dim > gradient_size) {
    printf(
        "torchrec_ext: the gradient of bag %lld begins at element %lld of %lld; nothing was "
        "updated\n",
        static_cast<long long>(bag), static_cast<long long>(offset),
        static_cast<long long>(gradient_size));
    __trap();
  }
}

template <class Index, class Key>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    find_lookups_kernel(const Batch<Index> batch, const DeviceLayout layout,
                        const int32_t* feature_requires_grad, int64_t gradient_size,
                        const Lookups lookups) {
  const int64_t features = batch.feature_bags == nullptr ? 0 : batch.features;
  const int64_t longest = batch.bags > batch.lookups ? batch.bags : batch.lookups;
  const int64_t items = features > longest ? features : longest;
  for (int64_t i = thread_number(); i < items; i += thread_count()) {
    if (i < features) {
      check_feature(batch, i);
    }
    if (i < batch.bags) {
      check_bag(batch, i);
    }
    if (i >= batch.lookups) {
      continue;
    }
    // Where the offsets are bad, any bag will do: the trap comes.
    const int64_t found = count_up_to(batch.offsets, batch.bags, i) - 1;
    const int64_t bag = found < 0 ? 0 : found;
    const int64_t feature_found = batch.feature_of(bag);
    const int64_t f = feature_found < 0 ? 0 : feature_found;
    const Feature feature = layout.features[f];
    const Table& table = layout.tables[feature.table];
    const int64_t index = batch.indices[i];
    check_index(batch, table, i, f, index);
    const int64_t offset = batch.gradient_offset(i, bag, f, feature, table.dim);
    check_gradient(bag, offset, table.dim, gradient_size);
    const bool required = feature_requires_grad == nullptr || feature_requires_grad[f] != 0;
    static_cast<Key*>(lookups.keys)[i] = static_cast<Key>(table.first_row + index);
    lookups.positions[i] = static_cast<uint32_t>(i);
    lookups.sources[i] = required ? static_cast<uint32_t>(offset / kColumnsPerLane) : kNoSource;
    if (lookups.scales != nullptr) {
      lookups.scales[i] = batch.scale(i, batch.offsets[bag + 1] - batch.offsets[bag]);
    }
  }
}

}  // namespace

template <class Index>
void find_lookups(const Queue& queue, const DeviceLayout& layout, const Batch<Index>& batch,
                  const int32_t* feature_requires_grad, int64_t gradient_size,
                  const Lookups& lookups) {
  const int64_t items = std::max(batch.bags, batch.lookups);
  const auto kernel = lookups.wide_keys ? find_lookups_kernel<Index, uint64_t>
                                        : find_lookups_kernel<Index, uint32_t>;
  launch(queue, "find_lookups", kernel, items, 0, batch, layout, feature_requires_grad,
         gradient_size, lookups);
}

template void find_lookups(const Queue&, const DeviceLayout&, const Batch<int32_t>&, const int32_t*,
                           int64_t, const Lookups&);
template void find_lookups(const Queue&, const DeviceLayout&, const Batch<int64_t>&, const int32_t*,
                           int64_t, const Lookups&);

}  // namespace torchrec_ext::cuda
