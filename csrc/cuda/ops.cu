#include "ops.h"

#include "device_arguments.h"
#include "per_sample_weight_grad.h"
#include "queue.h"
#include "update_rows.h"

namespace torchrec_ext::cuda {
namespace {

const int64_t* read_step_scalars(const std::optional<Tensor>& step_scalars, size_t hyperparameters,
                                 const Tensor& like) {
  STD_TORCH_CHECK(step_scalars.has_value(), "step_scalars is missing");
  check_tensor("step_scalars", *step_scalars, ScalarType::Long, 1, &like);
  check_size("step_scalars", *step_scalars, static_cast<int64_t>(hyperparameters) + 1,
             "scalars of this optimizer");
  return step_scalars->const_data_ptr<int64_t>();
}

SortBuffers take_sort_buffers(Scratch& scratch, int64_t count, const Lookups& lookups,
                              int64_t total_rows) {
  SortBuffers buffers{};
  buffers.keys = scratch.take_keys(count, lookups.wide_keys);
  buffers.positions = scratch.take<uint32_t>(count);
  buffers.begins = scratch.take<uint32_t>(count);
  buffers.count = scratch.take<int64_t>(1);
  buffers.scratch_size = sort_scratch_size(count, total_rows, lookups.wide_keys);
  buffers.scratch = scratch.take<char>(static_cast<int64_t>(buffers.scratch_size));
  return buffers;
}

StoredSums take_stored_sums(Scratch& scratch, int64_t lookups, int64_t max_dim) {
  StoredSums stored{{}, max_dim};
  for (int level = 0; level < kLevels; ++level) {
    stored.sums[level] = scratch.take<float>((lookups >> sum_bits(level)) * max_dim);
  }
  return stored;
}

template <int kAtOnce, class Index>
SortedBatch sort_batch(const Queue& queue, Scratch& scratch, const Layout& layout,
                       const DeviceLayout& device_layout, const Batch<Index>& batch,
                       const Tensor& gradient, float max_gradient) {
  GradientSource source = read_gradient(gradient, max_gradient, kAtOnce);
  const Lookups lookups = take_lookups(scratch, batch.lookups, layout, batch.has_scales());
  find_lookups<kAtOnce>(queue, device_layout, batch, nullptr, gradient.numel(), lookups);
  const Segments segments =
      sort_lookups(queue, lookups, batch.lookups, layout.total_rows,
                   take_sort_buffers(scratch, batch.lookups, lookups, layout.total_rows));
  source.positions = segments.positions;
  source.sources = lookups.sources;
  source.scales = lookups.scales;
  const StoredSums stored = take_stored_sums(scratch, batch.lookups, layout.max_dim);
  store_sums<kAtOnce>(queue, device_layout, layout.max_dim, segments, source, stored);
  return {device_layout, segments, source, stored};
}

}  // namespace

void fused_update_cuda(Tensor grad_output, Tensor weights, std::vector<Tensor> states,
                       Tensor table_layout, Tensor feature_table_map, Tensor indices,
                       Tensor offsets, std::optional<Tensor> per_sample_weights,
                       std::vector<Tensor> segments, int64_t pooling_mode, int64_t optimizer,
                       std::vector<double> hyperparameters, double max_gradient,
                       bool stochastic_rounding, int64_t seed, int64_t step,
                       std::optional<Tensor> feature_bags, std::optional<Tensor> gradient_offsets,
                       std::optional<Tensor> device_layout, std::optional<Tensor> step_scalars,
                       std::optional<Tensor> managed_weights,
                       std::optional<std::vector<Tensor>> managed_states,
                       std::optional<Tensor> cache_weights, std::optional<Tensor> cache_locations) {
  STD_TORCH_CHECK(segments.empty(), "segments are for weights on the CPU");
  const OptimizerArguments arguments(optimizer, hyperparameters, max_gradient, stochastic_rounding,
                                     seed, step);
  const Layout layout = read_layout(table_layout, feature_table_map, arguments.state_count());
  const int at_once = columns_at_once(layout);
  check_alignment(layout, arguments.infos, at_once);
  const DeviceLayout on_device = read_device_layout(device_layout, layout, weights);
  const auto buffers =
      read_states(layout, arguments.infos, states, managed_states, weights, at_once);
  const int64_t* scalars = read_step_scalars(step_scalars, hyperparameters.size(), weights);
  const TableArguments tables{weights, managed_weights, cache_weights, cache_locations};
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    const auto batch =
        read_batch<Index>(layout, {indices, offsets, per_sample_weights, feature_bags,
                                   gradient_offsets, pooling_from(pooling_mode), &weights});
    check_output_shape("grad_output", grad_output, layout, batch);
    const auto placed = read_weights<Weight>(tables, layout, batch.lookups, at_once);
    if (batch.lookups == 0) {
      return;
    }
    const CurrentQueue queue(weights);
    Scratch scratch(weights);
    const Tensor gradient = readable_gradient(grad_output, weights, at_once);
    UpdateTask<Weight> task{{}, placed, {}, layout.max_dim};
    std::copy(buffers.begin(), buffers.end(), task.states);
    dispatch_columns(at_once, [&]<int kAtOnce>(std::integral_constant<int, kAtOnce>) {
      static_cast<SortedBatch&>(task) = sort_batch<kAtOnce>(
          queue.get(), scratch, layout, on_device, batch, gradient, arguments.options.max_gradient);
      update_rows<kAtOnce>(queue.get(), task, arguments.options, scalars,
                           scratch.take<char>(kStepSize));
    });
  });
}

