#include "shim_block.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace cuda_shim {

Block block;

void Turns::set(Order order, uint64_t seed) {
  order_ = order;
  state_ = seed * 0x9E3779B97F4A7C15U + 1;
}

// SplitMix64 (Steele, Lea, Flood 2014).
uint64_t Turns::below(uint64_t bound) {
  uint64_t z = state_ += 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return (z ^ (z >> 31)) % bound;
}

unsigned Turns::pick(uint32_t candidates) {
  if (order_ == Order::kForward) return static_cast<unsigned>(std::countr_zero(candidates));
  if (order_ == Order::kReverse) return kLanes - 1 - std::countl_zero(candidates);
  for (uint64_t skip = below(std::popcount(candidates)); skip > 0; --skip) {
    candidates &= candidates - 1;
  }
  return static_cast<unsigned>(std::countr_zero(candidates));
}

// Lanes take turns; a warp runs until all its lanes wait, which lets it get far ahead of the
// others. In random order it may lose its turn after every round.
Thread* Block::next() {
  for (;;) {
    Warp& warp = warps_[warp_];
    turn_ &= warp.runnable;
    if (turn_ != 0) {
      const unsigned lane = turns.pick(turn_);
      turn_ &= ~(1U << lane);
      return &threads_[warp_ * kLanes + lane];
    }
    const bool stays = turns.order() != Order::kRandom || turns.below(2) == 0;
    if (warp.runnable == 0) ready_warps_ &= ~(1U << warp_);
    if (ready_warps_ == 0) return nullptr;
    if (warp.runnable == 0 || !stays) warp_ = turns.pick(ready_warps_);
    turn_ = warps_[warp_].runnable;
  }
}

void Block::resume(Thread& thread) {
  Context& from = running_ == nullptr ? launcher_ : running_->context;
  running_ = &thread;
  threadIdx = thread.index;
  switch_context(from, thread.context);
}

void Block::give_turn() {
  Thread* const thread = next();
  if (thread == running_) return;
  if (thread != nullptr) return resume(*thread);
  Thread& last = *running_;
  running_ = nullptr;
  switch_context(last.context, launcher_);
}

void Block::enter() {
  arrived_in_context();
  block.body_(block.closure_);
  block.exit_thread();
}

void Block::exit_thread() {
  Thread& thread = *running_;
  Warp& warp = warps_[thread.warp()];
  warp.live &= ~thread.bit();
  warp.runnable &= ~thread.bit();
  --live_;
  if (observer != nullptr) observer->thread_exits(thread.number);
  if (live_ > 0 && at_barrier_ == live_) release_barrier();
  Thread* const after = next();
  running_ = after;
  if (after == nullptr) leave_context(thread.context, launcher_);
  threadIdx = after->index;
  leave_context(thread.context, after->context);
}

void Block::fail(cudaError_t code, const std::string& text) {
  failure_ = {code, text};
  Thread& thread = *running_;
  running_ = nullptr;
  leave_context(thread.context, launcher_);
}

void Block::prepare_threads(unsigned threads) {
  if (threads_.size() < threads) threads_.resize(threads);
  uint3 index = {0, 0, 0};
  for (unsigned i = 0; i < threads; ++i) {
    Thread& thread = threads_[i];
    thread.index = index;
    thread.number = i;
    prepare(thread.context, stack_of(i), enter, abandoned_);
    if (++index.x < blockDim.x) continue;
    index.x = 0;
    if (++index.y < blockDim.y) continue;
    index.y = 0;
    ++index.z;
  }
  ready_warps_ = 0;
  for (unsigned i = 0; i * kLanes < threads; ++i) {
    const unsigned lanes = threads - i * kLanes;
    const uint32_t all = lanes >= kLanes ? ~0U : (1U << lanes) - 1;
    warps_[i].exists = warps_[i].live = warps_[i].runnable = all;
    warps_[i].group_count = 0;
    ready_warps_ |= 1U << i;
  }
}

