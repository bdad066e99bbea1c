#include "race_shadow.h"

#include <algorithm>
#include <bit>

namespace cuda_shim {
namespace {

constexpr uint32_t kNever = ~0U;
constexpr unsigned kLanes = 32;

// Whether whatever races with `lesser` would, at the same place and time, race with `greater` too.
bool races_with_as_much(const Access& greater, const Access& lesser) {
  return (greater.writes || !lesser.writes) && (!greater.atomic || lesser.atomic);
}

// Whether what may race with the access will also race with a recorded one, because those are of
// two blocks, or of two warps since the last barrier. Without this, cells that all threads read
// would hold all threads.
bool is_represented(const std::vector<Access>& accesses, const Access& access) {
  const Moment& now = access.moment;
  const Access* first = nullptr;
  for (const Access& other : accesses) {
    if ((other.bytes & access.bytes) != access.bytes || !races_with_as_much(other, access))
      continue;
    if (first == nullptr) {
      first = &other;
      continue;
    }
    const Moment& a = first->moment;
    const Moment& b = other.moment;
    if (a.block != b.block) return true;
    if (a.block == now.block && a.barrier == now.barrier && b.barrier == now.barrier &&
        a.thread / kLanes != b.thread / kLanes) {
      return true;
    }
  }
  return false;
}

}  // namespace

void Synchronization::begin_block(unsigned threads) {
  barrier_ = 0;
  exit_barrier_.assign(threads, kNever);
  warps_.resize((threads + kLanes - 1) / kLanes);
  for (Clocks& warp : warps_) {
    warp = {};
    // A lane's own clock is ahead of what others know of it.
    for (unsigned lane = 0; lane < kLanes; ++lane) warp[lane][lane] = 1;
  }
}

void Synchronization::join_warp(unsigned warp, uint32_t mask) {
  Clocks& clocks = warps_[warp];
  std::array<uint32_t, kLanes> joined{};
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const auto& known = clocks[std::countr_zero(left)];
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      joined[lane] = std::max(joined[lane], known[lane]);
    }
  }
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    clocks[lane] = joined;
    ++clocks[lane][lane];
  }
}

Moment Synchronization::now(uint64_t block, unsigned thread) const {
  const unsigned lane = thread % kLanes;
  return {block, barrier_, warps_[thread / kLanes][lane][lane], thread};
}

bool Synchronization::ordered(const Moment& earlier, const Moment& now) const {
  if (earlier.block != now.block) return false;
  if (earlier.thread == now.thread) return true;
  if (earlier.barrier < now.barrier && exit_barrier_[earlier.thread] != earlier.barrier) {
    return true;
  }
  const unsigned warp = earlier.thread / kLanes;
  return warp == now.thread / kLanes &&
         warps_[warp][now.thread % kLanes][earlier.thread % kLanes] >= earlier.clock;
}

void Shadow::begin_launch() {
  ++launch_;
  if (pages_.size() <= kMaxPages) return;
  pages_.clear();
  last_number_ = ~uintptr_t{0};
}

Shadow::Cell& Shadow::cell(uintptr_t granule) {
  const uintptr_t number = granule / kCells;
  if (number != last_number_) {
    std::unique_ptr<Page>& page = pages_[number];
    if (page == nullptr) page = std::make_unique<Page>();
    last_number_ = number;
    last_page_ = page.get();
  }
  Cell& cell = (*last_page_)[granule % kCells];
  if (cell.launch != launch_) {
    cell.launch = launch_;
    cell.accesses.clear();
  }
  return cell;
}

void Shadow::forget(uintptr_t begin, uintptr_t end) {
  for (uintptr_t granule = begin / kGranule; granule * kGranule < end; ++granule) {
    cell(granule).accesses.clear();
  }
}

const Access* Shadow::note(uintptr_t granule, const Access& access, const Synchronization& order) {
  std::vector<Access>& accesses = cell(granule).accesses;
  const Access* race = nullptr;
  size_t kept = 0;
  for (size_t i = 0; i < accesses.size(); ++i) {
    Access other = accesses[i];
    const uint8_t common = other.bytes & access.bytes;
    if (common != 0) {
      const bool is_ordered = order.ordered(other.moment, access.moment);
      const bool is_race =
          !is_ordered && (other.writes || access.writes) && !(other.atomic && access.atomic);
      if (is_race) {
        found_ = other;
        race = &found_;
      }
      // What races with the old access would race with the new one too: it takes its place. After
      // a race any of the two will do.
      const bool is_replaced = is_ordered ? races_with_as_much(access, other)
                                          : is_race && access.writes && !access.atomic;
      if (is_replaced) other.bytes &= static_cast<uint8_t>(~common);
    }
    if (other.bytes != 0) accesses[kept++] = other;
  }
  accesses.resize(kept);
  if (!is_represented(accesses, access)) accesses.push_back(access);
  return race;
}

}  // namespace cuda_shim
