#include "ops.h"

#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "fused_update.h"
#include "host_arguments.h"
#include "per_sample_weight_grad.h"

namespace torchrec_ext::cpu {
namespace {

template <class Element, class Source>
Tensor copy_to_tensor(const Tensor& like, ScalarType dtype, const Source* values, int64_t count) {
  static_assert(sizeof(Element) == sizeof(Source));
  Tensor result = torch::stable::new_empty(like, {count}, dtype);
  std::copy_n(reinterpret_cast<const Element*>(values), count, result.mutable_data_ptr<Element>());
  return result;
}

}  // namespace

void fused_update_cpu(Tensor grad_output, Tensor weights, std::vector<Tensor> states,
                      Tensor table_layout, Tensor feature_table_map, Tensor indices, Tensor offsets,
                      std::optional<Tensor> per_sample_weights, std::vector<Tensor> segments,
                      int64_t pooling_mode, int64_t optimizer, std::vector<double> hyperparameters,
                      double max_gradient, bool stochastic_rounding, int64_t seed, int64_t step,
                      std::optional<Tensor> feature_bags, std::optional<Tensor> gradient_offsets,
                      std::optional<Tensor> device_layout, std::optional<Tensor> step_scalars,
                      std::optional<Tensor> managed_weights,
                      std::optional<std::vector<Tensor>> managed_states,
                      std::optional<Tensor> cache_weights, std::optional<Tensor> cache_locations) {
  check_no_device_tensors(
      {&device_layout, &step_scalars, &managed_weights, &cache_weights, &cache_locations},
      managed_states);
  const OptimizerArguments arguments(optimizer, hyperparameters, max_gradient, stochastic_rounding,
                                     seed, step);
  const Layout layout = read_layout(table_layout, feature_table_map, arguments.state_count());
  check_weights(layout, weights);
  const std::vector<float*> state_pointers = read_states(layout, arguments.infos, states);
  const auto sorted = read_segments(segments, indices.numel());
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    const BatchArguments tensors{indices,      offsets,          per_sample_weights,
                                 feature_bags, gradient_offsets, pooling_from(pooling_mode),
                                 nullptr};
    const auto batch = read_host_batch<Index>(layout, tensors, grad_output.numel());
    check_gradient(grad_output, layout, batch);
    const auto bad = fused_update(
        layout, batch, sorted ? &*sorted : nullptr, grad_output.const_data_ptr<float>(),
        weights.mutable_data_ptr<Weight>(), state_pointers, arguments.options);
    check_lookups(batch, layout, bad);
  });
}

Tensor per_sample_weight_grad_cpu(Tensor grad_output, Tensor weights, Tensor table_layout,
                                  Tensor feature_table_map, Tensor indices, Tensor offsets,
                                  std::optional<Tensor> feature_requires_grad, int64_t pooling_mode,
                                  double max_gradient, std::optional<Tensor> feature_bags,
                                  std::optional<Tensor> gradient_offsets,
                                  std::optional<Tensor> device_layout,
                                  std::optional<Tensor> managed_weights,
                                  std::optional<Tensor> cache_weights,
                                  std::optional<Tensor> cache_locations) {
  check_no_device_tensors({&device_layout, &managed_weights, &cache_weights, &cache_locations});
  const Layout layout = read_layout_of_any(table_layout, feature_table_map);
  check_weights(layout, weights);
  const int32_t* required = read_required(feature_requires_grad, layout, nullptr);
  Tensor result = torch::stable::new_empty(grad_output, {indices.numel()}, ScalarType::Float);
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    const std::optional<Tensor> none;
    const BatchArguments tensors{indices,      offsets,          none,
                                 feature_bags, gradient_offsets, pooling_from(pooling_mode),
                                 nullptr};
    const auto batch = read_host_batch<Index>(layout, tensors, grad_output.numel());
    STD_TORCH_CHECK(batch.pooling != Pooling::kNone, "per_sample_weights need pooling");
    check_gradient(grad_output, layout, batch);
    const auto bad = per_sample_weight_grad(
        layout, batch, grad_output.const_data_ptr<float>(), weights.const_data_ptr<Weight>(),
        required, max_gradient_from(max_gradient), result.mutable_data_ptr<float>());
    check_lookups(batch, layout, bad);
  });
  return result;
}

std::vector<Tensor> sort_lookups_cpu(Tensor table_layout, Tensor feature_table_map, Tensor indices,
                                     Tensor offsets, std::optional<Tensor> feature_bags) {
  const Layout layout = read_layout_of_any(table_layout, feature_table_map);
  std::vector<Tensor> result;
  dispatch_index(indices, [&]<class Index>(Index*) {
    const std::optional<Tensor> none;
    const BatchArguments tensors{indices, offsets,       none,   feature_bags,
                                 none,    Pooling::kSum, nullptr};
    const auto batch = read_host_batch<Index>(layout, tensors, 0);
    STD_TORCH_CHECK(batch.lookups < int64_t{1} << 31, "a batch of ", batch.lookups,
                    " lookups; at most 2^31 - 1 can be sorted beforehand");
    OwnedSegments segments;
    check_lookups(batch, layout, sort_by_row(layout, batch, segments));
    result = {
        copy_to_tensor<int64_t>(indices, ScalarType::Long, segments.rows.get(), segments.count),
        copy_to_tensor<int32_t>(indices, ScalarType::Int, segments.begins.get(),
                                segments.count + 1),
        copy_to_tensor<int32_t>(indices, ScalarType::Int, segments.positions.get(), batch.lookups)};
  });
  return result;
}

// int64: every Table, then every Feature (lookup.h).
Tensor device_layout_cpu(Tensor table_layout, Tensor feature_table_map) {
  const Layout layout = read_layout_of_any(table_layout, feature_table_map);
  static_assert(sizeof(Table) % sizeof(int64_t) == 0 && sizeof(Feature) % sizeof(int64_t) == 0);
  const size_t table_bytes = layout.tables.size() * sizeof(Table);
  const size_t feature_bytes = layout.features.size() * sizeof(Feature);
  const int64_t size = static_cast<int64_t>((table_bytes + feature_bytes) / sizeof(int64_t));
  Tensor result = torch::stable::new_empty(table_layout, {size}, ScalarType::Long);
  char* bytes = static_cast<char*>(result.mutable_data_ptr());
  std::memcpy(bytes, layout.tables.data(), table_bytes);
  std::memcpy(bytes + table_bytes, layout.features.data(), feature_bytes);
  return result;
}

}  // namespace torchrec_ext::cpu
