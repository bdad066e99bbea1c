// CUDA's vector types with their alignments.
#pragma once

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;

  constexpr dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)
      : x(x_size), y(y_size), z(z_size) {}
  constexpr dim3(uint3 sizes) : x(sizes.x), y(sizes.y), z(sizes.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

#define CUDA_SHIM_VECTOR_OF_2(name, element, alignment) \
  struct alignas(alignment) name {                      \
    element x, y;                                       \
  };                                                    \
  constexpr name make_##name(element x, element y) { return {x, y}; }

#define CUDA_SHIM_VECTOR_OF_4(name, element, alignment) \
  struct alignas(alignment) name {                      \
    element x, y, z, w;                                 \
  };                                                    \
  constexpr name make_##name(element x, element y, element z, element w) { return {x, y, z, w}; }

CUDA_SHIM_VECTOR_OF_2(uchar2, unsigned char, 2)
CUDA_SHIM_VECTOR_OF_4(uchar4, unsigned char, 4)
CUDA_SHIM_VECTOR_OF_2(ushort2, unsigned short, 4)
CUDA_SHIM_VECTOR_OF_4(ushort4, unsigned short, 8)
CUDA_SHIM_VECTOR_OF_2(int2, int, 8)
CUDA_SHIM_VECTOR_OF_4(int4, int, 16)
CUDA_SHIM_VECTOR_OF_2(uint2, unsigned, 8)
CUDA_SHIM_VECTOR_OF_4(uint4, unsigned, 16)
CUDA_SHIM_VECTOR_OF_2(float2, float, 8)
CUDA_SHIM_VECTOR_OF_4(float4, float, 16)
CUDA_SHIM_VECTOR_OF_2(double2, double, 16)
CUDA_SHIM_VECTOR_OF_2(longlong2, long long, 16)
CUDA_SHIM_VECTOR_OF_2(ulonglong2, unsigned long long, 16)

#undef CUDA_SHIM_VECTOR_OF_2
#undef CUDA_SHIM_VECTOR_OF_4

constexpr uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
