#pragma once

#include <cstdint>

#include "macros.h"
#include "optimizers/optimizer.h"
#include "power.h"
#include "row_update.h"

namespace torchrec_ext {

// What rows that slept through the updates t+1 .. T missed, for every t since `start`, kept up to date
// update by update (torchrec_ext/sleeping_rows.py). With lr_s, wd_s the hyperparameters of update s:
//
//   log2_keep[t]  log2 of the product of (1 - lr_u * wd_u) over u <= t
//   step[t]       C: the sum over s > t of lr_s * ratio^(s-t) * B_s * (product over u > s of
//                 (1 - lr_u * wd_u))
//   eps[t]        E: the same sum with each term times what eps grows by
//
// Terms fade; from `window` updates on, step[t] and eps[t] are no longer added to. They then hold the
// product up to update t + window, and log2_keep has the rest.
struct History {
  const double* log2_keep;
  const double* step;
  const double* eps;
  int64_t start;
  int64_t window;
  int64_t now;  // T
};

// The scalars that bring one row from t to T.
struct CatchUp {
  float keep;    // P, the factor of the weight
  float step;    // C
  float eps;     // eps * E / C
  double slept;  // T - t

  static TORCHREC_EXT_INLINE CatchUp after(const History& history, int64_t t, double eps) {
    const int64_t i = t - history.start;
    const int64_t last = history.now - history.start;
    const int64_t frozen = i + history.window < last ? i + history.window : last;
    const double since = power(2.0, history.log2_keep[last] - history.log2_keep[frozen]);
    const double step = history.step[i] * since;
    const double ratio = history.step[i] == 0.0 ? 0.0 : history.eps[i] / history.step[i];
    return {static_cast<float>(power(2.0, history.log2_keep[last] - history.log2_keep[i])),
            static_cast<float>(step), static_cast<float>(eps * ratio),
            static_cast<double>(last - i)};
  }
};

// Catches up one row. The optimizer has
//   CatchUpFactors catch_up_factors(slept)   what the states are multiplied by
//   catch_up_column(weight, states, catch_up, factors)   the new weight; updates the states
template <class Optimizer, class Rounding>
TORCHREC_EXT_INLINE void catch_up_row(const Optimizer& optimizer, const Rounding rounding,
                                      typename Rounding::WeightType* __restrict__ weight,
                                      float* const* states, const CatchUp& catch_up, int64_t dim) {
  const auto factors = optimizer.catch_up_factors(catch_up.slept);
  update_columns<Optimizer>(rounding, weight, states, dim,
                            [&](int64_t, float previous, float* values) TORCHREC_EXT_INLINE_LAMBDA {
                              return optimizer.catch_up_column(previous, values, catch_up, factors);
                            });
}

}  // namespace torchrec_ext
