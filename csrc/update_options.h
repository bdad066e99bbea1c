#pragma once

#include <cstdint>
#include <type_traits>

#include "optimizers/registry.h"
#include "rounding.h"

namespace torchrec_ext {

struct UpdateOptions {
  OptimType optimizer;
  const double* hyperparameters;
  float max_gradient;  // infinity where the gradient is not clipped
  bool stochastic_rounding;
  uint64_t seed;
  uint64_t step;
};

// Calls body(rounding) with the rounding that the options choose.
template <class Weight, class Body>
void with_rounding(const UpdateOptions& options, const Body& body) {
  if constexpr (!std::is_same_v<Weight, float>) {
    if (options.stochastic_rounding) {
      return body(StochasticRounding<Weight>{options.seed, options.step});
    }
  }
  body(NearestRounding<Weight>{});
}

}  // namespace torchrec_ext
