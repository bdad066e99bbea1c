// Kernels that show what the shim does, and with which mistakes; tests/cuda/test_shim.py runs them.
#include "selftest.h"

namespace {

// Each group of lanes does another number of steps, so that groups diverge.
template <class T>
__global__ void __launch_bounds__(64) rotate_kernel(const T* in, T* out, int width) {
  const unsigned mask = group_mask(width);
  const int steps = static_cast<int>(threadIdx.x) / width + 1;
  T value = in[threadIdx.x];
  for (int step = 0; step < steps; ++step) {
    value = __shfl_sync(mask, value, static_cast<int>(threadIdx.x + 1), width);
  }
  out[threadIdx.x] = value;
}

__global__ void fold_kernel(const float* in, float* sums, int width) {
  float sum = in[threadIdx.x];
  for (int offset = width / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(group_mask(width), sum, offset, width);
  }
  sums[threadIdx.x] = sum;
}

__global__ void shift_kernel(const int* in, int* down, int* up, int* crossed, int width) {
  down[threadIdx.x] = __shfl_down_sync(~0U, in[threadIdx.x], 3, width);
  up[threadIdx.x] = __shfl_up_sync(~0U, in[threadIdx.x], 3, width);
  crossed[threadIdx.x] = __shfl_xor_sync(~0U, in[threadIdx.x], 12, width);
}

// Lane 0 takes the value of a lane that its mask does not name.
__global__ void unnamed_lane_kernel(float* out) {
  const float value = __shfl_sync(group_mask(16), 1.0F, threadIdx.x == 0 ? 16 : 0);
  if (threadIdx.x < 16) out[threadIdx.x] = value;
}

__global__ void vote_kernel(const int* in, unsigned* ballots, int* any, int* all) {
  const unsigned mask = group_mask(8);
  ballots[threadIdx.x] = __ballot_sync(mask, in[threadIdx.x]);
  any[threadIdx.x] = __any_sync(mask, in[threadIdx.x]);
  all[threadIdx.x] = __all_sync(mask, in[threadIdx.x]);
}

// Writes to shared memory, and reads what another thread wrote. `barriers`: 0, 1 or 2 of them.
__global__ void mirror_kernel(const float* in, float* out, int barriers) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  shared[threadIdx.x] = in[i];
  for (int barrier = 0; barrier < barriers; ++barrier) __syncthreads();
  out[i] = shared[blockDim.x - 1 - threadIdx.x];
}

// The last block to run, or the last thread, wins.
__global__ void last_wins_kernel(unsigned* out) { *out = blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void early_exit_kernel(const float* in, float* out, unsigned count) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  if (threadIdx.x >= count) return;
  shared[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = shared[count - 1 - threadIdx.x];
}

__global__ void poison_kernel(float* out) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  out[blockIdx.x * blockDim.x + threadIdx.x] = shared[threadIdx.x];
  shared[threadIdx.x] = 1.0F;
}

__global__ void overrun_kernel(unsigned index) {
  static_cast<float*>(dynamic_shared_memory())[index] = 1.0F;
}

// Uses much of the stack, and may wait there for a lane that never comes.
template <int size>
__global__ void large_stack_kernel(char* out, bool waits) {
  volatile char memory[size];
  for (int i = 0; i < size; ++i) memory[i] = static_cast<char>(i);
  if (waits) __syncwarp(3);
  *out = memory[size - 1];
}

enum Mistake : int {
  kExitedLane,
  kOtherCollective,
  kOtherPlace,
  kOtherBarrier,
  kMaskWithoutSelf,
  kTrap,
  kBadWidth,
};

__global__ void mistake_kernel(int mistake) {
  const bool odd_one = threadIdx.x == 5;
  float value = 1.0F;
  switch (mistake) {
    case kExitedLane:
      if (odd_one) return;
      value = __shfl_xor_sync(~0U, value, 1);
      break;
    case kOtherCollective:
      if (odd_one) {
        __ballot_sync(0xFF, 1);
      } else if (threadIdx.x < 8) {
        value = __shfl_xor_sync(0xFF, value, 1);
      }
      break;
    case kOtherPlace:
      if (odd_one) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      break;
    case kOtherBarrier:
      if (odd_one) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case kMaskWithoutSelf:
      __syncwarp(~0U << 1);
      break;
    case kTrap:
      if (odd_one && blockIdx.x == 1) __trap();
      break;
    default:
      value = __shfl_sync(~0U, value, 0, 12);
  }
}

// Enough barriers that random orders differ.
__global__ void sum_kernel(const float* in, float* out) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  const unsigned i = threadIdx.x;
  shared[i] = in[blockIdx.x * blockDim.x + i];
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (i < half) shared[i] += shared[i + half];
  }
  if (i == 0) out[blockIdx.x] = shared[0];
}

}  // namespace

EXPORT int rotate_floats(const float* in, float* out, int width) {
  return launch({1, 64}, rotate_kernel<float>, in, out, width);
}
EXPORT int rotate_doubles(const double* in, double* out, int width) {
  return launch({1, 64}, rotate_kernel<double>, in, out, width);
}
EXPORT int fold(const float* in, float* sums, int width) {
  return launch({1, 64}, fold_kernel, in, sums, width);
}
EXPORT int shift(const int* in, int* down, int* up, int* crossed, int width) {
  return launch({1, 32}, shift_kernel, in, down, up, crossed, width);
}
EXPORT int unnamed_lane(float* out) { return launch({1, 32}, unnamed_lane_kernel, out); }
EXPORT int vote(const int* in, unsigned* ballots, int* any, int* all) {
  return launch({1, 32}, vote_kernel, in, ballots, any, all);
}
EXPORT int mirror(const float* in, float* out, int blocks, int threads, int barriers) {
  const Sizes sizes{static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                    threads * sizeof(float)};
  return launch(sizes, mirror_kernel, in, out, barriers);
}
EXPORT int last_wins(unsigned* out, int blocks, int threads) {
  return launch({static_cast<unsigned>(blocks), static_cast<unsigned>(threads)}, last_wins_kernel,
                out);
}
EXPORT int early_exit(const float* in, float* out, unsigned count) {
  return launch({1, 64, 256}, early_exit_kernel, in, out, count);
}
EXPORT int poison(float* out) { return launch({2, 32, 128}, poison_kernel, out); }
EXPORT int overrun(unsigned index, unsigned bytes) {
  return launch({1, 1, bytes}, overrun_kernel, index);
}
EXPORT int leave_large_stack(char* out) {
  return launch({1, 1}, large_stack_kernel<16384>, out, true);
}
EXPORT int use_large_stack(char* out) {
  return launch({1, 1}, large_stack_kernel<65536>, out, false);
}
EXPORT int mistake(int mistake) { return launch({2, 32}, mistake_kernel, mistake); }
EXPORT int sum(const float* in, float* out, int blocks, int threads) {
  const Sizes sizes{static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
                    threads * sizeof(float)};
  return launch(sizes, sum_kernel, in, out);
}
EXPORT int launch_of(unsigned x, unsigned y, unsigned z, unsigned blocks, size_t shared_bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(x, y, z);
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, mistake_kernel, int{kTrap});
}
EXPORT int take_last_error() { return cudaGetLastError(); }
EXPORT int multiprocessors() {
  int device = -1;
  int count = -1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}
