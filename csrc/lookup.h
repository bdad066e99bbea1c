#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "macros.h"
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

// The number of leading elements of the ascending values[0 .. count) that are at most `value`.
template <class Value>
TORCHREC_EXT_INLINE int64_t count_up_to(const Value* values, int64_t count, int64_t value) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    const bool up_to = static_cast<int64_t>(values[low + half]) <= value;
    low = up_to ? low + half + 1 : low;
    count = up_to ? count - half - 1 : half;
  }
  return low;
}

// The lookups of one batch, in TorchRec's order: bags are numbered feature by feature, example by
// example, and hold the indices from offsets[bag] to offsets[bag + 1].
template <class Index>
struct Batch {
  const Index* indices;
  const Index* offsets;
  const float* per_sample_weights;  // [lookups] or null
  int64_t lookups;
  int64_t bags;
  int64_t batch_size;  // of every feature, where feature_bags is null
  Pooling pooling;
  // Variable batch sizes: where each feature's bags begin [features + 1], and where each bag's output
  // gradient does [bags]. Null where all features have batch_size bags.
  const int64_t* feature_bags;
  const int64_t* gradient_offsets;
  int64_t features;
  int64_t total_columns;  // of the output gradient: the features' dims added up

  TORCHREC_EXT_INLINE int64_t feature_of(int64_t bag) const {
    return feature_bags == nullptr ? bag / batch_size
                                   : count_up_to(feature_bags, features, bag) - 1;
  }

  TORCHREC_EXT_INLINE int64_t example_of(int64_t bag, int64_t feature) const {
    return bag - (feature_bags == nullptr ? feature * batch_size : feature_bags[feature]);
  }

  // Where a lookup's gradient begins. With pooling, its bag's; without, its own.
  TORCHREC_EXT_INLINE int64_t gradient_offset(int64_t lookup, int64_t bag, int64_t feature_number,
                                              const Feature& feature, int64_t dim) const {
    if (pooling == Pooling::kNone) {
      return lookup * dim;
    }
    if (gradient_offsets != nullptr) {
      return gradient_offsets[bag];
    }
    return example_of(bag, feature_number) * total_columns + feature.first_column;
  }

  TORCHREC_EXT_INLINE bool has_scales() const {
    return per_sample_weights != nullptr || pooling == Pooling::kMean;
  }

  // What a lookup of a bag of `length` multiplies its gradient by.
  TORCHREC_EXT_INLINE float scale(int64_t lookup, int64_t length) const {
    const float weight = per_sample_weights != nullptr ? per_sample_weights[lookup] : 1.0f;
    return weight / (pooling == Pooling::kMean ? static_cast<float>(length) : 1.0f);
  }
};

struct Layout {
  std::vector<Table> tables;
  std::vector<Feature> features;
  int64_t total_rows;
  int64_t total_columns;
  int64_t max_dim;

  const Table& table_of(int64_t row) const {
    const auto after =
        std::upper_bound(tables.begin(), tables.end(), row,
                         [](int64_t value, const Table& table) { return value < table.first_row; });
    return *(after - 1);
  }

  const Table& table_of_feature(int64_t feature) const {
    return tables[static_cast<size_t>(features[static_cast<size_t>(feature)].table)];
  }
};

}  // namespace torchrec_ext
