#pragma once

#include <cmath>

#include "../power.h"
#include "optimizer.h"

namespace torchrec_ext {

// FTRL-Proximal (McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013,
// Algorithm 1). `linear` is the paper's z, `accum` its n, and p = -learning_rate_power generalises
// its square root:
//
//   accum'  = accum + g^2
//   linear' = linear + g - (accum'^p - accum^p) / learning_rate * weight
//   weight' = weight                                 if the denominator below is 0
//           = 0                                      else if |linear'| <= l1_reg
//           = (sign(linear') * l1_reg - linear') / ((ftrl_beta + accum'^p) / learning_rate +
//           l2_reg)    otherwise
template <bool kSquareRoot>
struct Ftrl {
  static constexpr std::array kHyperparameters = {"learning_rate", "ftrl_beta", "l1_reg", "l2_reg",
                                                  "learning_rate_power"};
  static constexpr std::array kStates = {StateInfo{"linear", false}, StateInfo{"accum", false}};
  static constexpr int kReductions = 0;
  static constexpr bool kBeginsRow = false;
  static constexpr bool kCatchesUp = false;
  using Row = NoRow;

  float inverse_learning_rate;
  float ftrl_beta;
  float l1_reg;
  float l2_reg;
  double exponent;

  TORCHREC_EXT_INLINE Ftrl(const double* h, int64_t /*completed_updates*/)
      : inverse_learning_rate(static_cast<float>(1.0 / h[0])),
        ftrl_beta(static_cast<float>(h[1])),
        l1_reg(static_cast<float>(h[2])),
        l2_reg(static_cast<float>(h[3])),
        exponent(-h[4]) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    if (h[4] == -0.5) {
      visit(Ftrl<true>(h, completed_updates));
    } else {
      visit(Ftrl<false>(h, completed_updates));
    }
  }

  TORCHREC_EXT_INLINE float raise(float accum) const {
    if constexpr (kSquareRoot) {
      return std::sqrt(accum);
    } else {
      return static_cast<float>(power(static_cast<double>(accum), exponent));
    }
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* states, NoRow) const {
    float& linear = states[0];
    float& accum = states[1];
    const float previous = raise(accum);
    accum = accum + g * g;
    const float current = raise(accum);
    linear = linear + g - (current - previous) * inverse_learning_rate * weight;
    const float denominator = (ftrl_beta + current) * inverse_learning_rate + l2_reg;
    // Negated, not turned round: the boundary itself must be an exact +0, which only <= gives.
    const float shrunk = -(linear - std::copysign(l1_reg, linear)) / denominator;
    const float solution = std::fabs(linear) <= l1_reg ? 0.0f : shrunk;
    return denominator == 0.0f ? weight : solution;
  }
};

}  // namespace torchrec_ext
