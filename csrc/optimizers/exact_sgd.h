#pragma once

#include "optimizer.h"

namespace torchrec_ext {

//   weight' = weight - learning_rate * g
struct ExactSgd {
  static constexpr std::array kHyperparameters = {"learning_rate"};
  static constexpr std::array<StateInfo, 0> kStates = {};
  static constexpr bool kReducesRow = false;
  using Row = NoRow;

  float learning_rate;

  explicit ExactSgd(const double* h) : learning_rate(static_cast<float>(h[0])) {}

  template <class Visitor>
  static void select(const double* h, Visitor&& visit) {
    visit(ExactSgd(h));
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* /*states*/, NoRow) const {
    return weight - learning_rate * g;
  }
};

}  // namespace torchrec_ext
