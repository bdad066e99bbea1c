#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

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
//
// kExtended adds what an ordinary update does without:
//
//   l2_shrinkage_reg         linear' has g + 2 * l2_shrinkage_reg * weight in place of g (TensorFlow's
//                            FtrlV2); accum' keeps g^2.
//   multiply_linear_by_lr    `linear` holds learning_rate times the above (TensorFlow's name), so that
//                            nothing is divided by the learning rate:
//       linear' = linear + learning_rate * g - (accum'^p - accum^p) * weight
//       weight' = (sign(linear') * l1_reg * learning_rate - linear')
//                 / (ftrl_beta + accum'^p + l2_reg * learning_rate), and so on.
//   preserve_initial_weight  A row's first update starts from the `linear` for which the last line
//                            gives the weight that is there:
//       linear = -weight * denominator(accum) - sign(weight) * l1_reg
//
// kGroupLasso adds l21_reg, a threshold for the norm of a row of D columns. With u the numerators of
// the last line, 0 where |linear'| <= l1_reg, and r = l21_reg * sqrt(D):
//
//   weight' = 0                                              if ||u|| <= r
//           = u * (1 - r / ||u||) / denominator, per column  otherwise
//
// Preserving then starts from v = weight * denominator(accum), which the threshold must leave over:
//
//   linear = -v * (1 + r / ||v||) - sign(weight) * l1_reg
//
// With multiply_linear_by_lr, r has the factor learning_rate as well.
//
// A row that was never updated has the mark -0 in `linear`, where preserving is on. Initialising and
// resetting write it, and the first update replaces it by what weight, accum and hyperparameters are
// then: no pass over the table, whoever writes the weights and whenever. The mark is 0 to whoever
// reads or compares it, goes through checkpoints, and cannot come from an update, because x + 0 is
// never -0. NaN or infinity would mark as well, but look like damage.
template <bool kSquareRoot, bool kExtended, bool kGroupLasso>
struct Ftrl {
  static_assert(kExtended || !kGroupLasso);
  static constexpr std::array kHyperparameters = {"learning_rate",
                                                  "ftrl_beta",
                                                  "l1_reg",
                                                  "l2_reg",
                                                  "learning_rate_power",
                                                  "preserve_initial_weight",
                                                  "l2_shrinkage_reg",
                                                  "multiply_linear_by_lr",
                                                  "l21_reg"};
  static constexpr std::array kStates = {StateInfo{"linear", false}, StateInfo{"accum", false}};
  static constexpr int kReductions = kGroupLasso ? 2 : 0;
  static constexpr bool kReducesInTurn = kGroupLasso;
  static constexpr bool kBeginsRow = kGroupLasso;
  static constexpr bool kCatchesUp = false;

  // Of a row under group lasso: 1 + r / ||v||, and 1 - r / ||u|| or 0.
  struct GroupRow {
    float seed_factor;
    float kept_share;
  };
  using Row = std::conditional_t<kGroupLasso, GroupRow, NoRow>;

  // With multiply_linear_by_lr these have the factor learning_rate; `rate` is then 1.
  float rate;  // 1 / learning_rate
  float ftrl_beta;
  float l1_reg;
  float l2_reg;
  float l21_reg;
  float gradient_factor;  // 1
  float twice_shrinkage;
  uint32_t preserves;  // 0 or 1, as wide as what kernels load
  double exponent;

