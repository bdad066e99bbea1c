#pragma once

// The ops' schemas: one argument group a line. torchrec_ext/ops.py describes the arguments.

namespace torchrec_ext::schemas {

// clang-format off

// One optimizer step on every row that the batch looks up, from the gradient of the lookup's output.
// Updates weights and states in place; where an index or an offset is bad, raises before anything was
// changed. segments is the result of sort_lookups, or empty.
inline constexpr const char* kFusedUpdate =
    "fused_update(Tensor grad_output, Tensor(a!) weights, Tensor(b!)[] states, "
    "Tensor table_layout, Tensor feature_table_map, "
    "Tensor indices, Tensor offsets, Tensor? per_sample_weights, Tensor[] segments, "
    "int pooling_mode, int optimizer, float[] hyperparameters, float max_gradient, "
    "bool stochastic_rounding, int seed, int step, "
    "Tensor? feature_bags=None, Tensor? gradient_offsets=None, "
    "Tensor? device_layout=None, Tensor? step_scalars=None, "
    "Tensor(c!)? managed_weights=None, Tensor(d!)[]? managed_states=None, "
    "Tensor(e!)? cache_weights=None, Tensor? cache_locations=None) -> ()";

// The gradient of per_sample_weights, float32 [lookups].
inline constexpr const char* kPerSampleWeightGrad =
    "per_sample_weight_grad(Tensor grad_output, Tensor weights, "
    "Tensor table_layout, Tensor feature_table_map, "
    "Tensor indices, Tensor offsets, Tensor? feature_requires_grad, "
    "int pooling_mode, float max_gradient, "
    "Tensor? feature_bags=None, Tensor? gradient_offsets=None, "
    "Tensor? device_layout=None, Tensor? managed_weights=None, "
    "Tensor? cache_weights=None, Tensor? cache_locations=None) -> Tensor";

// Looks the batch's rows up, of any width, and pools them into output. On a device only: on the CPU
// FBGEMM's lookup takes any width.
inline constexpr const char* kLookup =
    "lookup(Tensor(a!) output, Tensor weights, "
    "Tensor table_layout, Tensor feature_table_map, "
    "Tensor indices, Tensor offsets, Tensor? per_sample_weights, int pooling_mode, "
    "Tensor? feature_bags=None, Tensor? gradient_offsets=None, "
    "Tensor? device_layout=None) -> ()";

// What kernels on a device read of both arguments: every Table, then every Feature (lookup.h).
inline constexpr const char* kDeviceLayout =
    "device_layout(Tensor table_layout, Tensor feature_table_map) -> Tensor";

// The lookups sorted by row: rows, begins, positions (cpu/segments.h).
inline constexpr const char* kSortLookups =
    "sort_lookups(Tensor table_layout, Tensor feature_table_map, Tensor indices, Tensor offsets, "
    "Tensor? feature_bags=None) -> Tensor[]";

// Applies to rows (None: all) the updates up to `now` that they slept through (catch_up.h).
inline constexpr const char* kCatchUp =
    "catch_up(Tensor(a!) weights, Tensor(b!)[] states, Tensor(c!) row_steps, "
    "Tensor table_layout, Tensor? rows, "
    "Tensor history, int history_start, int window, int now, "
    "int optimizer, float[] hyperparameters, bool stochastic_rounding, int seed) -> ()";

// clang-format on

inline constexpr const char* kAll[] = {kFusedUpdate,  kPerSampleWeightGrad, kLookup,
                                       kDeviceLayout, kSortLookups,         kCatchUp};

}  // namespace torchrec_ext::schemas
