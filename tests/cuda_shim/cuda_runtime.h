// Stands in for CUDA's header of this name, so that g++ compiles kernels and the CPU runs them. One
// operating system thread runs a grid, block by block; the threads of a block are fibers, which
// take turns at collectives, barriers and their end. build.py makes libraries, shim_control.h
// steers them.
//
// Stricter than hardware: a collective waits for every lane that its mask names, also for those
// that have exited or that the block does not have, and __syncthreads of two places in the source
// do not meet. Not there: static __shared__ and __constant__ memory, clusters, textures, threads
// that wait for another one in a loop, most atomics. Functions like powf are the host's.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "cuda_runtime_api.h"
#include "vector_types.h"

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))

// Set before each switch to a fiber.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
inline constexpr int warpSize = 32;

// The block's dynamic shared memory: as large as the launch says, aligned to 16 bytes, and full of
// NaN when a block starts.
void* dynamic_shared_memory();

#include "shim_collectives.h"
#include "shim_intrinsics.h"
