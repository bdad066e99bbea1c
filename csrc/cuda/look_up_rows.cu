#include "look_up_rows.h"

#include "../rounding.h"
#include "batch_checks.h"

namespace torchrec_ext::cuda {
namespace {

__device__ __forceinline__ void check_output(int64_t bag, int64_t offset, int64_t dim,
                                             int64_t output_size) {
  if (offset < 0 || offset + dim > output_size) {
    printf("torchrec_ext: the output of bag %lld begins at element %lld of %lld\n",
           static_cast<long long>(bag), static_cast<long long>(offset),
           static_cast<long long>(output_size));
    __trap();
  }
}

template <class Value>
__device__ __forceinline__ void store_as(void* output, int64_t at, const Columns& row,
                                         const LaneColumns<1>& columns) {
  Value values[kColumnsPerLane];
  for (int v = 0; v < kColumnsPerLane; ++v) {
    values[v] = static_cast<Value>(row.values[v]);
  }
  store_columns(static_cast<Value*>(output) + at, values, columns);
}

// row is what begins at element `begin` of the output.
__device__ __forceinline__ void store_output(const Output& output, int64_t begin,
                                             const Columns& row, const LaneColumns<1>& columns) {
  const int64_t at = begin + columns.first;
  if (output.type == OutputType::kFloat) {
    store_as<float>(output.values, at, row, columns);
  } else if (output.type == OutputType::kHalf) {
    store_as<Half>(output.values, at, row, columns);
  } else {
    store_as<BFloat16>(output.values, at, row, columns);
  }
}

// One bag, looked up by the lanes of a row together.
template <class Index, class Weight>
struct Bag {
  const Lanes<1>& lanes;
  const Batch<Index>& batch;
  const Table& table;
  const Weight* weights;  // of the table
  int64_t feature;
  int64_t begin;
  int64_t end;

  // Calls visit(lookup, row, per-sample weight) for every lookup, in their order. Each lane reads the
  // numbers of another lookup and hands them round.
  template <class Visit>
  __device__ __forceinline__ void for_each(const LaneColumns<1>& columns,
                                           const Visit& visit) const {
    for (int64_t first = begin; first < end; first += lanes.count) {
      const int count = end - first < lanes.count ? static_cast<int>(end - first) : lanes.count;
      int64_t index = 0;
      float factor = 1.0f;
      if (lanes.lane < count) {
        const int64_t lookup = first + lanes.lane;
        index = batch.indices[lookup];
        check_index(batch, table, lookup, feature, index);
        factor = batch.per_sample_weights != nullptr ? batch.per_sample_weights[lookup] : 1.0f;
      }
#pragma unroll 4
      for (int k = 0; k < count; ++k) {
        const Weight* row = weights + lanes.broadcast(index, k) * table.dim + columns.first;
        const float weight = lanes.broadcast(factor, k);
        if (columns.any()) {
          visit(first + k, load_columns(row, columns), weight);
        }
      }
    }
  }

  __device__ __forceinline__ Columns pooled(const LaneColumns<1>& columns) const {
    Columns total{};
    for_each(columns, [&](int64_t, const Columns& row, float weight) {
      for (int v = 0; v < kColumnsPerLane; ++v) {
        total.values[v] += weight * row.values[v];
      }
    });
    if (batch.pooling == Pooling::kMean && begin < end) {
      for (float& value : total.values) {
        value /= static_cast<float>(end - begin);
      }
    }
    return total;
  }
};

template <class Index, class Weight>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    look_up_rows_kernel(const Batch<Index> batch, const DeviceLayout layout, const Weight* weights,
                        const Output output, int lane_count) {
  const auto lanes = Lanes<1>::of(lane_count);
  const int64_t features = batch.feature_bags == nullptr ? 0 : batch.features;
  for (int64_t i = thread_number(); i < features; i += thread_count()) {
    check_feature(batch, i);
  }
  for (int64_t b = lanes.group(); b < batch.bags; b += lanes.groups()) {
    check_bag(batch, b);
    if (batch.offsets[b] < 0 || batch.offsets[b + 1] > batch.lookups) {
      trap_at_bag(batch, b);  // another bag of the batch descends
    }
    // Where the features' bags are bad, any feature will do: the trap comes.
    const int64_t found = batch.feature_of(b);
    const int64_t f = found < 0 ? 0 : found;
    const Feature feature = layout.features[f];
    const Table& table = layout.tables[feature.table];
    const int dim = static_cast<int>(table.dim);
    const Bag<Index, Weight> bag{lanes,
                                 batch,
                                 table,
                                 weights + table.weights_offset,
                                 f,
                                 batch.offsets[b],
                                 batch.offsets[b + 1]};
    const bool pools = batch.pooling != Pooling::kNone;
    const int64_t to = batch.gradient_offset(bag.begin, b, f, feature, dim);
    if (pools) {
      check_output(b, to, dim, output.size);
    }
    for (int base = 0; base < dim; base += lanes.columns()) {
      const auto columns = lanes.columns_at(base, dim);
      if (pools) {
        const Columns row = bag.pooled(columns);
        store_output(output, to, row, columns);
      } else {
        bag.for_each(columns, [&](int64_t lookup, const Columns& row, float) {
          store_output(output, lookup * dim, row, columns);
        });
      }
    }
  }
}

}  // namespace

template <class Index, class Weight>
void look_up_rows(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                  const Batch<Index>& batch, const Weight* weights, const Output& output) {
  const int lane_count = lanes_for(max_dim);
  launch(queue, "look_up_rows", look_up_rows_kernel<Index, Weight>, batch.bags * lane_count, 0,
         batch, layout, weights, output, lane_count);
}

#define TORCHREC_EXT_INSTANTIATE(Index, Weight)                                               \
  template void look_up_rows(const Queue&, const DeviceLayout&, int64_t, const Batch<Index>&, \
                             const Weight*, const Output&)
TORCHREC_EXT_INSTANTIATE(int32_t, float);
TORCHREC_EXT_INSTANTIATE(int64_t, float);
TORCHREC_EXT_INSTANTIATE(int32_t, Half);
TORCHREC_EXT_INSTANTIATE(int64_t, Half);
TORCHREC_EXT_INSTANTIATE(int32_t, BFloat16);
TORCHREC_EXT_INSTANTIATE(int64_t, BFloat16);
#undef TORCHREC_EXT_INSTANTIATE

}  // namespace torchrec_ext::cuda
