#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "../lookup.h"
#include "../optimizers/registry.h"
#include "../rounding.h"
#include "segments.h"

namespace torchrec_ext::cpu {

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
  if constexpr (std::is_same_v<Weight, Half>) {
    if (options.stochastic_rounding) {
      return body(StochasticRounding{options.seed, options.step});
    }
  }
  body(NearestRounding<Weight>{});
}

// One optimizer step on every row that the batch looks up. `sorted` holds the lookups as sort_by_row
// sorts them; null: they are sorted here. Returns a bad lookup, if there is one,
// before anything changed.
template <class Index, class Weight>
BadLookup fused_update(const Layout& layout, const Batch<Index>& batch, const Segments* sorted,
                       const float* gradient, Weight* weights, const std::vector<float*>& states,
                       const UpdateOptions& options);

}  // namespace torchrec_ext::cpu
