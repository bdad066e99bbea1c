#include "per_sample_weight_grad.h"

#include "../rounding.h"

namespace torchrec_ext::cuda {
namespace {

template <int kAtOnce, class Weight>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    per_sample_weight_grad_kernel(const DeviceLayout layout, const Segments lookups,
                                  const GradientSource source, const Weights<Weight> weights,
                                  float* out, int lane_count) {
  const auto lanes = Lanes<kAtOnce>::of(lane_count);
  for (int64_t i = lanes.group(); i < lookups.lookups; i += lanes.groups()) {
    const int64_t number = lookups.row(i);
    const Table& table = layout.table_of(number);
    const Weight* row = weights.row(table, number - table.first_row, i);
    const bool required = source.sources[i] != kNoSource;
    float partials[kColumnsPerLane] = {};
    const int dim = static_cast<int>(table.dim);
    for (int base = 0; base < dim && required; base += lanes.columns()) {
      const auto columns = lanes.columns_at(base, dim);
      if (!columns.any()) {
        break;
      }
      const Columns gradient = source.unscaled(i, columns);
      const Columns weight = load_columns(row + columns.first, columns);
      for (int v = 0; v < kColumnsPerLane; ++v) {
        partials[v] += gradient.values[v] * weight.values[v];
      }
    }
    const float product = lanes.fold(partials);
    if (lanes.lane == 0) {
      const float scale = source.scales != nullptr ? source.scales[i] : 1.0f;
      out[i] = required ? product * scale : 0.0f;
    }
  }
}

}  // namespace

template <int kAtOnce, class Weight>
void per_sample_weight_grad(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                            const Lookups& lookups, int64_t count, const GradientSource& source,
                            const Weights<Weight>& weights, float* out) {
  const int lane_count = lanes_for(max_dim);
  const Segments unsorted{lookups.keys, lookups.positions, nullptr, nullptr,
                          count,        lookups.wide_keys};
  launch(queue, "per_sample_weight_grad", per_sample_weight_grad_kernel<kAtOnce, Weight>,
         count * lane_count, 0, layout, unsorted, source, weights, out, lane_count);
}

#define TORCHREC_EXT_INSTANTIATE(kAtOnce, Weight)                                               \
  template void per_sample_weight_grad<kAtOnce>(const Queue&, const DeviceLayout&, int64_t,     \
                                                const Lookups&, int64_t, const GradientSource&, \
                                                const Weights<Weight>&, float*)
TORCHREC_EXT_INSTANTIATE(kColumnsPerLane, float);
TORCHREC_EXT_INSTANTIATE(kColumnsPerLane, Half);
TORCHREC_EXT_INSTANTIATE(kColumnsPerLane, BFloat16);
TORCHREC_EXT_INSTANTIATE(1, float);
TORCHREC_EXT_INSTANTIATE(1, Half);
TORCHREC_EXT_INSTANTIATE(1, BFloat16);
#undef TORCHREC_EXT_INSTANTIATE

}  // namespace torchrec_ext::cuda
