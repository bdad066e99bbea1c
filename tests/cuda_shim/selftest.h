// What the kernels of the shim's own tests share.
#pragma once

#include <cuda_runtime.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Sizes {
  unsigned blocks;
  unsigned threads;
  size_t shared_bytes = 0;
};

template <class... Parameters, class... Arguments>
int launch(const Sizes& sizes, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(sizes.blocks);
  config.blockDim = dim3(sizes.threads);
  config.dynamicSmemBytes = sizes.shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The mask of this thread's group of 8, 16 or 32 lanes.
__device__ __forceinline__ unsigned group_mask(unsigned lanes) {
  const unsigned first = lanes == 32 ? ~0U : (1U << lanes) - 1;
  return first << (threadIdx.x % 32 / lanes * lanes);
}
