// How tests steer the shim and read what it found; from C++, or through ctypes.
#pragma once

#include <cstdint>

#define CUDA_SHIM_EXPORT __attribute__((visibility("default")))

extern "C" {

// The order in which lanes, warps and blocks run: 0 forward, 1 reverse, 2 random.
CUDA_SHIM_EXPORT void shim_set_order(int order, uint64_t seed);
// What cudaDevAttrMultiProcessorCount says; 4 at first.
CUDA_SHIM_EXPORT void shim_set_multiprocessors(int count);
// What the last failed launch died of; empty where none failed.
CUDA_SHIM_EXPORT const char* shim_last_error();
// Sets the number of launches, races and counted bytes to 0, and forgets the last error.
CUDA_SHIM_EXPORT void shim_reset_statistics();
// Launches that ran, failed ones too; not those that were refused.
CUDA_SHIM_EXPORT uint64_t shim_launches();

// Only in libraries that have the race detector:

// Accesses that race with an earlier one.
CUDA_SHIM_EXPORT uint64_t shim_race_count();
CUDA_SHIM_EXPORT const char* shim_race_report();
// Counts the bytes that kernels read and write in a region. With once_per_warp a byte that several
// lanes of a warp read in one launch counts once.
CUDA_SHIM_EXPORT int shim_watch(const void* begin, uint64_t bytes, int once_per_warp);
CUDA_SHIM_EXPORT uint64_t shim_bytes_read(int id);
CUDA_SHIM_EXPORT uint64_t shim_bytes_written(int id);
CUDA_SHIM_EXPORT void shim_unwatch_all();
}
