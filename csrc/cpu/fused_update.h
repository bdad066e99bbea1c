#pragma once

#include <cstdint>
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

// One optimizer step on every row that the batch looks up. Returns a bad lookup, if there is one,
// before anything changed.
template <class Index, class Weight>
BadLookup fused_update(const Layout& layout, const Batch<Index>& batch, const float* gradient,
                       Weight* weights, const std::vector<float*>& states,
                       const UpdateOptions& options);

}  // namespace torchrec_ext::cpu
