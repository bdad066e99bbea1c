#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "../arguments.h"
#include "segments.h"

namespace torchrec_ext::cpu {

template <class Index>
void check_lookups(const Batch<Index>& batch, const Layout& layout, const BadLookup& bad) {
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
  check_output_shape("grad_output", gradient, layout, batch);
}

inline std::vector<float*> read_states(const Layout& layout, const std::vector<StateInfo>& infos,
                                       const std::vector<Tensor>& states) {
  check_state_count("states", states.size(), infos);
  std::vector<float*> pointers;
  for (size_t k = 0; k < infos.size(); ++k) {
    check_tensor(infos[k].name, states[k], ScalarType::Float, 1);
    check_state_inside(layout, infos[k], k, states[k].numel());
    pointers.push_back(states[k].mutable_data_ptr<float>());
  }
  return pointers;
}

inline void check_weights(const Layout& layout, const Tensor& weights) {
  check_tensor("weights", weights, weights.scalar_type(), 1);
  check_weights_inside(layout, weights.numel());
}

// Lookups that sort_lookups sorted, or nothing where the list is empty.
inline std::optional<Segments> read_segments(const std::vector<Tensor>& segments, int64_t lookups) {
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
  return Segments{count, segments[0].const_data_ptr<int64_t>(),
                  reinterpret_cast<const uint32_t*>(segments[1].const_data_ptr<int32_t>()),
                  reinterpret_cast<const uint32_t*>(segments[2].const_data_ptr<int32_t>())};
}

// The arguments that only a device has a use for.
inline void check_no_device_tensors(std::initializer_list<const std::optional<Tensor>*> tensors,
                                    const std::optional<std::vector<Tensor>>& managed_states = {}) {
  for (const std::optional<Tensor>* tensor : tensors) {
    STD_TORCH_CHECK(!tensor->has_value(), "weights on the CPU take no tensors of a device");
  }
  STD_TORCH_CHECK(!managed_states.has_value(), "weights on the CPU take no managed states");
}

}  // namespace torchrec_ext::cpu
