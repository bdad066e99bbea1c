#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <limits>
#include <optional>
#include <vector>

#include "checks.h"
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

// Calls body(index, weight) with null pointers of the dtypes of the indices and of the weights.
template <class Body>
void dispatch(const Tensor& indices, const Tensor& weights, const Body& body) {
  const auto with_index = [&](auto* index) {
    if (weights.scalar_type() == ScalarType::Float) {
      return body(index, static_cast<float*>(nullptr));
    }
    STD_TORCH_CHECK(weights.scalar_type() == ScalarType::Half, "weights have dtype ",
                    weights.scalar_type(), ", expected Float or Half");
    body(index, static_cast<Half*>(nullptr));
  };
  if (indices.scalar_type() == ScalarType::Int) {
    return with_index(static_cast<int32_t*>(nullptr));
  }
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long, "indices have dtype ",
                  indices.scalar_type(), ", expected Int or Long");
  with_index(static_cast<int64_t*>(nullptr));
}

std::vector<float*> read_states(const Layout& layout, OptimType optimizer,
                                const std::vector<Tensor>& states) {
  std::vector<float*> pointers;
  visit_optimizer(optimizer, [&](auto tag) {
    const auto& infos = decltype(tag)::Type::kStates;
    STD_TORCH_CHECK(states.size() == infos.size(), states.size(), " states, expected ",
                    infos.size());
    for (size_t k = 0; k < infos.size(); ++k) {
      check_tensor(infos[k].name, states[k], ScalarType::Float, 1);
      for (size_t t = 0; t < layout.tables.size(); ++t) {
        const Table& table = layout.tables[t];
        check_inside(infos[k].name, static_cast<int64_t>(t), table.state_offsets[k],
                     infos[k].rowwise ? table.rows : table.rows * table.dim, states[k].numel());
      }
      pointers.push_back(states[k].mutable_data_ptr<float>());
    }
  });
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

void check_hyperparameters(OptimType optimizer, const std::vector<double>& hyperparameters) {
  visit_optimizer(optimizer, [&](auto tag) {
    const size_t expected = decltype(tag)::Type::kHyperparameters.size();
    STD_TORCH_CHECK(hyperparameters.size() == expected, hyperparameters.size(),
                    " hyperparameters, expected ", expected);
  });
}

void fused_update_cpu(Tensor grad_output, Tensor weights, std::vector<Tensor> states,
                      Tensor table_layout, Tensor feature_table_map, Tensor indices, Tensor offsets,
                      std::optional<Tensor> per_sample_weights, int64_t pooling_mode,
                      int64_t optimizer, std::vector<double> hyperparameters, double max_gradient,
                      bool stochastic_rounding, int64_t seed, int64_t step) {
  const auto type = static_cast<OptimType>(optimizer);
  const Layout layout = read_layout(table_layout, feature_table_map, count_states_of(type));
  check_weights(layout, weights);
  check_hyperparameters(type, hyperparameters);
  const std::vector<float*> state_pointers = read_states(layout, type, states);
  const cpu::UpdateOptions options{type,
                                   hyperparameters.data(),
                                   max_gradient_from(max_gradient),
                                   stochastic_rounding,
                                   static_cast<uint64_t>(seed),
                                   static_cast<uint64_t>(step)};
  dispatch(indices, weights, [&]<class Index, class Weight>(Index*, Weight*) {
    auto batch = read_batch<Index>(layout, indices, offsets, pooling_from(pooling_mode));
    read_weights(batch, per_sample_weights);
    check_gradient(grad_output, layout, batch.batch_size, batch.lookups, batch.pooling);
    const auto bad = cpu::fused_update(layout, batch, grad_output.const_data_ptr<float>(),
                                       weights.mutable_data_ptr<Weight>(), state_pointers, options);
    check_lookups(batch, layout, bad);
  });
}

Tensor per_sample_weight_grad_cpu(Tensor grad_output, Tensor weights, Tensor table_layout,
                                  Tensor feature_table_map, Tensor indices, Tensor offsets,
                                  std::optional<Tensor> feature_requires_grad, int64_t pooling_mode,
                                  double max_gradient) {
  STD_TORCH_CHECK(table_layout.dim() == 2 && table_layout.size(1) >= 3,
                  "table_layout must be [tables, 3 + states]");
  const Layout layout = read_layout(table_layout, feature_table_map, table_layout.size(1) - 3);
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

STABLE_TORCH_LIBRARY(torchrec_ext, m) {
  // One optimizer step on every row that the batch looks up, from the gradient of the lookup's
  // output. Updates weights and states in place; where an index or an offset is bad, raises before
  // anything was changed.
  m.def(
      "fused_update(Tensor grad_output, Tensor(a!) weights, Tensor(b!)[] states, Tensor "
      "table_layout, "
      "Tensor feature_table_map, Tensor indices, Tensor offsets, Tensor? per_sample_weights, int "
      "pooling_mode, "
      "int optimizer, float[] hyperparameters, float max_gradient, bool stochastic_rounding, int "
      "seed, int step) -> ()");
  // The gradient of per_sample_weights, float32 [lookups].
  m.def(
      "per_sample_weight_grad(Tensor grad_output, Tensor weights, Tensor table_layout, Tensor "
      "feature_table_map, "
      "Tensor indices, Tensor offsets, Tensor? feature_requires_grad, int pooling_mode, float "
      "max_gradient) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(torchrec_ext, CPU, m) {
  m.impl("fused_update", TORCH_BOX(&fused_update_cpu));
  m.impl("per_sample_weight_grad", TORCH_BOX(&per_sample_weight_grad_cpu));
}

}  // namespace torchrec_ext
