#include "lookups.h"

#include <cstdio>

#include "batch_checks.h"

namespace torchrec_ext::cuda {
namespace {

// A bag's gradient, where variable batch sizes place it.
template <int kAtOnce>
__device__ __forceinline__ void check_gradient(int64_t bag, int64_t offset, int64_t dim,
                                               int64_t gradient_size) {
  if (offset < 0 || offset % kAtOnce != 0 || offset + dim > gradient_size) {
    printf(
        "torchrec_ext: the gradient of bag %lld begins at element %lld of %lld; nothing was "
        "updated\n",
        static_cast<long long>(bag), static_cast<long long>(offset),
        static_cast<long long>(gradient_size));
    __trap();
  }
}

template <int kAtOnce, class Index, class Key>
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
    check_gradient<kAtOnce>(bag, offset, table.dim, gradient_size);
    const bool required = feature_requires_grad == nullptr || feature_requires_grad[f] != 0;
    static_cast<Key*>(lookups.keys)[i] = static_cast<Key>(table.first_row + index);
    lookups.positions[i] = static_cast<uint32_t>(i);
    lookups.sources[i] = required ? static_cast<uint32_t>(offset / kAtOnce) : kNoSource;
    if (lookups.scales != nullptr) {
      lookups.scales[i] = batch.scale(i, batch.offsets[bag + 1] - batch.offsets[bag]);
    }
  }
}

}  // namespace

template <int kAtOnce, class Index>
void find_lookups(const Queue& queue, const DeviceLayout& layout, const Batch<Index>& batch,
                  const int32_t* feature_requires_grad, int64_t gradient_size,
                  const Lookups& lookups) {
  const int64_t items = std::max(batch.bags, batch.lookups);
  const auto kernel = lookups.wide_keys ? find_lookups_kernel<kAtOnce, Index, uint64_t>
                                        : find_lookups_kernel<kAtOnce, Index, uint32_t>;
  launch(queue, "find_lookups", kernel, items, 0, batch, layout, feature_requires_grad,
         gradient_size, lookups);
}

#define TORCHREC_EXT_INSTANTIATE(kAtOnce, Index)                                              \
  template void find_lookups<kAtOnce>(const Queue&, const DeviceLayout&, const Batch<Index>&, \
                                      const int32_t*, int64_t, const Lookups&)
TORCHREC_EXT_INSTANTIATE(kColumnsPerLane, int32_t);
TORCHREC_EXT_INSTANTIATE(kColumnsPerLane, int64_t);
TORCHREC_EXT_INSTANTIATE(1, int32_t);
TORCHREC_EXT_INSTANTIATE(1, int64_t);
#undef TORCHREC_EXT_INSTANTIATE

}  // namespace torchrec_ext::cuda
