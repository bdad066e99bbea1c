// Counts the bytes that kernels read and write in regions of memory.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace cuda_shim {

class ByteCounter {
 public:
  int watch(uintptr_t begin, uint64_t bytes, bool once_per_warp);
  void unwatch_all() { regions_.clear(); }
  void begin_launch();
  void reset();
  // `warp`: its number in the grid.
  void count(uintptr_t begin, uintptr_t end, bool reads, bool writes, uint64_t warp);

  uint64_t read(int id) const { return regions_.at(id).read; }
  uint64_t written(int id) const { return regions_.at(id).written; }
  // "byte 12 of region 0", or nothing.
  std::string place(uintptr_t address) const;

 private:
  struct Region {
    uintptr_t begin;
    uintptr_t end;
    bool once_per_warp;
    uint64_t read = 0;
    uint64_t written = 0;
    // By warp: for each 64 bytes of the region, a bit for each byte read in this launch.
    std::unordered_map<uint64_t, std::unordered_map<uint64_t, uint64_t>> seen{};
  };

  static uint64_t unseen(Region& region, uintptr_t begin, uintptr_t end, uint64_t warp);

  std::vector<Region> regions_;
};

}  // namespace cuda_shim
