#pragma once

#include <cmath>

#include "optimizer.h"

namespace torchrec_ext {

// Adagrad (Duchi, Hazan and Singer, JMLR 2011), as FBGEMM's EXACT_ADAGRAD:
//
//   sum'    = sum + g^2
//   weight' = weight - learning_rate * g / (sqrt(sum') + eps)
struct ExactAdagrad {
  static constexpr std::array kHyperparameters = {"learning_rate", "eps"};
  static constexpr std::array kStates = {StateInfo{"sum", false}};
  static constexpr int kReductions = 0;
  static constexpr bool kBeginsRow = false;
  static constexpr bool kCatchesUp = false;
  using Row = NoRow;

  float learning_rate;
  float eps;

  TORCHREC_EXT_INLINE ExactAdagrad(const double* h, int64_t /*completed_updates*/)
      : learning_rate(static_cast<float>(h[0])), eps(static_cast<float>(h[1])) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    visit(ExactAdagrad(h, completed_updates));
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* states, NoRow) const {
    float& sum = states[0];
    sum = sum + g * g;
    const float denominator = std::sqrt(sum) + eps;
    // With eps = 0 a column that never saw a gradient would divide 0 by 0.
    const float step = learning_rate * g / denominator;
    return denominator == 0.0f ? weight : weight - step;
  }
};

}  // namespace torchrec_ext
