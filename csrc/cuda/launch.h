#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>

namespace torchrec_ext::cuda {

inline constexpr int kBlockThreads = 128;
// Blocks that a multiprocessor must hold at once: leaves the compiler 128 registers a thread, so that
// it spills none to have more blocks than that.
inline constexpr int kMinBlocks = 4;
// A grid is no larger than this: threads take several items instead.
inline constexpr int64_t kBlocksPerMultiprocessor = 16;

// Where the kernels of one op run.
struct Queue {
  cudaStream_t stream;
  int64_t multiprocessors;
};

// Launches a kernel with about `threads` threads, which share `items` among themselves in a grid-stride
// loop. `shared_bytes` is a block's dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch(const Queue& queue, const char* name, void (*kernel)(Parameters...), int64_t threads,
            size_t shared_bytes, const Arguments&... arguments) {
  if (threads == 0) {
    return;
  }
  const int64_t blocks = std::min((threads + kBlockThreads - 1) / kBlockThreads,
                                  queue.multiprocessors * kBlocksPerMultiprocessor);
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = dim3(static_cast<unsigned>(blocks));
  configuration.blockDim = dim3(kBlockThreads);
  configuration.dynamicSmemBytes = shared_bytes;
  configuration.stream = queue.stream;
  const cudaError_t error = cudaLaunchKernelEx(&configuration, kernel, arguments...);
  STD_TORCH_CHECK(error == cudaSuccess, "the kernel ", name, ": ", cudaGetErrorString(error));
}

__device__ __forceinline__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ int64_t thread_count() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

}  // namespace torchrec_ext::cuda
