#pragma once

#include <cmath>

#include "optimizer.h"

namespace torchrec_ext {

// Adagrad with one accumulator per row, as FBGEMM's EXACT_ROWWISE_ADAGRAD:
//
//   sum'    = sum + mean over the row's D columns of g^2
//   weight' = weight - learning_rate / (sqrt(sum') + eps) * g
struct ExactRowWiseAdagrad {
  static constexpr std::array kHyperparameters = {"learning_rate", "eps"};
  static constexpr std::array kStates = {StateInfo{"sum", true}};
  static constexpr bool kReducesRow = true;
  struct Row {
    float multiplier;
  };

  float learning_rate;
  float eps;

  explicit ExactRowWiseAdagrad(const double* h)
      : learning_rate(static_cast<float>(h[0])), eps(static_cast<float>(h[1])) {}

  template <class Visitor>
  static void select(const double* h, Visitor&& visit) {
    visit(ExactRowWiseAdagrad(h));
  }

  TORCHREC_EXT_INLINE float reduce_term(float /*weight*/, float g) const { return g * g; }

  TORCHREC_EXT_INLINE Row begin_row(float squares, int64_t dim, float* states) const {
    float& sum = states[0];
    sum = sum + squares / static_cast<float>(dim);
    const float denominator = std::sqrt(sum) + eps;
    // With eps = 0 a row that never saw a gradient would divide by 0.
    return {denominator == 0.0f ? 0.0f : learning_rate / denominator};
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* /*states*/, Row row) const {
    return weight - row.multiplier * g;
  }
};

}  // namespace torchrec_ext
