#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
#include "cpu/catch_up.h"
#include "cpu/fused_update.h"
#include "cpu/per_sample_weight_grad.h"

namespace torchrec_ext {
namespace {

Pooling pooling_from(int64_t mode) {
  STD_TORCH_CHECK(mode >= 0 && mode <= 2, "pooling_mode is ", mode,
                  ", expected 0 (sum), 1 (mean) or 2 (none)");
  return static_cast<Pooling>(mode);
}

float max_gradient_from(double max_gradient) {
  STD_TORCH_CHECK(max_gradient >= 0.0, "max_gradient is ", max_gradient, ", expected 0 or more");
  return static_cast<float>(max_gradient);
}

template <class Index>
void check_lookups(const Batch<Index>& batch, const Layout& layout, const cpu::BadLookup& bad) {
  if (bad.bag < 0) {
    return;
  }
  const int64_t feature = bad.bag / batch.batch_size;
  const int64_t table = layout.features[static_cast<size_t>(feature)].table;
  STD_TORCH_CHECK(bad.position >= 0, "offsets of feature ", feature, ", example ",
                  bad.bag % batch.batch_size, " run from ", batch.offsets[bad.bag], " to ",
                  batch.offsets[bad.bag + 1], " in a batch of ", batch.lookups, " lookups");
  STD_TORCH_CHECK(false, "index ", batch.indices[bad.position], " of feature ", feature,
                  ", example ", bad.bag % batch.batch_size, " is outside of table ", table,
                  ", which has ", layout.tables[static_cast<size_t>(table)].rows,
                  " rows; nothing was updated");
}

template <class Index>
void read_weights(Batch<Index>& batch, const std::optional<Tensor>& per_sample_weights) {
  if (!per_sample_weights.has_value()) {
    return;
  }
  check_tensor("per_sample_weights", *per_sample_weights, ScalarType::Float, 1);
  STD_TORCH_CHECK(batch.pooling != Pooling::kNone, "per_sample_weights need pooling");
  STD_TORCH_CHECK(per_sample_weights->numel() == batch.lookups, "per_sample_weights has ",
                  per_sample_weights->numel(), " elements for ", batch.lookups, " lookups");
  batch.per_sample_weights = per_sample_weights->const_data_ptr<float>();
}

// Calls body with a null pointer of the indices' dtype.
template <class Body>
void dispatch_index(const Tensor& indices, const Body& body) {
  if (indices.scalar_type() == ScalarType::Int) {
    return body(static_cast<int32_t*>(nullptr));
  }
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long, "indices have dtype ",
                  indices.scalar_type(), ", expected Int or Long");
  body(static_cast<int64_t*>(nullptr));
}

// Calls body with a null pointer of the weights' dtype.
template <class Body>
void dispatch_weight(const Tensor& weights, const Body& body) {
  if (weights.scalar_type() == ScalarType::Float) {
    return body(static_cast<float*>(nullptr));
  }
  STD_TORCH_CHECK(weights.scalar_type() == ScalarType::Half, "weights have dtype ",
                  weights.scalar_type(), ", expected Float or Half");
  body(static_cast<Half*>(nullptr));
}

template <class Body>
void dispatch(const Tensor& indices, const Tensor& weights, const Body& body) {
  dispatch_index(indices, [&](auto* index) {
    dispatch_weight(weights, [&](auto* weight) { body(index, weight); });
  });
}

std::vector<float*> read_states(const Layout& layout, const std::vector<StateInfo>& infos,
                                const std::vector<Tensor>& states) {
  STD_TORCH_CHECK(states.size() == infos.size(), states.size(), " states, expected ", infos.size());
  std::vector<float*> pointers;
  for (size_t k = 0; k < infos.size(); ++k) {
    check_tensor(infos[k].name, states[k], ScalarType::Float, 1);
    for (size_t t = 0; t < layout.tables.size(); ++t) {
      const Table& table = layout.tables[t];
      check_inside(infos[k].name, static_cast<int64_t>(t), table.state_offsets[k],
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
    check_inside("weights", static_cast<int64_t>(t), table.weights_offset, table.rows * table.dim,
                 weights.numel());
  }
}

// The optimizer's part of an op: what it is, its states and its options, all checked.
struct OptimizerArguments {
  std::vector<StateInfo> infos;
  cpu::UpdateOptions options;

  OptimizerArguments(int64_t optimizer, const std::vector<double>& hyperparameters,
                     double max_gradient, bool stochastic_rounding, int64_t seed, int64_t step)
      : options{static_cast<OptimType>(optimizer), hyperparameters.data(),
                max_gradient_from(max_gradient),   stochastic_rounding,
                static_cast<uint64_t>(seed),       static_cast<uint64_t>(step)} {
    check_hyperparameters(options.optimizer, hyperparameters);
    infos = states_of(options.optimizer, hyperparameters);
  }

  int64_t state_count() const { return static_cast<int64_t>(infos.size()); }
};

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

void fused_update_cpu(Tensor grad_output, Tensor weights, std::vector<Tensor> states,
                      Tensor table_layout, Tensor feature_table_map, Tensor indices, Tensor offsets,
                      std::optional<Tensor> per_sample_weights, std::vector<Tensor> segments,
                      int64_t pooling_mode, int64_t optimizer, std::vector<double> hyperparameters,
                      double max_gradient, bool stochastic_rounding, int64_t seed, int64_t step) {
  const OptimizerArguments arguments(optimizer, hyperparameters, max_gradient, stochastic_rounding,
                                     seed, step);
  const Layout layout = read_layout(table_layout, feature_table_map, arguments.state_count());
  check_weights(layout, weights);
  const std::vector<float*> state_pointers = read_states(layout, arguments.infos, states);
  const auto sorted = read_segments(segments, indices.numel());
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    auto batch = read_batch<Index>(layout, indices, offsets, pooling_from(pooling_mode));
    read_weights(batch, per_sample_weights);
    check_gradient(grad_output, layout, batch.batch_size, batch.lookups, batch.pooling);
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
                                     Tensor offsets) {
  const Layout layout = read_layout_of_any(table_layout, feature_table_map);
  std::vector<Tensor> result;
  dispatch_index(indices, [&]<class Index>(Index*) {
    const auto batch = read_batch<Index>(layout, indices, offsets, Pooling::kSum);
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

void check_catches_up(const cpu::UpdateOptions& options) {
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
                                  double max_gradient) {
  const Layout layout = read_layout_of_any(table_layout, feature_table_map);
  check_weights(layout, weights);
  const int32_t* required = nullptr;
  if (feature_requires_grad.has_value()) {
    check_tensor("feature_requires_grad", *feature_requires_grad, ScalarType::Int, 1);
    STD_TORCH_CHECK(feature_requires_grad->numel() == feature_table_map.numel(),
                    "feature_requires_grad has ", feature_requires_grad->numel(), " elements for ",
                    feature_table_map.numel(), " features");
    required = feature_requires_grad->const_data_ptr<int32_t>();
  }
  Tensor result = torch::stable::new_empty(grad_output, {indices.numel()}, ScalarType::Float);
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    const auto batch = read_batch<Index>(layout, indices, offsets, pooling_from(pooling_mode));
    STD_TORCH_CHECK(batch.pooling != Pooling::kNone, "per_sample_weights need pooling");
    check_gradient(grad_output, layout, batch.batch_size, batch.lookups, batch.pooling);
    const auto bad = cpu::per_sample_weight_grad(
        layout, batch, grad_output.const_data_ptr<float>(), weights.const_data_ptr<Weight>(),
        required, max_gradient_from(max_gradient), result.mutable_data_ptr<float>());
    check_lookups(batch, layout, bad);
  });
  return result;
}

}  // namespace

// clang-format off: one argument group a line.
STABLE_TORCH_LIBRARY(torchrec_ext, m) {
  // One optimizer step on every row that the batch looks up, from the gradient of the lookup's
  // output. Updates weights and states in place; where an index or an offset is bad, raises before
  // anything was changed. segments is the result of sort_lookups, or empty.
  m.def(
      "fused_update(Tensor grad_output, Tensor(a!) weights, Tensor(b!)[] states, "
      "Tensor table_layout, Tensor feature_table_map, "
      "Tensor indices, Tensor offsets, Tensor? per_sample_weights, Tensor[] segments, "
      "int pooling_mode, int optimizer, float[] hyperparameters, float max_gradient, "
      "bool stochastic_rounding, int seed, int step) -> ()");
  // The gradient of per_sample_weights, float32 [lookups].
  m.def(
      "per_sample_weight_grad(Tensor grad_output, Tensor weights, "
      "Tensor table_layout, Tensor feature_table_map, "
      "Tensor indices, Tensor offsets, Tensor? feature_requires_grad, "
      "int pooling_mode, float max_gradient) -> Tensor");
  // The lookups sorted by row: rows, begins, positions (cpu/segments.h).
  m.def(
      "sort_lookups(Tensor table_layout, Tensor feature_table_map, Tensor indices, Tensor offsets)"
      " -> Tensor[]");
  // Applies to rows (None: all) the updates up to `now` that they slept through (catch_up.h).
  m.def(
      "catch_up(Tensor(a!) weights, Tensor(b!)[] states, Tensor(c!) row_steps, "
      "Tensor table_layout, Tensor? rows, "
      "Tensor history, int history_start, int window, int now, "
      "int optimizer, float[] hyperparameters, bool stochastic_rounding, int seed) -> ()");
}
// clang-format on

STABLE_TORCH_LIBRARY_IMPL(torchrec_ext, CPU, m) {
  m.impl("fused_update", TORCH_BOX(&fused_update_cpu));
  m.impl("per_sample_weight_grad", TORCH_BOX(&per_sample_weight_grad_cpu));
  m.impl("sort_lookups", TORCH_BOX(&sort_lookups_cpu));
  m.impl("catch_up", TORCH_BOX(&catch_up_cpu));
}

}  // namespace torchrec_ext
