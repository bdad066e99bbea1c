#pragma once

#include <cstdint>

#include "../lookup.h"
#include "../rounding.h"
#include "segments.h"

namespace torchrec_ext::cpu {

// gradient_of_weights[i] = <the bag's output gradient, the row looked up>, times 1 / the bag's length
// where pooling is mean, and 0 for features with feature_requires_grad[f] == 0 (null: all features
// require it). The batch has no per-sample weights.
template <class Index, class Weight>
BadLookup per_sample_weight_grad(const Layout& layout, const Batch<Index>& batch,
                                 const float* gradient, const Weight* weights,
                                 const int32_t* feature_requires_grad, float max_gradient,
                                 float* gradient_of_weights);

}  // namespace torchrec_ext::cpu
