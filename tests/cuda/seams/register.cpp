// In place of csrc/cuda/register.cpp: the same ops in a library of their own, for tensors on the CPU.

#include <torch/csrc/stable/library.h>

#include "cuda/ops.h"
#include "schemas.h"

namespace torchrec_ext::cuda {

STABLE_TORCH_LIBRARY(torchrec_ext_cuda_shim, m) {
  m.def(schemas::kFusedUpdate);
  m.def(schemas::kPerSampleWeightGrad);
  m.def(schemas::kLookup);
}

STABLE_TORCH_LIBRARY_IMPL(torchrec_ext_cuda_shim, CPU, m) {
  m.impl("fused_update", TORCH_BOX(&fused_update_cuda));
  m.impl("per_sample_weight_grad", TORCH_BOX(&per_sample_weight_grad_cuda));
  m.impl("lookup", TORCH_BOX(&lookup_cuda));
}

}  // namespace torchrec_ext::cuda
