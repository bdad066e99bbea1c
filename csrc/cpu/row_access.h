#pragma once

#include <cstdint>
#include <vector>

#include "../lookup.h"
#include "../macros.h"

namespace torchrec_ext::cpu {

// How far ahead of the row at work the memory of another is asked for. It is fetched into the
// second-level cache: the first level has too few miss buffers to keep the memory busy.
inline constexpr int64_t kRowsAhead = 16;
inline constexpr int kSecondLevel = 2;

// The weights and states of rows that are numbered across tables and visited in ascending order.
template <class Optimizer, class Weight>
struct RowAccess {
  static constexpr int kStates = static_cast<int>(Optimizer::kStates.size());
  static constexpr int64_t kCacheLine = 64;

  const Layout* layout;
  Weight* weights;
  const std::vector<float*>* states;

  // Moves `table` on to the one that has the row; returns the row's number there.
  static TORCHREC_EXT_INLINE int64_t advance(int64_t row, const Table*& table) {
    while (row >= table->first_row + table->rows) {
      ++table;
    }
    return row - table->first_row;
  }

  TORCHREC_EXT_INLINE Weight* weight(const Table& table, int64_t row) const {
    return weights + table.weights_offset + row * table.dim;
  }

  TORCHREC_EXT_INLINE float* state(int k, const Table& table, int64_t row) const {
    return (*states)[static_cast<size_t>(k)] + table.state_offsets[k] + row * width(k, table);
  }

  TORCHREC_EXT_INLINE void prefetch(const Table& table, int64_t row) const {
    prefetch_lines(weight(table, row), table.dim);
    for (int k = 0; k < kStates; ++k) {
      prefetch_lines(state(k, table, row), width(k, table));
    }
  }

 private:
  static TORCHREC_EXT_INLINE int64_t width(int k, const Table& table) {
    return Optimizer::kStates[static_cast<size_t>(k)].rowwise ? 1 : table.dim;
  }

  template <class Value>
  static TORCHREC_EXT_INLINE void prefetch_lines(const Value* values, int64_t count) {
    const char* line = reinterpret_cast<const char*>(values);
    for (int64_t byte = 0; byte < count * static_cast<int64_t>(sizeof(Value)); byte += kCacheLine) {
      __builtin_prefetch(line + byte, 0, kSecondLevel);
    }
  }
};

}  // namespace torchrec_ext::cpu