Tensor per_sample_weight_grad_cuda(
    Tensor grad_output, Tensor weights, Tensor table_layout, Tensor feature_table_map,
    Tensor indices, Tensor offsets, std::optional<Tensor> feature_requires_grad,
    int64_t pooling_mode, double max_gradient, std::optional<Tensor> feature_bags,
    std::optional<Tensor> gradient_offsets, std::optional<Tensor> device_layout,
    std::optional<Tensor> managed_weights, std::optional<Tensor> cache_weights,
    std::optional<Tensor> cache_locations) {
  const Layout layout = read_layout_of_any(table_layout, feature_table_map);
  const int at_once = columns_at_once(layout);
  check_alignment(layout, {}, at_once);
  const DeviceLayout on_device = read_device_layout(device_layout, layout, weights);
  const int32_t* required = read_required(feature_requires_grad, layout, &weights);
  const TableArguments tables{weights, managed_weights, cache_weights, cache_locations};
  Tensor result = torch::stable::new_empty(grad_output, {indices.numel()}, ScalarType::Float);
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    const std::optional<Tensor> none;
    const auto batch =
        read_batch<Index>(layout, {indices, offsets, none, feature_bags, gradient_offsets,
                                   pooling_from(pooling_mode), &weights});
    STD_TORCH_CHECK(batch.pooling != Pooling::kNone, "per_sample_weights need pooling");
    check_output_shape("grad_output", grad_output, layout, batch);
    const auto placed = read_weights<Weight>(tables, layout, batch.lookups, at_once);
    const CurrentQueue queue(weights);
    Scratch scratch(weights);
    const Tensor gradient = readable_gradient(grad_output, weights, at_once);
    GradientSource source = read_gradient(gradient, max_gradient_from(max_gradient), at_once);
    const Lookups lookups = take_lookups(scratch, batch.lookups, layout, batch.has_scales());
    source.sources = lookups.sources;
    source.scales = lookups.scales;
    dispatch_columns(at_once, [&]<int kAtOnce>(std::integral_constant<int, kAtOnce>) {
      find_lookups<kAtOnce>(queue.get(), on_device, batch, required, gradient.numel(), lookups);
      per_sample_weight_grad<kAtOnce>(queue.get(), on_device, layout.max_dim, lookups,
                                      batch.lookups, source, placed,
                                      result.mutable_data_ptr<float>());
    });
  });
  return result;
}

}  // namespace torchrec_ext::cuda
