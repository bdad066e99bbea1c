#pragma once

#include <cmath>

#include "moments.h"
#include "optimizer.h"

namespace torchrec_ext {

// LAMB (You et al., ICLR 2020), one trust ratio per row, as FBGEMM's LAMB:
//
//   exp_avg', exp_avg_sq' as Adam's
//   u       = (exp_avg' / (1 - beta1^t)) / (sqrt(exp_avg_sq' / (1 - beta2^t)) + eps)
//             + weight_decay * weight
//   weight' = weight - learning_rate * (||weight|| / ||u||) * u
//
// The ratio is 1 where a norm is 0; FBGEMM divides by it.
struct Lamb {
  static constexpr std::array kHyperparameters = {"learning_rate", "beta1", "beta2", "eps",
                                                  "weight_decay"};
  static constexpr std::array kStates = {StateInfo{"exp_avg", false},
                                         StateInfo{"exp_avg_sq", false}};
  static constexpr int kReductions = 2;
  static constexpr bool kBeginsRow = true;
  static constexpr bool kCatchesUp = false;
  struct Row {
    float multiplier;
  };

  float learning_rate;
  float eps;
  float weight_decay;
  Moments moments;
  BiasCorrection correction;

  TORCHREC_EXT_INLINE Lamb(const double* h, int64_t completed_updates)
      : learning_rate(static_cast<float>(h[0])),
        eps(static_cast<float>(h[3])),
        weight_decay(static_cast<float>(h[4])),
        moments(h[1], h[2]),
        correction(BiasCorrection::after(static_cast<double>(completed_updates + 1), h[1], h[2])) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    visit(Lamb(h, completed_updates));
  }

  // The moments are updated by `column`; until then they are what they were before the step.
  TORCHREC_EXT_INLINE float direction(float weight, float g, float m, float v) const {
    const float denominator =
        std::sqrt(moments.square(v, g * g)) * correction.root_correction + eps;
    const float ratio = correction.mean_correction * moments.mean(m, g) / denominator;
    return (denominator == 0.0f ? 0.0f : ratio) + weight_decay * weight;
  }

  TORCHREC_EXT_INLINE float reduce_term(int reduction, float weight, float g,
                                        const float* states) const {
    const float term = reduction == 0 ? weight : direction(weight, g, states[0], states[1]);
    return term * term;
  }

  TORCHREC_EXT_INLINE Row begin_row(const float* totals, int64_t /*dim*/, float* /*states*/) const {
    const float weight_norm = std::sqrt(totals[0]);
    const float direction_norm = std::sqrt(totals[1]);
    const bool has_ratio = weight_norm != 0.0f && direction_norm != 0.0f;
    return {has_ratio ? learning_rate * (weight_norm / direction_norm) : learning_rate};
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* states, Row row) const {
    const float u = direction(weight, g, states[0], states[1]);
    states[0] = moments.mean(states[0], g);
    states[1] = moments.square(states[1], g * g);
    return weight - row.multiplier * u;
  }
};

}  // namespace torchrec_ext
