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
//   kHyperparameters   names, in the order in which their values arrive
//   kStates            in checkpoint order; [rows, D] states come before [rows] states
//   select(h, visit)   calls visit(optimizer) with the variant that the hyperparameters h choose,
//   on the host Row                what the columns of one row share; `NoRow` where there is
//   nothing kReducesRow        whether begin_row needs a sum over the row's columns reduce_term one
//   column's term of that sum (only if kReducesRow) begin_row          updates the [rows] states,
//   returns Row (only if kReducesRow) column             takes one column's weight, gradient and
//   [rows, D] states, updates the states, returns the weight
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

inline constexpr int kMaxStates = 4;

}  // namespace torchrec_ext
