// The part of CUDA's host API that launches of kernels need. "Device memory" is the host's.
#pragma once

#include <cstddef>
#include <utility>

#include "vector_types.h"

// The values are CUDA's.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevice = 101,
  cudaErrorAssert = 710,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

using cudaStream_t = struct CUstream_st*;
struct cudaLaunchAttribute;

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// For the code of the last failed launch the text says what went wrong in which block and thread.
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void* destination, int value, size_t bytes, cudaStream_t stream = {});
cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream = {});

namespace cuda_shim {

// Calls body(closure) once for every thread of the grid.
cudaError_t launch(const cudaLaunchConfig_t& config, void (*body)(const void*),
                   const void* closure);

}  // namespace cuda_shim

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  // As in CUDA, arguments are converted once, and every thread has its own copy.
  const auto run = [config, kernel](Parameters... parameters) {
    const auto thread = [&] { kernel(parameters...); };
    using Thread = decltype(thread);
    return cuda_shim::launch(
        *config, [](const void* closure) { (*static_cast<Thread*>(closure))(); }, &thread);
  };
  return run(std::forward<Arguments>(arguments)...);
}
