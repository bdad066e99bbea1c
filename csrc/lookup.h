#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "optimizers/optimizer.h"

namespace torchrec_ext {

// FBGEMM's PoolingMode.
enum class Pooling : int64_t { kSum = 0, kMean = 1, kNone = 2 };

// One embedding table inside the flat buffers of weights and states. Offsets are in elements.
struct Table {
  int64_t rows;
  int64_t dim;
  int64_t weights_offset;
  int64_t state_offsets[kMaxStates];
  int64_t first_row;  // number of rows of the tables before it: rows are numbered across tables
};

// A feature reads one table and owns `dim` columns of the output gradient, starting at
// `first_column`.
struct Feature {
  int64_t table;
  int64_t first_column;
};

// The lookups of one batch, in TorchRec's order: bag (feature f, example b) is bag number f *
// batch_size + b and holds the indices from offsets[bag] to offsets[bag + 1].
template <class Index>
struct Batch {
  const Index* indices;
  const Index* offsets;
  const float* per_sample_weights;  // [lookups] or null
  int64_t lookups;
  int64_t batch_size;
  Pooling pooling;
};

struct Layout {
  std::vector<Table> tables;
  std::vector<Feature> features;
  int64_t total_rows;
  int64_t total_columns;  // of the pooled output gradient: the features' dims added up
  int64_t max_dim;

  const Table& table_of(int64_t row) const {
    const auto after =
        std::upper_bound(tables.begin(), tables.end(), row,
                         [](int64_t value, const Table& table) { return value < table.first_row; });
    return *(after - 1);
  }
};

}  // namespace torchrec_ext
