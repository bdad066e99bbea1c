// One block: its threads, what they wait for, and whose turn it is.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "shim_context.h"

namespace cuda_shim {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;

enum class Order : int { kForward = 0, kReverse = 1, kRandom = 2 };

// Turns: which of the candidates of a bit mask is next.
class Turns {
 public:
  void set(Order order, uint64_t seed);
  Order order() const { return order_; }
  unsigned pick(uint32_t candidates);
  // Random below `bound`, which is at least 1.
  uint64_t below(uint64_t bound);

 private:
  Order order_ = Order::kForward;
  uint64_t state_ = 1;
};

struct Wait {
  Collective kind;
  uint8_t bytes;  // of the value; 0 where there is none
  uint32_t mask;
  uint32_t source;  // the lane whose value to take; kLanes and more: none
  uint64_t value;   // offered, then taken
  Where where;
};

struct Thread {
  Context context;
  uint3 index;
  unsigned number;  // in its block
  Wait wait;

  unsigned warp() const { return number / kLanes; }
  unsigned lane() const { return number % kLanes; }
  uint32_t bit() const { return 1U << lane(); }
};

// Lanes of one mask that have arrived, while others have not.
struct Group {
  Collective kind;
  uint8_t bytes;
  uint32_t mask;
  uint32_t arrived;
};

struct Warp {
  uint32_t exists;
  uint32_t live;
  uint32_t runnable;
  unsigned group_count;
  std::array<Group, kLanes> groups;  // each has a waiting lane
};

struct Failure {
  cudaError_t code = cudaSuccess;
  std::string text;
};

// What the race detector hears. Calls come in the order of execution.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void launch_begins() = 0;
  virtual void block_begins(unsigned threads, const void* shared_memory, size_t bytes) = 0;
  virtual void block_synchronized() = 0;
  virtual void warp_synchronized(unsigned warp, uint32_t mask) = 0;
  virtual void thread_exits(unsigned thread) = 0;
  virtual void reset() = 0;
};

class Block {
 public:
  // Runs every thread to its end, or fails.
  Failure run(unsigned threads, void (*body)(const void*), const void* closure);

  // For the running thread:
  uint64_t exchange(const Wait& wait);
  void synchronize(const Where& where);
  [[noreturn]] void fail(cudaError_t code, const std::string& text);
  Thread* running() const { return running_; }

  Turns turns;
  // Static, so that constructors may set it in any order.
  static inline Observer* observer = nullptr;
  uint64_t number = 0;  // in its grid

 private:
  friend class Report;

  static void enter();
  void prepare_threads(unsigned threads);
  Group& join_group(Warp& warp, const Thread& thread);
  void complete(Warp& warp, unsigned first_thread, const Group& group);
  void release_barrier();
  [[noreturn]] void exit_thread();
  Thread* next();
  void give_turn();
  void resume(Thread& thread);

  std::vector<Thread> threads_;
  std::array<Warp, kMaxThreads / kLanes> warps_;
  uint32_t ready_warps_ = 0;
  unsigned warp_ = 0;  // whose lanes have their turns
  uint32_t turn_ = 0;  // lanes of it that have not had theirs
  unsigned live_ = 0;
  unsigned at_barrier_ = 0;
  unsigned first_at_barrier_ = 0;
  Thread* running_ = nullptr;
  Context launcher_;
  bool abandoned_ = false;
  void (*body_)(const void*) = nullptr;
  const void* closure_ = nullptr;
  Failure failure_;
};

extern Block block;

// What the threads of a block wait for, in words.
class Report {
 public:
  explicit Report(const Block& reported) : block_(reported) {}

  std::string at(const Thread& thread, const Where& where) const;
  std::string wait(const Wait& wait) const;
  std::string diverged(const Thread& thread, const Group& group) const;
  std::string other_barrier(const Thread& thread, const Thread& first) const;
  std::string deadlock() const;

 private:
  std::string group_members(const Thread& thread, const Group& group) const;
  std::string state(const Thread& thread) const;

  const Block& block_;
};

}  // namespace cuda_shim
