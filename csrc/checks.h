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

// `name` is the op's argument, for the message. The tensor must be where `like` is, or on the host where
// that is null.
inline void check_tensor(const char* name, const Tensor& tensor, ScalarType dtype, int64_t dim,
                         const Tensor* like = nullptr) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " has the wrong dtype ",
                  tensor.scalar_type(), ", expected ", dtype);
  STD_TORCH_CHECK(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, expected ", dim);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  STD_TORCH_CHECK(like != nullptr || tensor.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(like == nullptr || tensor.device() == like->device(), name,
                  " is on another device than the weights");
}

inline void check_size(const char* name, const Tensor& tensor, int64_t size, const char* what) {
  STD_TORCH_CHECK(tensor.numel() == size, name, " has ", tensor.numel(), " elements for ", size,
                  " ", what);
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

// A buffer of `first_size` elements, and one of `second_size` through which offsets go on.
inline void check_inside(const char* what, size_t table, int64_t offset, int64_t size,
                         int64_t first_size, int64_t second_size = 0) {
  STD_TORCH_CHECK(offset >= 0 && offset + size <= first_size + second_size, what, " of table ",
                  table, " ends at element ", offset + size, " of a buffer of ",
                  first_size + second_size);
  STD_TORCH_CHECK(offset >= first_size || offset + size <= first_size, what, " of table ", table,
                  " begins in the first buffer and ends in the second");
}

// Every table's weights, in a buffer of `first_size` elements and one of `second_size`.
inline void check_weights_inside(const Layout& layout, int64_t first_size,
                                 int64_t second_size = 0) {
  for (size_t t = 0; t < layout.tables.size(); ++t) {
    const Table& table = layout.tables[t];
    check_inside("weights", t, table.weights_offset, table.rows * table.dim, first_size,
                 second_size);
  }
}

// The same for state k.
inline void check_state_inside(const Layout& layout, const StateInfo& info, size_t k,
                               int64_t first_size, int64_t second_size = 0) {
  for (size_t t = 0; t < layout.tables.size(); ++t) {
    const Table& table = layout.tables[t];
    const int64_t size = info.rowwise ? table.rows : table.rows * table.dim;
    check_inside(info.name, t, table.state_offsets[k], size, first_size, second_size);
  }
}

inline void check_state_count(const char* what, size_t states,
                              const std::vector<StateInfo>& infos) {
  STD_TORCH_CHECK(states == infos.size(), states, " ", what, ", expected ", infos.size());
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

}  // namespace torchrec_ext
