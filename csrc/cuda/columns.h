#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstdint>

#include "lanes.h"

namespace torchrec_ext::cuda {

// A lane's four columns of a row, as float32.
struct Columns {
  float values[kColumnsPerLane];

  // Adding to -0 gives the addend itself, +0 and -0 too: a sum that starts here starts from its first
  // element.
  static __device__ __forceinline__ Columns nothing() { return {{-0.0f, -0.0f, -0.0f, -0.0f}}; }

  __device__ __forceinline__ void add(const Columns& addend) {
    for (int v = 0; v < kColumnsPerLane; ++v) {
      values[v] += addend.values[v];
    }
  }
};

__device__ __forceinline__ Columns load_columns(const float* from) {
  const float4 loaded = *reinterpret_cast<const float4*>(from);
  return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}

__device__ __forceinline__ void store_columns(float* to, const float (&values)[kColumnsPerLane]) {
  *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
}

// The 2-byte types, in accesses of 8 bytes.
template <class Value>
__device__ __forceinline__ Value from_bits(unsigned bits) {
  return Value(static_cast<unsigned short>(bits & 0xFFFFu), Value::from_bits());
}

template <class Value>
__device__ __forceinline__ Columns load_columns(const Value* from) {
  static_assert(sizeof(Value) == 2);
  const uint2 loaded = *reinterpret_cast<const uint2*>(from);
  return {{static_cast<float>(from_bits<Value>(loaded.x)),
           static_cast<float>(from_bits<Value>(loaded.x >> 16)),
           static_cast<float>(from_bits<Value>(loaded.y)),
           static_cast<float>(from_bits<Value>(loaded.y >> 16))}};
}

template <class Value>
__device__ __forceinline__ void store_columns(Value* to, const Value (&values)[kColumnsPerLane]) {
  static_assert(sizeof(Value) == 2);
  const auto pair = [&](int first) {
    return static_cast<unsigned>(values[first].x) | static_cast<unsigned>(values[first + 1].x)
                                                        << 16;
  };
  *reinterpret_cast<uint2*>(to) = make_uint2(pair(0), pair(2));
}

// The same for a lane's columns: `from` and `to` are the first of them.
template <class Value>
__device__ __forceinline__ Columns load_columns(const Value* from,
                                                const LaneColumns<kColumnsPerLane>& /*all*/) {
  return load_columns(from);
}

template <class Value>
__device__ __forceinline__ void store_columns(Value* to, const Value (&values)[kColumnsPerLane],
                                              const LaneColumns<kColumnsPerLane>& /*all*/) {
  store_columns(to, values);
}

// Columns that the row does not have are +0 here.
template <class Value>
__device__ __forceinline__ Columns load_columns(const Value* from, const LaneColumns<1>& columns) {
  Columns loaded{};
  for (int v = 0; v < kColumnsPerLane; ++v) {
    if (columns.has(v)) {
      loaded.values[v] = static_cast<float>(from[v * columns.step]);
    }
  }
  return loaded;
}

template <class Value>
__device__ __forceinline__ void store_columns(Value* to, const Value (&values)[kColumnsPerLane],
                                              const LaneColumns<1>& columns) {
  for (int v = 0; v < kColumnsPerLane; ++v) {
    if (columns.has(v)) {
      to[v * columns.step] = values[v];
    }
  }
}

}  // namespace torchrec_ext::cuda
