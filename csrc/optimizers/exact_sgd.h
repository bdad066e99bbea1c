#pragma once

#include "../catch_up.h"
#include "../weight_decay.h"
#include "optimizer.h"

namespace torchrec_ext {

// Stochastic gradient descent; with kMomentum as torch.optim.SGD, with decoupled weight decay:
//
//   weight  = weight * (1 - learning_rate * weight_decay)
//   buffer' = momentum * buffer + (1 - dampening) * g     (the first update of all is not dampened)
//   weight' = weight - learning_rate * (buffer', or g + momentum * buffer' if nesterov)
//
// Without momentum, weight' = weight - learning_rate * g.
template <bool kMomentum>
struct ExactSgd {
  static constexpr std::array kHyperparameters = {"learning_rate", "momentum", "dampening",
                                                  "nesterov", "weight_decay"};
  static constexpr auto kStates = [] {
    if constexpr (kMomentum) {
      return std::array{StateInfo{"momentum_buffer", false}};
    } else {
      return std::array<StateInfo, 0>{};
    }
  }();
  static constexpr int kReductions = 0;
  static constexpr bool kBeginsRow = false;
  static constexpr bool kCatchesUp = true;
  using Row = NoRow;

  double momentum_double;
  float learning_rate;
  float momentum;
  float gain;      // 1 - dampening
  float direct;    // how much of g itself the step has
  float buffered;  // how much of the buffer
  WeightDecay decay;

  TORCHREC_EXT_INLINE ExactSgd(const double* h, int64_t completed_updates)
      : momentum_double(h[1]),
        learning_rate(static_cast<float>(h[0])),
        momentum(static_cast<float>(h[1])),
        gain(completed_updates == 0 ? 1.0f : static_cast<float>(1.0 - h[2])),
        direct(h[3] != 0.0 ? 1.0f : 0.0f),
        buffered(h[3] != 0.0 ? static_cast<float>(h[1]) : 1.0f),
        decay(h[0], h[4], static_cast<double>(WeightDecayMode::kDecouple)) {}

  template <class Visitor>
  static void select(const double* h, int64_t completed_updates, Visitor&& visit) {
    if (h[1] == 0.0) {
      visit(ExactSgd<false>(h, completed_updates));
    } else {
      visit(ExactSgd<true>(h, completed_updates));
    }
  }

  TORCHREC_EXT_INLINE float column(float weight, float g, float* states, NoRow) const {
    const float decayed = decay.weight(weight);
    if constexpr (kMomentum) {
      states[0] = momentum * states[0] + gain * g;
      return decayed - learning_rate * (direct * g + buffered * states[0]);
    } else {
      return decayed - learning_rate * g;
    }
  }

  struct CatchUpFactors {
    float buffer;
  };

  TORCHREC_EXT_INLINE CatchUpFactors catch_up_factors(double slept) const {
    return {static_cast<float>(power(momentum_double, slept))};
  }

  TORCHREC_EXT_INLINE float catch_up_column(float weight, float* states, const CatchUp& catch_up,
                                            CatchUpFactors factors) const {
    if constexpr (kMomentum) {
      const float step = catch_up.step * states[0];
      states[0] *= factors.buffer;
      return catch_up.keep * weight - step;
    } else {
      return catch_up.keep * weight;
    }
  }

  TORCHREC_EXT_INLINE double catch_up_eps() const { return 0.0; }
};

}  // namespace torchrec_ext
