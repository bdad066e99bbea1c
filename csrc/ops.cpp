#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <initializer_list>
#include <optional>
#include <vector>

#include "arguments.h"
#include "cpu/catch_up.h"
#include "cpu/fused_update.h"
#include "cpu/per_sample_weight_grad.h"
#include "schemas.h"

namespace torchrec_ext {
namespace {

template <class Index>
void check_lookups(const Batch<Index>& batch, const Layout& layout, const cpu::BadLookup& bad) {
  if (bad.bag < 0) {
    return;
  }
  const int64_t feature = batch.feature_of(bad.bag);
  const int64_t example = batch.example_of(bad.bag, feature);
  STD_TORCH_CHECK(bad.position >= 0, "offsets of feature ", feature, ", example ", example,
                  " run from ", batch.offsets[bad.bag], " to ", batch.offsets[bad.bag + 1],
                  " in a batch of ", batch.lookups, " lookups");
  STD_TORCH_CHECK(false, "index ", batch.indices[bad.position], " of feature ", feature,
                  ", example ", example, " is outside of table ",
                  layout.features[static_cast<size_t>(feature)].table, ", which has ",
                  layout.table_of_feature(feature).rows, " rows; nothing was updated");
}

template <class Index>
void check_variable_batch(const Layout& layout, const Batch<Index>& batch, int64_t gradient_size) {
  for (int64_t f = 0; f < batch.features; ++f) {
    STD_TORCH_CHECK(batch.feature_bags[f] <= batch.feature_bags[f + 1], "feature_bags of feature ",
                    f, " run from ", batch.feature_bags[f], " to ", batch.feature_bags[f + 1]);
  }
  STD_TORCH_CHECK(batch.feature_bags[0] == 0 && batch.feature_bags[batch.features] == batch.bags,
                  "feature_bags must start at 0 and end at ", batch.bags);
  for (int64_t bag = 0; bag < batch.bags && batch.gradient_offsets != nullptr; ++bag) {
    const int64_t offset = batch.gradient_offsets[bag];
    const int64_t dim = layout.table_of_feature(batch.feature_of(bag)).dim;
    STD_TORCH_CHECK(offset >= 0 && offset + dim <= gradient_size, "the gradient of bag ", bag,
                    " begins at element ", offset, " of ", gradient_size);
  }
}

// A batch on the host, its offsets' ends and what belongs to variable batch sizes checked.
template <class Index>
Batch<Index> read_host_batch(const Layout& layout, const BatchArguments& arguments,
                             int64_t gradient_size) {
  const auto batch = read_batch<Index>(layout, arguments);
  STD_TORCH_CHECK(batch.offsets[0] == 0 && batch.offsets[batch.bags] == batch.lookups,
                  "offsets must start at 0 and end at ", batch.lookups, ", but are ",
                  batch.offsets[0], " and ", batch.offsets[batch.bags]);
  if (batch.feature_bags != nullptr) {
    check_variable_batch(layout, batch, gradient_size);
  }
  return batch;
}

template <class Index>
void check_gradient(const Tensor& gradient, const Layout& layout, const Batch<Index>& batch) {
  check_tensor("grad_output", gradient, ScalarType::Float, gradient.dim());
  check_gradient_shape(gradient, layout, batch);
}

std::vector<float*> read_states(const Layout& layout, const std::vector<StateInfo>& infos,
                                const std::vector<Tensor>& states) {
  STD_TORCH_CHECK(states.size() == infos.size(), states.size(), " states, expected ", infos.size());
  std::vector<float*> pointers;
  for (size_t k = 0; k < infos.size(); ++k) {
    check_tensor(infos[k].name, states[k], ScalarType::Float, 1);
    for (size_t t = 0; t < layout.tables.size(); ++t) {
      const Table& table = layout.tables[t];
      check_inside(infos[k].name, t, table.state_offsets[k],
                   infos[k].rowwise ? table.rows : table.rows * table.dim, states[k].numel());
    }
    pointers.push_back(states[k].mutable_data_ptr<float>());
  }
  return pointers;
}

void check_weights(const Layout& layout, const Tensor& weights) {
  check_tensor("weights", weights, weights.scalar_type(), 1);
  for (size_t t = 0; t < layout.tables.size(); ++t) {
    const Table& table = layout.tables[t];
    check_inside("weights", t, table.weights_offset, table.rows * table.dim, weights.numel());
  }
}

// Lookups that sort_lookups sorted, or nothing where the list is empty.
std::optional<cpu::Segments> read_segments(const std::vector<Tensor>& segments, int64_t lookups) {
  if (segments.empty()) {
    return std::nullopt;
  }
  STD_TORCH_CHECK(segments.size() == 3, "segments has ", segments.size(), " tensors, expected 3");
  check_tensor("rows", segments[0], ScalarType::Long, 1);
  check_tensor("begins", segments[1], ScalarType::Int, 1);
  check_tensor("positions", segments[2], ScalarType::Int, 1);
  const int64_t count = segments[0].numel();
  STD_TORCH_CHECK(segments[1].numel() == count + 1 && segments[2].numel() == lookups,
                  "segments are of another batch");
  return cpu::Segments{count, segments[0].const_data_ptr<int64_t>(),
                       reinterpret_cast<const uint32_t*>(segments[1].const_data_ptr<int32_t>()),
                       reinterpret_cast<const uint32_t*>(segments[2].const_data_ptr<int32_t>())};
}

// The arguments that only a device has a use for.
void check_no_device_tensors(std::initializer_list<const std::optional<Tensor>*> tensors,
                             const std::optional<std::vector<Tensor>>& managed_states = {}) {
  for (const std::optional<Tensor>* tensor : tensors) {
    STD_TORCH_CHECK(!tensor->has_value(), "weights on the CPU take no tensors of a device");
  }
  STD_TORCH_CHECK(!managed_states.has_value(), "weights on the CPU take no managed states");
}

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
    const auto bad = cpu::fused_update(
        layout, batch, sorted ? &*sorted : nullptr, grad_output.const_data_ptr<float>(),
        weights.mutable_data_ptr<Weight>(), state_pointers, arguments.options);
    check_lookups(batch, layout, bad);
  });
}

