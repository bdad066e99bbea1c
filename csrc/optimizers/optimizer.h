#pragma once

#include <array>
#include <cstdint>

#include "../macros.h"

namespace torchrec_ext {

// One state of an optimizer: float32 of shape [rows, D], or [rows] where `rowwise`.
struct StateInfo {
  const char* name;
  bool rowwise;
};

// What an optimizer's header defines. `row_update.h` holds the loop that calls it.
//
//   Optimizer(h, completed_updates)
//                      from the values of the hyperparameters; a device constructs it, too
//   kHyperparameters   names, in the order in which their values h arrive
//   kStates            in checkpoint order; [rows, D] states come before [rows] states
//   select(h, completed_updates, visit)
//                      calls visit(optimizer) with the variant that h chooses, on the host; a variant
//                      may have more [rows] states at the end
//   Row                what the columns of one row share; `NoRow` where there is nothing
//   kReductions        the number of sums over the row's columns that begin_row needs
//   reduce_term(k, weight, g, states)
//                      one column's term of sum k, before anything is updated (if kReductions > 0)
//   kReducesInTurn     where it is there and true, the sums are made one after another, and the term
//                      may depend on those before: reduce_term(k, weight, g, states, totals, dim)
//   kBeginsRow         whether begin_row makes the Row; otherwise common_row() does, if Row is not NoRow
//   begin_row(totals, dim, states)
//                      updates the [rows] states and returns the Row
//   column(weight, g, states, row)
//                      updates one column's [rows, D] states and returns its new weight
//   kCatchesUp         whether the updates that a row slept through have a closed form, which
//                      `catch_up.h` then calls
struct NoRow {};

template <class Optimizer>
constexpr int count_states(bool rowwise) {
  int count = 0;
  for (const StateInfo& state : Optimizer::kStates) {
    count += state.rowwise == rowwise ? 1 : 0;
  }
  return count;
}

template <class Optimizer>
constexpr bool column_states_come_first() {
  for (int k = 0; k < count_states<Optimizer>(false); ++k) {
    if (Optimizer::kStates[k].rowwise) {
      return false;
    }
  }
  return true;
}

template <class Optimizer>
constexpr bool reduces_in_turn() {
  if constexpr (requires { Optimizer::kReducesInTurn; }) {
    return Optimizer::kReducesInTurn;
  } else {
    return false;
  }
}

// One column's term of sum k. `totals` has the sums before it, where they are made in turn.
template <class Optimizer>
TORCHREC_EXT_INLINE float reduce_term(const Optimizer& optimizer, int k, float weight, float g,
                                      const float* states, const float* totals, int64_t dim) {
  if constexpr (reduces_in_turn<Optimizer>()) {
    return optimizer.reduce_term(k, weight, g, states, totals, dim);
  } else {
    return optimizer.reduce_term(k, weight, g, states);
  }
}

inline constexpr int kMaxStates = 4;
inline constexpr int kMaxReductions = 2;

}  // namespace torchrec_ext
