#pragma once

// Functions shared by the CPU loops and the CUDA kernels. They must be inlined into their caller:
// on the CPU the caller is compiled once per instruction set, and only inlined code is vectorised
// with it.
#if defined(__CUDACC__)
#define TORCHREC_EXT_INLINE __host__ __device__ __forceinline__
#else
#define TORCHREC_EXT_INLINE inline __attribute__((always_inline))
#endif

// The same for a lambda, between its parameters and its body.
#if defined(__CUDACC__)
#define TORCHREC_EXT_INLINE_LAMBDA
#else
#define TORCHREC_EXT_INLINE_LAMBDA __attribute__((always_inline))
#endif
