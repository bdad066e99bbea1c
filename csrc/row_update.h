#pragma once

#include <cstdint>
#include <type_traits>

#include "optimizers/optimizer.h"
#include "row_reduce.h"

namespace torchrec_ext {

// The row's part of an optimizer step: sums over columns, then the [rows] states.
template <class Optimizer, class Weight>
TORCHREC_EXT_INLINE typename Optimizer::Row begin_row(const Optimizer& optimizer,
                                                      const Weight* weight, float* const* states,
                                                      const float* gradient, int64_t dim) {
  constexpr int kColumnStates = count_states<Optimizer>(false);
  constexpr int kRowStates = count_states<Optimizer>(true);
  static_assert(Optimizer::kReductions <= kMaxReductions);
  float totals[kMaxReductions] = {};
  if constexpr (Optimizer::kReductions > 0) {
    for (int k = 0; k < Optimizer::kReductions; ++k) {
      totals[k] = reduce_row(dim, [&](int64_t column) TORCHREC_EXT_INLINE_LAMBDA {
        float values[kMaxStates] = {};
        for (int j = 0; j < kColumnStates; ++j) {
          values[j] = states[j][column];
        }
        return reduce_term(optimizer, k, static_cast<float>(weight[column]), gradient[column],
                           values, totals, dim);
      });
    }
  }
  float row_states[kMaxStates] = {};
  for (int k = 0; k < kRowStates; ++k) {
    row_states[k] = *states[kColumnStates + k];
  }
  const auto row = optimizer.begin_row(totals, dim, row_states);
  for (int k = 0; k < kRowStates; ++k) {
    *states[kColumnStates + k] = row_states[k];
  }
  return row;
}

// The only loop over columns that updates anything. weight is [dim], states has a pointer to [dim]
// floats for each [rows, D] state; update(column, weight, values) changes the values of the states and
// returns the new weight.
template <class Optimizer, class Rounding, class Update>
TORCHREC_EXT_INLINE void update_columns(const Rounding rounding,
                                        typename Rounding::WeightType* __restrict__ weight,
                                        float* const* states, int64_t dim, const Update& update) {
  constexpr int kColumnStates = count_states<Optimizer>(false);
  float* column_states[kMaxStates] = {};
  for (int k = 0; k < kColumnStates; ++k) {
    column_states[k] = states[k];
  }
  // Weight, states and whatever update reads are distinct arrays, which the compiler cannot see
  // through the pointer table.
#pragma GCC ivdep
  for (int64_t column = 0; column < dim; ++column) {
    float values[kMaxStates] = {};
    for (int k = 0; k < kColumnStates; ++k) {
      values[k] = column_states[k][column];
    }
    const float updated = update(column, static_cast<float>(weight[column]), values);
    for (int k = 0; k < kColumnStates; ++k) {
      column_states[k][column] = values[k];
    }
    weight[column] = rounding(updated, column);
  }
}

// Applies one optimizer step to one row.
//   weight    [dim] of Rounding::WeightType
//   states    one pointer per state: [dim] floats, or 1 float where rowwise
//   gradient  [dim], the row's summed gradient
template <class Optimizer, class Rounding>
TORCHREC_EXT_INLINE void update_row(const Optimizer& optimizer, const Rounding rounding,
                                    typename Rounding::WeightType* __restrict__ weight,
                                    float* const* states, const float* __restrict__ gradient,
                                    int64_t dim) {
  static_assert(Optimizer::kStates.size() <= kMaxStates && column_states_come_first<Optimizer>());
  typename Optimizer::Row row{};
  if constexpr (Optimizer::kBeginsRow) {
    row = begin_row(optimizer, weight, states, gradient, dim);
  } else if constexpr (!std::is_same_v<typename Optimizer::Row, NoRow>) {
    row = optimizer.common_row();
  }
  update_columns<Optimizer>(rounding, weight, states, dim,
                            [&](int64_t column, float previous, float* values)
                                TORCHREC_EXT_INLINE_LAMBDA {
                                  return optimizer.column(previous, gradient[column], values, row);
                                });
}

}  // namespace torchrec_ext
