#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../rounding.h"
#include "../row_update.h"
#include "gradient_sum.h"
#include "row_access.h"

namespace torchrec_ext::cpu {

// Everything that the update of a batch's rows reads, but for the optimizer and the rounding.
template <class Weight>
struct UpdateTask {
  const Layout* layout;
  Segments segments;
  GradientSource source;
  Weight* weights;
  std::vector<float*> states;
  // Sums over kNode lookups each of the rows that have more, computed beforehand: [node, max_dim]
  // from long_rows[segment], which is -1 for other rows.
  const float* node_sums;
  const int64_t* long_rows;
};

template <class Optimizer, class Rounding>
class RowRunner {
 public:
  using Weight = typename Rounding::WeightType;

  RowRunner(const Optimizer& optimizer, const Rounding& rounding, const UpdateTask<Weight>& task)
      : optimizer_(optimizer),
        rounding_(rounding),
        task_(task),
        access_{task.layout, task.weights, &task.states} {}

  TORCHREC_EXT_INLINE void run(int64_t first, int64_t last) {
    std::vector<float> buffer(static_cast<size_t>(2 * task_.layout->max_dim));
    const Table* table = &task_.layout->table_of(task_.segments.rows[first]);
    const Table* ahead_table = table;
    for (int64_t s = first; s < std::min(first + kRowsAhead, last); ++s) {
      prefetch(s, ahead_table);
    }
    for (int64_t s = first; s < last; ++s) {
      if (s + kRowsAhead < last) {
        prefetch(s + kRowsAhead, ahead_table);
      }
      update(s, table, buffer.data());
    }
  }

 private:
  using Access = RowAccess<Optimizer, Weight>;

  TORCHREC_EXT_INLINE void prefetch(int64_t segment, const Table*& table) const {
    const int64_t row = Access::advance(task_.segments.rows[segment], table);
    access_.prefetch(*table, row);
    const float* gradient = task_.source.row(task_.segments.begins[segment]);
    for (int64_t column = 0; column < table->dim; column += Access::kCacheLine / 4) {
      __builtin_prefetch(gradient + column);
    }
  }

  TORCHREC_EXT_INLINE void update(int64_t segment, const Table*& table, float* sum) {
    const int64_t row = Access::advance(task_.segments.rows[segment], table);
    const int64_t dim = table->dim;
    sum_gradient(segment, dim, sum, sum + task_.layout->max_dim);
    float* states[kMaxStates] = {};
    for (int k = 0; k < Access::kStates; ++k) {
      states[k] = access_.state(k, *table, row);
    }
    rounding_.begin_row(static_cast<uint64_t>(table->first_row + row));
    update_row(optimizer_, rounding_, access_.weight(*table, row), states, sum, dim);
  }

  TORCHREC_EXT_INLINE void sum_gradient(int64_t segment, int64_t dim, float* sum,
                                        float* scratch) const {
    const int64_t begin = task_.segments.begins[segment];
    const int64_t end = task_.segments.begins[segment + 1];
    const int64_t long_row = task_.long_rows == nullptr ? -1 : task_.long_rows[segment];
    if (long_row < 0) {
      task_.source.sum_node(begin, end, dim, sum, scratch);
      return;
    }
    const int64_t nodes = (end - begin + kNode - 1) / kNode;
    for (int64_t first = 0; first < nodes; first += kFanOut) {
      float* group = first == 0 ? sum : scratch;
      std::copy_n(node_sum(long_row + first), dim, group);
      for (int64_t node = first + 1; node < std::min(first + kFanOut, nodes); ++node) {
        GradientSource::add(node_sum(long_row + node), dim, group);
      }
      if (first != 0) {
        GradientSource::add(group, dim, sum);
      }
    }
  }

  TORCHREC_EXT_INLINE const float* node_sum(int64_t node) const {
    return task_.node_sums + node * task_.layout->max_dim;
  }

  const Optimizer& optimizer_;
  Rounding rounding_;
  const UpdateTask<Weight>& task_;
  Access access_;
};

}  // namespace torchrec_ext::cpu
