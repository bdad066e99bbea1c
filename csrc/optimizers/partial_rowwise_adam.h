#pragma once

#include <cmath>

#include "../weight_decay.h"
#include "moments.h"
#include "optimizer.h"

namespace torchrec_ext {

// Adam with one second moment per row, as FBGEMM's PARTIAL_ROWWISE_ADAM: as Adam, but
//
//   exp_avg_sq' = beta2 * exp_avg_sq + (1 - beta2) * mean over the row's D columns of g^2
struct PartialRowWiseAdam {
  static constexpr std::array kHyperparameters = {
      "learning_rate", "beta1", "beta2", "eps", "weight_decay", "weight_decay_mode"};
  static constexpr std::array kStates = {StateInfo{"exp_avg", false},
                                         StateInfo{"exp_avg_sq", true}};
  static constexpr int kReductions = 1;
  static constexpr bool kBeginsRow = true;
  static constexpr bool kCatchesUp = false;
  struct Row {
    float multiplier;
  };

  float learning_rate;
  float eps;
  Moments moments;
  WeightDecay decay;
  BiasCorrection correction;

  TORCHREC_EXT_INLINE PartialRowWiseAdam(const double* h, int64_t completed_updates)
      : learning_rate(static_cast<float>(h[0])),
        eps(static_cast<float>(h[3])),
        moments(h[1], h[2]),
        decay(h[0], h[4], h[5]),
        correction(BiasCorrection::after(static_cast<double>(completed_updates + 1), h[1], h[2])) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    visit(PartialRowWiseAdam(h, completed_updates));
  }

  TORCHREC_EXT_INLINE float reduce_term(int /*reduction*/, float weight, float gradient,
                                        const float* /*states*/) const {
    const float g = decay.gradient(weight, gradient);
    return g * g;
  }

  TORCHREC_EXT_INLINE Row begin_row(const float* totals, int64_t dim, float* states) const {
    states[0] = moments.square(states[0], totals[0] / static_cast<float>(dim));
    const float denominator = std::sqrt(states[0]) * correction.root_correction + eps;
    const float multiplier = learning_rate * correction.mean_correction / denominator;
    return {denominator == 0.0f ? 0.0f : multiplier};
  }

  TORCHREC_EXT_INLINE float column(float weight, float gradient, float* states, Row row) const {
    states[0] = moments.mean(states[0], decay.gradient(weight, gradient));
    return decay.weight(weight) - row.multiplier * states[0];
  }
};

}  // namespace torchrec_ext
