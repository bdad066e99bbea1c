#pragma once

#include "../update_options.h"
#include "row_kernel.h"

namespace torchrec_ext::cuda {

// The bytes that a Step of any optimizer fits into.
inline constexpr size_t kStepSize = 256;

// Updates every row of task.segments. `step` is kStepSize bytes of device memory; step_scalars, in
// device memory, has the completed updates and the hyperparameters, while `options` only chooses the
// optimizer's variant and the rounding.
template <int kAtOnce, class Weight>
void update_rows(const Queue& queue, const UpdateTask<Weight>& task, const UpdateOptions& options,
                 const int64_t* step_scalars, void* step);

}  // namespace torchrec_ext::cuda
