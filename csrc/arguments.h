#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "update_options.h"

namespace torchrec_ext {

inline Pooling pooling_from(int64_t mode) {
  STD_TORCH_CHECK(mode >= 0 && mode <= 2, "pooling_mode is ", mode,
                  ", expected 0 (sum), 1 (mean) or 2 (none)");
  return static_cast<Pooling>(mode);
}

inline float max_gradient_from(double max_gradient) {
  STD_TORCH_CHECK(max_gradient >= 0.0, "max_gradient is ", max_gradient, ", expected 0 or more");
  return static_cast<float>(max_gradient);
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
  if (weights.scalar_type() == ScalarType::Half) {
    return body(static_cast<Half*>(nullptr));
  }
  STD_TORCH_CHECK(weights.scalar_type() == ScalarType::BFloat16, "weights have dtype ",
                  weights.scalar_type(), ", expected Float, Half or BFloat16");
  body(static_cast<BFloat16*>(nullptr));
}

template <class Body>
void dispatch(const Tensor& indices, const Tensor& weights, const Body& body) {
  dispatch_index(indices, [&](auto* index) {
    dispatch_weight(weights, [&](auto* weight) { body(index, weight); });
  });
}

// The optimizer's part of an op: what it is, its states and its options, all checked.
struct OptimizerArguments {
  std::vector<StateInfo> infos;
  UpdateOptions options;

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

// The tensors of a batch, which are where `like` is (null: on the host).
struct BatchArguments {
  const Tensor& indices;
  const Tensor& offsets;
  const std::optional<Tensor>& per_sample_weights;
  const std::optional<Tensor>& feature_bags;
  const std::optional<Tensor>& gradient_offsets;
  Pooling pooling;
  const Tensor* like;
};

template <class Index>
void read_variable_batch(const Layout& layout, const BatchArguments& arguments,
                         Batch<Index>& batch) {
  STD_TORCH_CHECK(arguments.feature_bags.has_value(), "gradient_offsets without feature_bags");
  STD_TORCH_CHECK(batch.pooling != Pooling::kNone, "variable batch sizes need pooling");
  check_tensor("feature_bags", *arguments.feature_bags, ScalarType::Long, 1, arguments.like);
  check_size("feature_bags", *arguments.feature_bags,
             static_cast<int64_t>(layout.features.size()) + 1, "features and the end");
  batch.feature_bags = arguments.feature_bags->const_data_ptr<int64_t>();
  if (arguments.gradient_offsets.has_value()) {
    check_tensor("gradient_offsets", *arguments.gradient_offsets, ScalarType::Long, 1,
                 arguments.like);
    check_size("gradient_offsets", *arguments.gradient_offsets, batch.bags, "bags");
    batch.gradient_offsets = arguments.gradient_offsets->const_data_ptr<int64_t>();
  }
}

// Checks shapes and dtypes, not what the tensors hold.
template <class Index>
Batch<Index> read_batch(const Layout& layout, const BatchArguments& arguments) {
  constexpr ScalarType kIndexType = sizeof(Index) == 4 ? ScalarType::Int : ScalarType::Long;
  check_tensor("indices", arguments.indices, kIndexType, 1, arguments.like);
  check_tensor("offsets", arguments.offsets, kIndexType, 1, arguments.like);
  Batch<Index> batch{};
  batch.indices = arguments.indices.template const_data_ptr<Index>();
  batch.offsets = arguments.offsets.template const_data_ptr<Index>();
  batch.lookups = arguments.indices.numel();
  batch.bags = arguments.offsets.numel() - 1;
  batch.pooling = arguments.pooling;
  batch.features = static_cast<int64_t>(layout.features.size());
  batch.total_columns = layout.total_columns;
  STD_TORCH_CHECK(batch.lookups < int64_t{1} << 32, "a batch of ", batch.lookups,
                  " lookups; at most 2^32 - 1 fit");
  STD_TORCH_CHECK(batch.bags > 0 || (batch.bags == 0 && batch.lookups == 0), "offsets has ",
                  batch.bags + 1, " elements, which is no bag for ", batch.lookups, " lookups");
  if (arguments.feature_bags.has_value() || arguments.gradient_offsets.has_value()) {
    read_variable_batch(layout, arguments, batch);
  } else {
    STD_TORCH_CHECK(batch.bags % batch.features == 0, "offsets has ", batch.bags + 1,
                    " elements, expected features * batch_size + 1 with ", batch.features,
                    " features");
    batch.batch_size = batch.bags / batch.features;
  }
  if (arguments.per_sample_weights.has_value()) {
    check_tensor("per_sample_weights", *arguments.per_sample_weights, ScalarType::Float, 1,
                 arguments.like);
    STD_TORCH_CHECK(batch.pooling != Pooling::kNone, "per_sample_weights need pooling");
    check_size("per_sample_weights", *arguments.per_sample_weights, batch.lookups, "lookups");
    batch.per_sample_weights = arguments.per_sample_weights->template const_data_ptr<float>();
  }
  return batch;
}

// int32 [features], or null: all features require a gradient.
inline const int32_t* read_required(const std::optional<Tensor>& feature_requires_grad,
                                    const Layout& layout, const Tensor* like) {
  if (!feature_requires_grad.has_value()) {
    return nullptr;
  }
  check_tensor("feature_requires_grad", *feature_requires_grad, ScalarType::Int, 1, like);
  check_size("feature_requires_grad", *feature_requires_grad,
             static_cast<int64_t>(layout.features.size()), "features");
  return feature_requires_grad->const_data_ptr<int32_t>();
}

// The output of a lookup, and so its gradient, is [batch_size, sum of the features' dims], or
// [lookups, dim] without pooling, or flat with variable batch sizes. `name` is the op's argument.
template <class Index>
void check_output_shape(const char* name, const Tensor& output, const Layout& layout,
                        const Batch<Index>& batch) {
  if (batch.feature_bags != nullptr) {
    // Of no bags it is an empty tensor, which has no pointer.
    STD_TORCH_CHECK(batch.gradient_offsets != nullptr || batch.bags == 0,
                    "feature_bags without gradient_offsets");
    STD_TORCH_CHECK(output.dim() == 1, name, " has ", output.dim(),
                    " dimensions, expected 1 with variable batch sizes");
    return;
  }
  const bool pooled = batch.pooling != Pooling::kNone;
  const int64_t rows = pooled ? batch.batch_size : batch.lookups;
  const int64_t columns = pooled ? layout.total_columns : layout.max_dim;
  STD_TORCH_CHECK(output.dim() == 2 && output.size(0) == rows && output.size(1) == columns, name,
                  " has ", output.dim(), " dimensions and ", output.numel(),
                  " elements, expected [", rows, ", ", columns, "]");
  for (const Table& table : layout.tables) {
    STD_TORCH_CHECK(pooled || table.dim == layout.max_dim,
                    "without pooling all tables must have the same dim");
  }
}

}  // namespace torchrec_ext
