#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

#include "lookup.h"
#include "optimizers/registry.h"

namespace torchrec_ext {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// `name` is the op's argument, for the message.
inline void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype, int64_t dim,
                         bool is_cpu = true) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " has the wrong dtype ",
                  tensor.scalar_type(), ", expected ", dtype);
  STD_TORCH_CHECK(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, expected ", dim);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(!is_cpu || tensor.is_cpu(), name, " must be on the CPU");
}

inline void check_hyperparameters(OptimType optimizer, const std::vector<double>& hyperparameters) {
  const bool found = visit_optimizer(optimizer, [&](auto tag) {
    const size_t expected = decltype(tag)::Type::kHyperparameters.size();
    STD_TORCH_CHECK(hyperparameters.size() == expected, hyperparameters.size(),
                    " hyperparameters, expected ", expected);
  });
  STD_TORCH_CHECK(found, "optimizer ", static_cast<int64_t>(optimizer), " is not registered");
}

// The states of the variant that the hyperparameters choose.
inline std::vector<StateInfo> states_of(OptimType optimizer,
                                        const std::vector<double>& hyperparameters) {
  std::vector<StateInfo> infos;
  select_optimizer(optimizer, hyperparameters.data(), 0, [&](const auto& selected) {
    infos.assign(selected.kStates.begin(), selected.kStates.end());
  });
  return infos;
}

inline void check_inside(const char* what, int64_t table, int64_t offset, int64_t size,
                         int64_t buffer_size) {
  STD_TORCH_CHECK(offset >= 0 && offset + size <= buffer_size, what, " of table ", table,
                  " ends at element ", offset + size, " of a buffer of ", buffer_size);
}

// Reads table_layout, int64 [tables, 3 + states]: rows, dim, offset in the weights and in each state.
inline Layout read_tables(const Tensor& table_layout, int64_t states) {
  check_tensor("table_layout", table_layout, ScalarType::Long, 2);
  const int64_t width = table_layout.size(1);
  STD_TORCH_CHECK(width == 3 + states && states <= kMaxStates, "table_layout has ", width,
                  " columns, expected ", 3 + states);
  Layout layout{};
  const int64_t* values = table_layout.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < table_layout.size(0); ++t, values += width) {
    Table table{values[0], values[1], values[2], {}, layout.total_rows};
    STD_TORCH_CHECK(table.rows >= 0 && table.dim > 0, "table ", t, " has ", table.rows,
                    " rows of dim ", table.dim);
    std::copy_n(values + 3, states, table.state_offsets);
    layout.total_rows += table.rows;
    layout.max_dim = std::max(layout.max_dim, table.dim);
    layout.tables.push_back(table);
  }
  return layout;
}

// The same with feature_table_map, int64 [features].
inline Layout read_layout(const Tensor& table_layout, const Tensor& feature_table_map,
                          int64_t states) {
  Layout layout = read_tables(table_layout, states);
  check_tensor("feature_table_map", feature_table_map, ScalarType::Long, 1);
  const int64_t* map = feature_table_map.const_data_ptr<int64_t>();
  for (int64_t f = 0; f < feature_table_map.size(0); ++f) {
    STD_TORCH_CHECK(map[f] >= 0 && map[f] < table_layout.size(0), "feature ", f, " reads table ",
                    map[f], " of ", table_layout.size(0));
    layout.features.push_back({map[f], layout.total_columns});
    layout.total_columns += layout.tables[static_cast<size_t>(map[f])].dim;
  }
  STD_TORCH_CHECK(!layout.features.empty(), "feature_table_map is empty");
  return layout;
}

// For ops that read no states: whatever number of them the layout has.
inline Layout read_layout_of_any(const Tensor& table_layout, const Tensor& feature_table_map) {
  STD_TORCH_CHECK(table_layout.dim() == 2 && table_layout.size(1) >= 3,
                  "table_layout must be [tables, 3 + states]");
  return read_layout(table_layout, feature_table_map, table_layout.size(1) - 3);
}

template <class Index>
Batch<Index> read_batch(const Layout& layout, const Tensor& indices, const Tensor& offsets,
                        Pooling pooling) {
  constexpr ScalarType kIndexType = sizeof(Index) == 4 ? ScalarType::Int : ScalarType::Long;
  check_tensor("indices", indices, kIndexType, 1);
  check_tensor("offsets", offsets, kIndexType, 1);
  const int64_t features = static_cast<int64_t>(layout.features.size());
  const int64_t bags = offsets.numel() - 1;
  STD_TORCH_CHECK(bags >= 0 && bags % features == 0, "offsets has ", offsets.numel(),
                  " elements, expected features * batch_size + 1 with ", features, " features");
  STD_TORCH_CHECK(indices.numel() < int64_t{1} << 32, "a batch of ", indices.numel(),
                  " lookups; at most 2^32 - 1 fit");
  Batch<Index> batch{indices.const_data_ptr<Index>(),
                     offsets.const_data_ptr<Index>(),
                     nullptr,
                     indices.numel(),
                     bags / features,
                     pooling};
  STD_TORCH_CHECK(batch.offsets[0] == 0 && batch.offsets[bags] == batch.lookups,
                  "offsets must start at 0 and end at ", batch.lookups, ", but are ",
                  batch.offsets[0], " and ", batch.offsets[bags]);
  return batch;
}

// The output gradient is [batch_size, sum of the features' dims], or [lookups, dim] without
// pooling.
inline void check_gradient(const Tensor& gradient, const Layout& layout, int64_t batch_size,
                           int64_t lookups, Pooling pooling) {
  check_tensor("grad_output", gradient, ScalarType::Float, 2);
  const bool pooled = pooling != Pooling::kNone;
  const int64_t rows = pooled ? batch_size : lookups;
  const int64_t columns = pooled ? layout.total_columns : layout.max_dim;
  STD_TORCH_CHECK(gradient.size(0) == rows && gradient.size(1) == columns,
                  "grad_output has shape [", gradient.size(0), ", ", gradient.size(1),
                  "], expected [", rows, ", ", columns, "]");
  for (const Table& table : layout.tables) {
    STD_TORCH_CHECK(pooled || table.dim == layout.max_dim,
                    "without pooling all tables must have the same dim");
  }
}

}  // namespace torchrec_ext
