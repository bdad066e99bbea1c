// Hears of every access that an instrumented kernel makes.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "race_counter.h"
#include "race_shadow.h"
#include "shim_block.h"

namespace cuda_shim {

struct Operation {
  bool reads;
  bool writes;
  bool atomic;
};

class RaceDetector final : public Observer {
 public:
  RaceDetector();

  void launch_begins() override;
  void block_begins(unsigned threads, const void* shared_memory, size_t bytes) override;
  void block_synchronized() override { order_.join_block(); }
  void warp_synchronized(unsigned warp, uint32_t mask) override { order_.join_warp(warp, mask); }
  void thread_exits(unsigned thread) override { order_.exit(thread); }
  void reset() override;

  void access(const void* address, size_t bytes, const Operation& operation, void* instruction);

  uint64_t races() const { return races_; }
  const char* report();

  ByteCounter counter;

 private:
  struct Race {
    uintptr_t address;
    Access first;
    Access second;
  };

  bool is_race(uintptr_t begin, uintptr_t end, Access access);
  void remember(uintptr_t address, const Access& first, const Access& second);
  std::string place(uintptr_t address) const;

  bool is_busy_ = false;
  Synchronization order_;
  Shadow shadow_;
  unsigned warps_ = 0;
  uintptr_t shared_begin_ = 0;
  uintptr_t shared_end_ = 0;
  uint64_t races_ = 0;
  // One race for each pair of instructions.
  std::set<std::pair<void*, void*>> known_;
  std::vector<std::pair<std::string, Race>> examples_;
  std::string report_;
};

extern RaceDetector race_detector;

}  // namespace cuda_shim
