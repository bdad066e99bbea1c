// What threads do together. All lanes that a mask names must arrive at the same collective; lanes
// of other masks are independent of them.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <source_location>

namespace cuda_shim {

// Reports name the line of the kernel that called.
using Where = std::source_location;

enum class Collective : uint8_t {
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
  kSyncWarp,
  kSyncThreads,
};

struct Shuffle {
  Collective kind;
  unsigned mask;
  int operand;  // lane, distance or lane mask
  int width;
};

// The value, in the low `bytes` bytes, of the lane that `shuffle` selects. A lane that the mask
// does not name gives all ones (NaN, -1).
uint64_t exchange(const Shuffle& shuffle, uint64_t value, unsigned bytes, const Where& where);
unsigned vote(Collective kind, unsigned mask, bool predicate, const Where& where);
void synchronize_warp(unsigned mask, const Where& where);
void synchronize_block(const Where& where);
[[noreturn]] void trap(const Where& where);

template <class T>
T exchange_value(const Shuffle& shuffle, T value, const Where& where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles exchange 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(shuffle, bits, sizeof(T), where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_shim

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32,
              const cuda_shim::Where& where = cuda_shim::Where::current()) {
  return cuda_shim::exchange_value({cuda_shim::Collective::kShuffle, mask, lane, width}, value,
                                   where);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32,
                 const cuda_shim::Where& where = cuda_shim::Where::current()) {
  return cuda_shim::exchange_value(
      {cuda_shim::Collective::kShuffleUp, mask, static_cast<int>(distance), width}, value, where);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                   const cuda_shim::Where& where = cuda_shim::Where::current()) {
  return cuda_shim::exchange_value(
      {cuda_shim::Collective::kShuffleDown, mask, static_cast<int>(distance), width}, value, where);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  const cuda_shim::Where& where = cuda_shim::Where::current()) {
  return cuda_shim::exchange_value({cuda_shim::Collective::kShuffleXor, mask, lane_mask, width},
                                   value, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              const cuda_shim::Where& where = cuda_shim::Where::current()) {
  return cuda_shim::vote(cuda_shim::Collective::kBallot, mask, predicate != 0, where);
}

inline int __any_sync(unsigned mask, int predicate,
                      const cuda_shim::Where& where = cuda_shim::Where::current()) {
  return cuda_shim::vote(cuda_shim::Collective::kAny, mask, predicate != 0, where) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      const cuda_shim::Where& where = cuda_shim::Where::current()) {
  return cuda_shim::vote(cuda_shim::Collective::kAll, mask, predicate != 0, where) == mask;
}

inline void __syncwarp(unsigned mask = ~0U,
                       const cuda_shim::Where& where = cuda_shim::Where::current()) {
  cuda_shim::synchronize_warp(mask, where);
}

inline void __syncthreads(const cuda_shim::Where& where = cuda_shim::Where::current()) {
  cuda_shim::synchronize_block(where);
}

[[noreturn]] inline void __trap(const cuda_shim::Where& where = cuda_shim::Where::current()) {
  cuda_shim::trap(where);
}
