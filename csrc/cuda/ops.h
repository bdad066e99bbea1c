#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace torchrec_ext::cuda {

using torch::stable::Tensor;

// The ops of schemas.h.
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
                       std::optional<Tensor> cache_weights, std::optional<Tensor> cache_locations);

Tensor per_sample_weight_grad_cuda(
    Tensor grad_output, Tensor weights, Tensor table_layout, Tensor feature_table_map,
    Tensor indices, Tensor offsets, std::optional<Tensor> feature_requires_grad,
    int64_t pooling_mode, double max_gradient, std::optional<Tensor> feature_bags,
    std::optional<Tensor> gradient_offsets, std::optional<Tensor> device_layout,
    std::optional<Tensor> managed_weights, std::optional<Tensor> cache_weights,
    std::optional<Tensor> cache_locations);

void lookup_cuda(Tensor output, Tensor weights, Tensor table_layout, Tensor feature_table_map,
                 Tensor indices, Tensor offsets, std::optional<Tensor> per_sample_weights,
                 int64_t pooling_mode, std::optional<Tensor> feature_bags,
                 std::optional<Tensor> gradient_offsets, std::optional<Tensor> device_layout);

}  // namespace torchrec_ext::cuda
