#pragma once

#include "gradient_sum.h"

namespace torchrec_ext::cuda {

// out[i] = <the gradient of lookup i, its row>, times its scale, or 0 where it has no source. The
// lookups are not sorted: source.positions is not read.
template <int kAtOnce, class Weight>
void per_sample_weight_grad(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                            const Lookups& lookups, int64_t count, const GradientSource& source,
                            const Weights<Weight>& weights, float* out);

}  // namespace torchrec_ext::cuda