template <class Element, class Source>
Tensor copy_to_tensor(const Tensor& like, ScalarType dtype, const Source* values, int64_t count) {
  static_assert(sizeof(Element) == sizeof(Source));
  Tensor result = torch::stable::new_empty(like, {count}, dtype);
  std::copy_n(reinterpret_cast<const Element*>(values), count, result.mutable_data_ptr<Element>());
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
    cpu::OwnedSegments segments;
    check_lookups(batch, layout, cpu::sort_by_row(layout, batch, segments));
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

History read_history(const Tensor& history, int64_t start, int64_t window, int64_t now) {
  check_tensor("history", history, ScalarType::Double, 2);
  STD_TORCH_CHECK(history.size(0) == 3 && start >= 0 && window >= 0 && now >= start &&
                      now - start < history.size(1),
                  "history of shape [", history.size(0), ", ", history.size(1), "] starts at ",
                  start, " and cannot reach ", now);
  const double* values = history.const_data_ptr<double>();
  const int64_t capacity = history.size(1);
  return {values, values + capacity, values + 2 * capacity, start, window, now};
}

void check_catches_up(const UpdateOptions& options) {
  select_optimizer(
      options.optimizer, options.hyperparameters, 0, []<class Optimizer>(const Optimizer&) {
        STD_TORCH_CHECK(Optimizer::kCatchesUp, "this optimizer cannot catch up rows that slept");
      });
}

// Every row must be within the history, and rows must be ascending: the loop relies on it.
void check_rows(const Layout& layout, const int64_t* rows, int64_t count, const int32_t* row_steps,
                const History& history) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = rows == nullptr ? i : rows[i];
    STD_TORCH_CHECK(row >= 0 && row < layout.total_rows, "row ", row, " of ", layout.total_rows);
    STD_TORCH_CHECK(rows == nullptr || i == 0 || rows[i - 1] < row, "rows are not ascending");
    STD_TORCH_CHECK(row_steps[row] >= history.start, "row ", row, " is current to update ",
                    row_steps[row], ", but the history starts at ", history.start);
  }
}

void catch_up_cpu(Tensor weights, std::vector<Tensor> states, Tensor row_steps, Tensor table_layout,
                  std::optional<Tensor> rows, Tensor history, int64_t history_start, int64_t window,
                  int64_t now, int64_t optimizer, std::vector<double> hyperparameters,
                  bool stochastic_rounding, int64_t seed) {
  const OptimizerArguments arguments(optimizer, hyperparameters, 0.0, stochastic_rounding, seed,
                                     now);
  check_catches_up(arguments.options);
  const Layout layout = read_tables(table_layout, arguments.state_count());
  check_weights(layout, weights);
  const std::vector<float*> state_pointers = read_states(layout, arguments.infos, states);
  check_tensor("row_steps", row_steps, ScalarType::Int, 1);
  STD_TORCH_CHECK(row_steps.numel() == layout.total_rows, "row_steps has ", row_steps.numel(),
                  " elements for ", layout.total_rows, " rows");
  if (rows.has_value()) {
    check_tensor("rows", *rows, ScalarType::Long, 1);
  }
  const int64_t* row_numbers = rows.has_value() ? rows->const_data_ptr<int64_t>() : nullptr;
  const int64_t count = rows.has_value() ? rows->numel() : layout.total_rows;
  const History past = read_history(history, history_start, window, now);
  int32_t* steps = row_steps.mutable_data_ptr<int32_t>();
  check_rows(layout, row_numbers, count, steps, past);
  dispatch_weight(weights, [&]<class Weight>(Weight*) {
    cpu::catch_up(layout, row_numbers, count, weights.mutable_data_ptr<Weight>(), state_pointers,
                  steps, past, arguments.options);
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
    const auto bad = cpu::per_sample_weight_grad(
        layout, batch, grad_output.const_data_ptr<float>(), weights.const_data_ptr<Weight>(),
        required, max_gradient_from(max_gradient), result.mutable_data_ptr<float>());
    check_lookups(batch, layout, bad);
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY(torchrec_ext, m) {
  for (const char* schema : schemas::kAll) {
    m.def(schema);
  }
}

STABLE_TORCH_LIBRARY_IMPL(torchrec_ext, CPU, m) {
  m.impl("fused_update", TORCH_BOX(&fused_update_cpu));
  m.impl("per_sample_weight_grad", TORCH_BOX(&per_sample_weight_grad_cpu));
  m.impl("sort_lookups", TORCH_BOX(&sort_lookups_cpu));
  m.impl("device_layout", TORCH_BOX(&device_layout_cpu));
  m.impl("catch_up", TORCH_BOX(&catch_up_cpu));
}

}  // namespace torchrec_ext
