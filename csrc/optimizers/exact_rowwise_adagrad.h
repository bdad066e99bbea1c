#pragma once

#include <cmath>

#include "../weight_decay.h"
#include "optimizer.h"

namespace torchrec_ext {

// Adagrad with one accumulator per row, as FBGEMM's EXACT_ROWWISE_ADAGRAD:
//
//   g       = g + weight_decay * weight                    if L2
//   weight  = weight * (1 - learning_rate * weight_decay)  if DECOUPLE
//   sum'    = sum + mean over the row's D columns of g^2
//   weight' = weight - learning_rate / (sqrt(sum') + eps) * g
struct ExactRowWiseAdagrad {
  static constexpr std::array kHyperparameters = {"learning_rate", "eps", "weight_decay",
                                                  "weight_decay_mode"};
  static constexpr std::array kStates = {StateInfo{"sum", true}};
  static constexpr int kReductions = 1;
  static constexpr bool kBeginsRow = true;
  static constexpr bool kCatchesUp = false;
  struct Row {
    float multiplier;
  };

  float learning_rate;
  float eps;
  WeightDecay decay;

  TORCHREC_EXT_INLINE ExactRowWiseAdagrad(const double* h, int64_t /*completed_updates*/)
      : learning_rate(static_cast<float>(h[0])),
        eps(static_cast<float>(h[1])),
        decay(h[0], h[2], h[3]) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    visit(ExactRowWiseAdagrad(h, completed_updates));
  }

  TORCHREC_EXT_INLINE float reduce_term(int /*reduction*/, float weight, float gradient,
                                        const float* /*states*/) const {
    const float g = decay.gradient(weight, gradient);
    return g * g;
  }

  TORCHREC_EXT_INLINE Row begin_row(const float* totals, int64_t dim, float* states) const {
    float& sum = states[0];
    sum = sum + totals[0] / static_cast<float>(dim);
    const float denominator = std::sqrt(sum) + eps;
    // With eps = 0 a row that never saw a gradient would divide by 0.
    return {denominator == 0.0f ? 0.0f : learning_rate / denominator};
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* /*states*/, Row row) const {
    return decay.weight(weight) - row.multiplier * decay.gradient(weight, g);
  }
};

}  // namespace torchrec_ext
