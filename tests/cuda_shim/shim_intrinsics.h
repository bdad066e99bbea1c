// Intrinsics of a single thread.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

template <class T>
T __ldg(const T* address) {
  return *address;
}

template <class T>
T __ldcs(const T* address) {
  return *address;
}

template <class T>
T __ldcg(const T* address) {
  return *address;
}

template <class T>
void __stcs(T* address, T value) {
  *address = value;
}

template <class T>
void __stcg(T* address, T value) {
  *address = value;
}

inline int __popc(unsigned value) { return std::popcount(value); }
inline int __popcll(unsigned long long value) { return std::popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return std::countl_zero(static_cast<unsigned>(value)); }
inline int __clzll(long long value) {
  return std::countl_zero(static_cast<unsigned long long>(value));
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((uint64_t{a} * b) >> 32);
}

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __uint_as_float(unsigned value) { return std::bit_cast<float>(value); }
inline float __int_as_float(int value) { return std::bit_cast<float>(value); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline double __longlong_as_double(long long value) { return std::bit_cast<double>(value); }

// CUDA's own are in the global namespace, for arguments of one type.
#define CUDA_SHIM_MIN_AND_MAX(type)                            \
  constexpr type min(type a, type b) { return b < a ? b : a; } \
  constexpr type max(type a, type b) { return a < b ? b : a; }
CUDA_SHIM_MIN_AND_MAX(int)
CUDA_SHIM_MIN_AND_MAX(unsigned)
CUDA_SHIM_MIN_AND_MAX(long)
CUDA_SHIM_MIN_AND_MAX(unsigned long)
CUDA_SHIM_MIN_AND_MAX(long long)
CUDA_SHIM_MIN_AND_MAX(unsigned long long)
#undef CUDA_SHIM_MIN_AND_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

// Exact only because the shim's kernels are compiled with -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// Real atomics, so that the race detector can tell them from loads and stores.
inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
