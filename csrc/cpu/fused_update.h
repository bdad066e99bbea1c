#pragma once

#include <vector>

#include "../lookup.h"
#include "../update_options.h"
#include "segments.h"

namespace torchrec_ext::cpu {

// One optimizer step on every row that the batch looks up. `sorted` holds the lookups as sort_by_row
// sorts them; null: they are sorted here. Returns a bad lookup, if there is one,
// before anything changed.
template <class Index, class Weight>
BadLookup fused_update(const Layout& layout, const Batch<Index>& batch, const Segments* sorted,
                       const float* gradient, Weight* weights, const std::vector<float*>& states,
                       const UpdateOptions& options);

}  // namespace torchrec_ext::cpu