Failure Block::run(unsigned threads, void (*body)(const void*), const void* closure) {
  prepare_threads(threads);
  body_ = body;
  closure_ = closure;
  failure_ = {};
  live_ = threads;
  at_barrier_ = 0;
  launcher_ = {};
  abandoned_ = true;
  warp_ = turns.pick(ready_warps_);
  turn_ = 0;
  resume(*next());
  if (failure_.code == cudaSuccess && live_ > 0) {
    failure_ = {cudaErrorLaunchFailure, Report(*this).deadlock()};
  }
  abandoned_ = failure_.code != cudaSuccess;
  return failure_;
}

Group& Block::join_group(Warp& warp, const Thread& thread) {
  const Wait& wait = thread.wait;
  for (unsigned i = 0; i < warp.group_count; ++i) {
    Group& group = warp.groups[i];
    if (group.mask != wait.mask) continue;
    if (group.kind != wait.kind || group.bytes != wait.bytes) {
      fail(cudaErrorLaunchFailure, Report(*this).diverged(thread, group));
    }
    return group;
  }
  Group& group = warp.groups[warp.group_count++];
  group = {wait.kind, wait.bytes, wait.mask, 0};
  return group;
}

// The last lane to arrive does the work of all, so that none can overwrite a value early.
void Block::complete(Warp& warp, unsigned first_thread, const Group& group) {
  std::array<uint64_t, kLanes> values;
  uint64_t votes = 0;
  for (uint32_t left = group.mask; left != 0; left &= left - 1) {
    const unsigned lane = static_cast<unsigned>(std::countr_zero(left));
    values[lane] = threads_[first_thread + lane].wait.value;
    votes |= (values[lane] & 1) << lane;
  }
  for (uint32_t left = group.mask; left != 0; left &= left - 1) {
    Wait& wait = threads_[first_thread + std::countr_zero(left)].wait;
    if (wait.bytes == 0) {
      wait.value = votes;
    } else {
      const bool named = wait.source < kLanes && (group.mask >> wait.source & 1) != 0;
      wait.value = named ? values[wait.source] : ~uint64_t{0};
    }
  }
  warp.runnable |= group.mask;
  if (group.kind == Collective::kSyncWarp && observer != nullptr) {
    observer->warp_synchronized(first_thread / kLanes, group.mask);
  }
}

uint64_t Block::exchange(const Wait& wait) {
  Thread& thread = *running_;
  Warp& warp = warps_[thread.warp()];
  thread.wait = wait;
  if ((wait.mask & thread.bit()) == 0) {
    fail(cudaErrorLaunchFailure, Report(*this).at(thread, wait.where) + " calls " +
                                     Report(*this).wait(wait) + ": the mask does not name lane " +
                                     std::to_string(thread.lane()) + ", which calls");
  }
  Group& group = join_group(warp, thread);
  group.arrived |= thread.bit();
  warp.runnable &= ~thread.bit();
  if (group.arrived == group.mask) {
    complete(warp, thread.number - thread.lane(), group);
    group = warp.groups[--warp.group_count];
  }
  give_turn();
  return thread.wait.value;
}

void Block::release_barrier() {
  at_barrier_ = 0;
  for (unsigned i = 0; i < warps_.size() && i * kLanes < blockDim.x * blockDim.y * blockDim.z;
       ++i) {
    Warp& warp = warps_[i];
    warp.runnable = warp.live;
    if (warp.live != 0) ready_warps_ |= 1U << i;
  }
  if (observer != nullptr) observer->block_synchronized();
}

void Block::synchronize(const Where& where) {
  Thread& thread = *running_;
  Warp& warp = warps_[thread.warp()];
  thread.wait = {Collective::kSyncThreads, 0, 0, kLanes, 0, where};
  warp.runnable &= ~thread.bit();
  if (at_barrier_ == 0) first_at_barrier_ = thread.number;
  const Where& first = threads_[first_at_barrier_].wait.where;
  if (first.line() != where.line() || first.column() != where.column()) {
    fail(cudaErrorLaunchFailure, Report(*this).other_barrier(thread, threads_[first_at_barrier_]));
  }
  if (++at_barrier_ == live_) release_barrier();
  give_turn();
}

}  // namespace cuda_shim
