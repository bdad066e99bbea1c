// Who read and wrote which bytes in this launch, and which accesses are ordered.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace cuda_shim {

// A thread at a point of its execution. `clock` counts its synchronizations within its warp.
struct Moment {
  uint64_t block;
  uint32_t barrier;
  uint32_t clock;
  uint32_t thread;
};

struct Access {
  Moment moment;
  void* instruction;
  uint8_t bytes;  // bit i: byte i of the granule
  bool writes;
  bool atomic;
};

// What synchronization orders in the running block. Barriers order all its threads; within a warp
// there is a vector clock for each lane, which __syncwarp joins.
class Synchronization {
 public:
  void begin_block(unsigned threads);
  void join_block() { ++barrier_; }
  void join_warp(unsigned warp, uint32_t mask);
  void exit(unsigned thread) { exit_barrier_[thread] = barrier_; }

  Moment now(uint64_t block, unsigned thread) const;
  // Whether `earlier` happens before anything that the thread of `now` does from now on.
  bool ordered(const Moment& earlier, const Moment& now) const;

 private:
  using Clocks = std::array<std::array<uint32_t, 32>, 32>;  // [lane that knows][lane known]

  uint32_t barrier_ = 0;
  std::vector<Clocks> warps_;
  // The barrier that an exited thread never reached: it orders nothing with that thread.
  std::vector<uint32_t> exit_barrier_;
};

class Shadow {
 public:
  static constexpr uintptr_t kGranule = 4;

  void begin_launch();
  void forget(uintptr_t begin, uintptr_t end);
  // Notes an access to one granule, and gives an earlier one that it races with, or null.
  const Access* note(uintptr_t granule, const Access& access, const Synchronization& order);

 private:
  struct Cell {
    uint32_t launch = 0;  // accesses of earlier launches do not matter
    std::vector<Access> accesses;
  };
  static constexpr uintptr_t kCells = 1024;
  static constexpr size_t kMaxPages = 4096;  // kept for the next launch: 128 MiB and more
  using Page = std::array<Cell, kCells>;

  Cell& cell(uintptr_t granule);

  uint32_t launch_ = 0;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages_;
  uintptr_t last_number_ = ~uintptr_t{0};
  Page* last_page_ = nullptr;
  Access found_{};
};

}  // namespace cuda_shim
