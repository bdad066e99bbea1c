#pragma once

#include "update_rows.h"

namespace torchrec_ext::cuda {

template <int kAtOnce, class Optimizer, class Rounding>
void launch_update(const Queue& queue, const UpdateTask<typename Rounding::WeightType>& task,
                   const Step<Optimizer>* step, const Rounding& rounding) {
  const int lane_count = lanes_for(task.max_dim);
  const int64_t sums = kBlockThreads / lane_count * task.max_dim;
  const size_t shared_bytes =
      Optimizer::kReductions > 0 ? static_cast<size_t>(sums) * sizeof(float) : 0;
  launch(queue, "update_rows", update_rows_kernel<kAtOnce, Optimizer, Rounding>,
         task.segments.lookups * lane_count, shared_bytes, task, step, rounding, lane_count);
}

template <int kAtOnce, class Weight>
void update_rows(const Queue& queue, const UpdateTask<Weight>& task, const UpdateOptions& options,
                 const int64_t* step_scalars, void* step) {
  const auto update = [&](const auto& optimizer) {
    using Optimizer = std::decay_t<decltype(optimizer)>;
    static_assert(sizeof(Step<Optimizer>) <= kStepSize);
    Step<Optimizer>* begun = static_cast<Step<Optimizer>*>(step);
    launch(queue, "begin_step", begin_step_kernel<Optimizer>, 1, 0, step_scalars, begun);
    with_rounding<Weight>(options, [&](const auto& rounding) {
      launch_update<kAtOnce, Optimizer>(queue, task, begun, rounding);
    });
  };
  select_optimizer(options.optimizer, options.hyperparameters, 0, update);
}

}  // namespace torchrec_ext::cuda