  TORCHREC_EXT_INLINE Ftrl(const double* h, int64_t /*completed_updates*/)
      : Ftrl(h, h[7] == 0.0 ? 1.0 : h[0]) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    if (h[4] == -0.5) {
      select_form<true>(h, completed_updates, visit);
    } else {
      select_form<false>(h, completed_updates, visit);
    }
  }

  TORCHREC_EXT_INLINE float reduce_term(int reduction, float weight, float g, const float* states,
                                        const float* totals, int64_t dim) const {
    const float previous = raise(states[1]);
    if (reduction == 0) {
      const float v = weight * denominator(previous);
      return v * v;
    }
    const float current = raise(states[1] + g * g);
    const float seed_factor = begin_row(totals, dim, nullptr).seed_factor;
    const float linear = next_linear(states[0], weight, g, previous, current, seed_factor);
    const float u = is_zero(linear) ? 0.0f : numerator(linear);
    return u * u;
  }

  TORCHREC_EXT_INLINE GroupRow begin_row(const float* totals, int64_t dim,
                                         float* /*states*/) const {
    const float r = l21_reg * std::sqrt(static_cast<float>(dim));
    const float seed_factor = totals[0] < kLeastNormal ? 1.0f : 1.0f + r / std::sqrt(totals[0]);
    const float norm = std::sqrt(totals[1]);
    return {seed_factor, norm <= r ? 0.0f : 1.0f - r / norm};
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* states, Row row) const {
    float& linear = states[0];
    float& accum = states[1];
    const float previous = raise(accum);
    accum = accum + g * g;
    const float current = raise(accum);
    float seed_factor = 1.0f;
    if constexpr (kGroupLasso) {
      seed_factor = row.seed_factor;
    }
    linear = next_linear(linear, weight, g, previous, current, seed_factor);
    const float divisor = denominator(current);
    float solution;
    if constexpr (kGroupLasso) {
      const float shrunk = row.kept_share * numerator(linear) / divisor;
      solution = is_zero(linear) || row.kept_share == 0.0f ? 0.0f : shrunk;
    } else {
      const float shrunk = numerator(linear) / divisor;
      solution = is_zero(linear) ? 0.0f : shrunk;
    }
    return divisor == 0.0f ? weight : solution;
  }

 private:
  // Squares below it have lost digits: a root of their sum would be wrong by as much as itself.
  static constexpr float kLeastNormal = 0x1p-126f;

  TORCHREC_EXT_INLINE Ftrl(const double* h, double factor)
      : rate(static_cast<float>(factor / h[0])),
        ftrl_beta(static_cast<float>(h[1])),
        l1_reg(static_cast<float>(h[2] * factor)),
        l2_reg(static_cast<float>(h[3] * factor)),
        l21_reg(static_cast<float>(h[8] * factor)),
        gradient_factor(static_cast<float>(factor)),
        twice_shrinkage(static_cast<float>(2.0 * h[6])),
        preserves(h[5] == 0.0 ? 0u : 1u),
        exponent(-h[4]) {}

  template <bool kRoot, class Visitor>
  static void select_form(const double* h, int64_t completed_updates, Visitor&& visit) {
    if (h[8] != 0.0) {
      visit(Ftrl<kRoot, true, true>(h, completed_updates));
    } else if (h[5] != 0.0 || h[6] != 0.0 || h[7] != 0.0) {
      visit(Ftrl<kRoot, true, false>(h, completed_updates));
    } else {
      visit(Ftrl<kRoot, false, false>(h, completed_updates));
    }
  }

  TORCHREC_EXT_INLINE float raise(float accum) const {
    if constexpr (kSquareRoot) {
      return std::sqrt(accum);
    } else {
      return static_cast<float>(power(static_cast<double>(accum), exponent));
    }
  }

  TORCHREC_EXT_INLINE float denominator(float raised) const {
    return (ftrl_beta + raised) * rate + l2_reg;
  }

  TORCHREC_EXT_INLINE bool is_new(float linear) const {
    return preserves != 0u && std::bit_cast<uint32_t>(linear) == 0x80000000u;
  }

  TORCHREC_EXT_INLINE float next_linear(float linear, float weight, float g, float previous,
                                        float current, float seed_factor) const {
    const float step = (current - previous) * rate * weight;
    if constexpr (kExtended) {
      const float threshold = weight == 0.0f ? 0.0f : std::copysign(l1_reg, weight);
      const float seed = -(weight * denominator(previous) * seed_factor + threshold);
      const float start = is_new(linear) ? seed : linear;
      return start + gradient_factor * (g + twice_shrinkage * weight) - step + 0.0f;
    } else {
      return linear + g - step;
    }
  }

  TORCHREC_EXT_INLINE bool is_zero(float linear) const { return std::fabs(linear) <= l1_reg; }

  // Negated, not turned round: the boundary itself must be an exact +0, which only <= gives.
  TORCHREC_EXT_INLINE float numerator(float linear) const {
    return -(linear - std::copysign(l1_reg, linear));
  }
};

using PlainFtrl = Ftrl<true, false, false>;

}  // namespace torchrec_ext
