#include "launch_update.h"

namespace torchrec_ext::cuda {

template void update_rows<kColumnsPerLane>(const Queue&, const UpdateTask<float>&,
                                           const UpdateOptions&, const int64_t*, void*);

}  // namespace torchrec_ext::cuda
