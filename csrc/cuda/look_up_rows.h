#pragma once

#include "gradient_sum.h"

namespace torchrec_ext::cuda {

// Where the output of a lookup goes: float32, float16 or bfloat16, rounded to nearest.
struct Output {
  void* values;
  OutputType type;
  int64_t size;
};

// Looks a batch's rows up, of any width: every bag's sum or mean, or without pooling every row. A bag is
// summed in float32 from +0, in the order of its lookups, each row times its per-sample weight; the mean
// is the sum divided by the bag's length. Where the batch is bad, the kernel prints what and traps.
template <class Index, class Weight>
void look_up_rows(const Queue& queue, const DeviceLayout& layout, int64_t max_dim,
                  const Batch<Index>& batch, const Weight* weights, const Output& output);

}  // namespace torchrec_ext::cuda
