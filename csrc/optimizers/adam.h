#pragma once

#include <cmath>

#include "../catch_up.h"
#include "../weight_decay.h"
#include "moments.h"
#include "optimizer.h"

namespace torchrec_ext {

// Adam (Kingma and Ba, ICLR 2015) with L2 or, as AdamW (Loshchilov and Hutter, ICLR 2019), decoupled
// weight decay from the previous weight. t counts updates: all of them, or the row's own where
// kPerRow.
//
//   g        = g + weight_decay * weight                      if L2
//   weight   = weight * (1 - learning_rate * weight_decay)    if DECOUPLE
//   exp_avg'    = beta1 * exp_avg + (1 - beta1) * g
//   exp_avg_sq' = beta2 * exp_avg_sq + (1 - beta2) * g^2
//   weight'  = weight - learning_rate * (exp_avg' / (1 - beta1^t))
//              / (sqrt(exp_avg_sq' / (1 - beta2^t)) + eps)
template <bool kPerRow>
struct Adam {
  static constexpr std::array kHyperparameters = {
      "learning_rate",     "beta1",          "beta2", "eps", "weight_decay",
      "weight_decay_mode", "bias_correction"};
  static constexpr auto kStates = [] {
    constexpr StateInfo kMean{"exp_avg", false}, kSquare{"exp_avg_sq", false};
    if constexpr (kPerRow) {
      return std::array{kMean, kSquare, StateInfo{"row_counter", true}};
    } else {
      return std::array{kMean, kSquare};
    }
  }();
  static constexpr int kReductions = 0;
  static constexpr bool kBeginsRow = kPerRow;
  static constexpr bool kCatchesUp = !kPerRow;
  using Row = BiasCorrection;

  double beta1;
  double beta2;
  double eps_double;
  float learning_rate;
  float eps;
  Moments moments;
  WeightDecay decay;
  BiasCorrection global;

  TORCHREC_EXT_INLINE Adam(const double* h, int64_t completed_updates)
      : beta1(h[1]),
        beta2(h[2]),
        eps_double(h[3]),
        learning_rate(static_cast<float>(h[0])),
        eps(static_cast<float>(h[3])),
        moments(h[1], h[2]),
        decay(h[0], h[4], h[5]),
        global(BiasCorrection::after(static_cast<double>(completed_updates + 1), h[1], h[2])) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    if (h[6] == 0.0) {
      visit(Adam<false>(h, completed_updates));
    } else {
      visit(Adam<true>(h, completed_updates));
    }
  }

  TORCHREC_EXT_INLINE Row common_row() const { return global; }

  TORCHREC_EXT_INLINE Row begin_row(const float* /*totals*/, int64_t /*dim*/, float* states) const {
    states[0] += 1.0f;
    return BiasCorrection::after(static_cast<double>(states[0]), beta1, beta2);
  }

  TORCHREC_EXT_INLINE float column(float weight, float gradient, float* states, Row row) const {
    const float g = decay.gradient(weight, gradient);
    states[0] = moments.mean(states[0], g);
    states[1] = moments.square(states[1], g * g);
    const float denominator = std::sqrt(states[1]) * row.root_correction + eps;
    const float step = learning_rate * row.mean_correction * states[0] / denominator;
    return decay.weight(weight) - (denominator == 0.0f ? 0.0f : step);
  }

  struct CatchUpFactors {
    float mean;
    float square;
  };

  TORCHREC_EXT_INLINE CatchUpFactors catch_up_factors(double slept) const {
    return {static_cast<float>(power(beta1, slept)), static_cast<float>(power(beta2, slept))};
  }

  // The updates that a sleeping row missed had g = 0, so their steps are multiples of
  // exp_avg / sqrt(exp_avg_sq), but for eps, which is accounted for to first order.
  TORCHREC_EXT_INLINE float catch_up_column(float weight, float* states, const CatchUp& catch_up,
                                            CatchUpFactors factors) const {
    const float denominator = std::sqrt(states[1]) + catch_up.eps;
    const float step = catch_up.step * states[0] / denominator;
    states[0] *= factors.mean;
    states[1] *= factors.square;
    return catch_up.keep * weight - (denominator == 0.0f ? 0.0f : step);
  }

  TORCHREC_EXT_INLINE double catch_up_eps() const { return eps_double; }
};

}  // namespace torchrec_ext
