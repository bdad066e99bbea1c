// Kernels with and without races, and some whose bytes are known.
#include "selftest.h"

namespace {

// Groups of 8 lanes read what another lane of the group wrote. `barriers`: 0, 1 or 2 of them.
__global__ void mirror_in_group_kernel(const float* in, float* out, int barriers) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  shared[threadIdx.x] = in[threadIdx.x];
  for (int barrier = 0; barrier < barriers; ++barrier) __syncwarp(group_mask(8));
  out[threadIdx.x] = shared[threadIdx.x ^ 7];
}

// Groups synchronize, but lanes read what lanes of the neighbouring group wrote.
__global__ void mirror_across_groups_kernel(const float* in, float* out) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  shared[threadIdx.x] = in[threadIdx.x];
  __syncwarp(group_mask(8));
  out[threadIdx.x] = shared[threadIdx.x ^ 8];
}

// A shuffle between write and read exchanges values, but orders no memory.
__global__ void mirror_by_shuffle_kernel(const float* in, float* out) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  shared[threadIdx.x] = in[threadIdx.x];
  const int lane = __shfl_xor_sync(~0U, static_cast<int>(threadIdx.x), 31);
  out[threadIdx.x] = shared[lane];
}

// Every thread reads what thread 0 writes afterwards.
__global__ void write_after_read_kernel(float* data, float* out, int barriers) {
  out[threadIdx.x] = data[0];
  for (int barrier = 0; barrier < barriers; ++barrier) __syncthreads();
  if (threadIdx.x == 0) data[0] = 2.0F;
}

// Neighbours write neighbouring bytes.
__global__ void bytes_kernel(unsigned char* out) {
  out[threadIdx.x] = static_cast<unsigned char>(threadIdx.x);
}

__global__ void add_kernel(unsigned* sum) { atomicAdd(sum, 1U); }

__global__ void copy_kernel(const float4* in, float4* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[i];
}

// All lanes of a warp read the same index.
__global__ void gather_kernel(const long long* indices, const float* in, float* out) {
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const unsigned lane = threadIdx.x % 32;
  out[warp * 32 + lane] = in[indices[warp] * 32 + lane];
}

// A thread that exits does not take part in the barrier, which orders nothing with it.
__global__ void exit_kernel(float* out) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  if (threadIdx.x == 0) {
    shared[0] = 1.0F;
    return;
  }
  __syncthreads();
  out[threadIdx.x] = shared[0];
}

// A size that the compiler does not know makes it call memcpy.
__global__ void copy_by_call_kernel(const char* in, char* out, size_t bytes) {
  std::memcpy(out + threadIdx.x * bytes, in, bytes);
}

// Two steps, each ordered by __syncwarp within pairs of lanes: lane 0 hands a value to lane 3.
__global__ void chain_kernel(float* out, int second) {
  float* shared = static_cast<float*>(dynamic_shared_memory());
  const unsigned lane = threadIdx.x;
  if (lane == 0) shared[0] = 5.0F;
  if (lane < 2) __syncwarp(0x3);
  if (second != 0 && (lane == 1 || lane == 3)) __syncwarp(0xA);
  if (lane == 3) out[0] = shared[0];
}

// Lane 0 writes after the synchronization, and not before.
__global__ void write_after_synchronization_kernel(float* data, float* out) {
  __syncwarp();
  if (threadIdx.x == 0) data[0] = 1.0F;
  if (threadIdx.x == 1) out[0] = data[0];
}

// Lane 3 writes what lanes 0 to 2 read, and synchronizes with all of them but `stranger`.
__global__ void one_reader_left_out_kernel(float* data, float* out, unsigned stranger) {
  const unsigned lane = threadIdx.x;
  if (lane < 3) out[lane] = data[0];
  if (lane != stranger && lane < 4) __syncwarp(0xF & ~(1U << stranger));
  if (lane == 3) data[0] = 1.0F;
}

}  // namespace

EXPORT int mirror_in_group(const float* in, float* out, int barriers) {
  return launch({1, 32, 128}, mirror_in_group_kernel, in, out, barriers);
}
EXPORT int mirror_across_groups(const float* in, float* out) {
  return launch({1, 32, 128}, mirror_across_groups_kernel, in, out);
}
EXPORT int mirror_by_shuffle(const float* in, float* out) {
  return launch({1, 32, 128}, mirror_by_shuffle_kernel, in, out);
}
EXPORT int write_after_read(float* data, float* out, int threads, int barriers) {
  return launch({1, static_cast<unsigned>(threads)}, write_after_read_kernel, data, out, barriers);
}
EXPORT int bytes(unsigned char* out) { return launch({1, 64}, bytes_kernel, out); }
EXPORT int add(unsigned* sum) { return launch({3, 64}, add_kernel, sum); }
EXPORT int copy(const void* in, void* out, int blocks, int threads) {
  return launch({static_cast<unsigned>(blocks), static_cast<unsigned>(threads)}, copy_kernel,
                static_cast<const float4*>(in), static_cast<float4*>(out));
}
EXPORT int gather(const long long* indices, const float* in, float* out, int warps) {
  return launch({static_cast<unsigned>(warps) / 2, 64}, gather_kernel, indices, in, out);
}
EXPORT int exit_early(float* out) { return launch({1, 64, 4}, exit_kernel, out); }
EXPORT int copy_by_call(const char* in, char* out, size_t bytes) {
  return launch({1, 32}, copy_by_call_kernel, in, out, bytes);
}
EXPORT int chain(float* out, int second) { return launch({1, 32, 4}, chain_kernel, out, second); }
EXPORT int write_after_synchronization(float* data, float* out) {
  return launch({1, 32}, write_after_synchronization_kernel, data, out);
}
EXPORT int one_reader_left_out(float* data, float* out, unsigned stranger) {
  return launch({1, 32}, one_reader_left_out_kernel, data, out, stranger);
}
