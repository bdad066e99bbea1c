#include "gradient_sum.h"

namespace torchrec_ext::cuda {
namespace {

struct Range {
  uint32_t begin;
  uint32_t end;
};

// The lookups of the sum of this level that has the place `place`; empty where none has. The sum would
// begin among the `size` lookups from place * size on, and cover the last of them.
__device__ __forceinline__ Range find_sum(const Segments& segments, int level, int64_t place) {
  const int64_t size = sum_size(level);
  const int64_t last = (place + 1) * size - 1;
  const int64_t row = segments.row(last);
  // A row of more than `size` lookups that covers `last` reaches half of it to one side or the other.
  const bool before = last >= size / 2 && segments.row(last - size / 2) == row;
  const bool after = last + size / 2 < segments.lookups && segments.row(last + size / 2) == row;
  if (!before && !after) {
    return {0, 0};
  }
  const int64_t count = *segments.count;
  const int64_t segment = count_up_to(segments.begins, count, last) - 1;
  const int64_t begin = segments.begins[segment];
  const int64_t end = segments.end(segment, count);
  const int64_t missing = begin < place * size ? place * size - begin : 0;
  const int64_t first = begin + ((missing + size - 1) & ~(size - 1));
  if (end - begin <= size || first + size > end) {
    return {0, 0};
  }
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(first + size)};
}

template <int kAtOnce>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    store_sums_kernel(const DeviceLayout layout, const Segments segments,
                      const GradientSource source, const __grid_constant__ StoredSums stored,
                      int level, int lane_count) {
  const auto lanes = Lanes<kAtOnce>::of(lane_count);
  const int64_t places = segments.lookups >> sum_bits(level);
  for (int64_t place = lanes.group(); place < places; place += lanes.groups()) {
    const Range lookups = find_sum(segments, level, place);
    if (lookups.begin == lookups.end) {
      continue;
    }
    const int dim = static_cast<int>(layout.table_of(segments.row(lookups.begin)).dim);
    for (int base = 0; base < dim; base += lanes.columns()) {
      const auto columns = lanes.columns_at(base, dim);
      Columns total = Columns::nothing();
      if (level == 0) {
        total = source.sum(lanes, lookups.begin, lookups.end, columns);
      } else if (columns.any()) {
        total = stored.add_up(level - 1, lookups.begin, kFanOut, columns);
      }
      if (columns.any()) {
        store_columns(stored.at(level, lookups.begin) + columns.first, total.values, columns);
      }
    }
  }
}

}  // namespace

template <int kAtOnce>
void store_sums(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                const Segments& segments, const GradientSource& source, const StoredSums& stored) {
  const int lane_count = lanes_for(max_dim);
  for (int level = 0; level < kLevels; ++level) {
    const int64_t places = segments.lookups >> sum_bits(level);
    launch(queue, "store_sums", store_sums_kernel<kAtOnce>, places * lane_count, 0, layout,
           segments, source, stored, level, lane_count);
  }
}

template void store_sums<kColumnsPerLane>(const Queue&, const DeviceLayout&, int64_t,
                                          const Segments&, const GradientSource&,
                                          const StoredSums&);
template void store_sums<1>(const Queue&, const DeviceLayout&, int64_t, const Segments&,
                            const GradientSource&, const StoredSums&);

}  // namespace torchrec_ext::cuda
