#include <torch/csrc/stable/library.h>

#include "cpu/ops.h"
#include "schemas.h"

namespace torchrec_ext {

STABLE_TORCH_LIBRARY(torchrec_ext, m) {
  for (const char* schema : schemas::kAll) {
    m.def(schema);
  }
}

STABLE_TORCH_LIBRARY_IMPL(torchrec_ext, CPU, m) {
  m.impl("fused_update", TORCH_BOX(&cpu::fused_update_cpu));
  m.impl("per_sample_weight_grad", TORCH_BOX(&cpu::per_sample_weight_grad_cpu));
  m.impl("sort_lookups", TORCH_BOX(&cpu::sort_lookups_cpu));
  m.impl("device_layout", TORCH_BOX(&cpu::device_layout_cpu));
  m.impl("catch_up", TORCH_BOX(&cpu::catch_up_cpu));
}

}  // namespace torchrec_ext
