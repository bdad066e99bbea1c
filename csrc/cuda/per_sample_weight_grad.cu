#include "per_sample_weight_grad.h"

#include "../rounding.h"

namespace torchrec_ext::cuda {
namespace {

template <class Weight>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks)
    per_sample_weight_grad_kernel(const DeviceLayout layout, const Segments lookups,
                                  const GradientSource source, const Weights<Weight> weights,
                                  float* out, int lane_count) {
  const Lanes lanes = Lanes::of(lane_count);
  for (int64_t i = lanes.group(); i < lookups.lookups; i += lanes.groups()) {
    const int64_t number = lookups.row(i);
    const Table& table = layout.table_of(number);
    const Weight* row = weights.row(table, number - table.first_row, i);
    const bool required = source.sources[i] != kNoSource;
    float partials[kColumnsPerLane] = {};
    for (int column = lanes.first_column(); column < table.dim && required;
         column += lanes.columns()) {
      const Columns gradient = source.unscaled(i, column);
      const Columns weight = load_columns(row + column);
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

template <class Weight>
void per_sample_weight_grad(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                            const Lookups& lookups, int64_t count, const GradientSource& source,
                            const Weights<Weight>& weights, float* out) {
  const int lane_count = lanes_for(max_dim);
  const Segments unsorted{lookups.keys, lookups.positions, nullptr, nullptr,
                          count,        lookups.wide_keys};
  launch(queue, "per_sample_weight_grad", per_sample_weight_grad_kernel<Weight>, count * lane_count,
         0, layout, unsorted, source, weights, out, lane_count);
}

#define TORCHREC_EXT_INSTANTIATE(Weight)                                                           \
  template void per_sample_weight_grad(const Queue&, const DeviceLayout&, int64_t, const Lookups&, \
                                       int64_t, const GradientSource&, const Weights<Weight>&,     \
                                       float*)
TORCHREC_EXT_INSTANTIATE(float);
TORCHREC_EXT_INSTANTIATE(Half);
TORCHREC_EXT_INSTANTIATE(BFloat16);
#undef TORCHREC_EXT_INSTANTIATE

}  // namespace torchrec_ext::cuda
