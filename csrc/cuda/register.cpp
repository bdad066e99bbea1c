#include <torch/csrc/stable/library.h>

#include "ops.h"

namespace torchrec_ext::cuda {

STABLE_TORCH_LIBRARY_IMPL(torchrec_ext, CUDA, m) {
  m.impl("fused_update", TORCH_BOX(&fused_update_cuda));
  m.impl("per_sample_weight_grad", TORCH_BOX(&per_sample_weight_grad_cuda));
  m.impl("lookup", TORCH_BOX(&lookup_cuda));
}

}  // namespace torchrec_ext::cuda
