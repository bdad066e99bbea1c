#pragma once

#include <cuda_runtime.h>

namespace torchrec_ext::cuda {

// The block's dynamic shared memory, whose size the launch gives.
template <class Value>
__device__ __forceinline__ Value* dynamic_shared() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<Value*>(memory);
#else
  return static_cast<Value*>(dynamic_shared_memory());
#endif
}

}  // namespace torchrec_ext::cuda
